"""A row of attention sees nothing."""

from __future__ import annotations

from gradtracer.causes._born import SEEN, birth_case, born_as
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class AttentionFullyMasked(Cause):
    """A row of attention has every key masked, and a softmax of only -inf is NaN.

    What:
        A sequence that is all padding, a causal mask and a padding mask that leave nothing together, an empty memory.

    Why:
        The NaN reaches the shared projections by their gradient, even where the output of that row is thrown away.

    Definition:
        Evidence, with its log-likelihood ratio in nats: whole rows of a masked softmax are NaN while others are
        finite, and nothing before it was NaN: +7. Root: the attention module. Onset: the step at which it was seen.

    Thresholds:
        The operation and its operand were seen, not inferred: ln 1000 = 7.

    Fixes:
        skip_nonfinite_step keeps the weights; rollback where they are lost already. The operation itself is changed
        in the source.

    References:
        PyTorch documentation, torch.nn.MultiheadAttention (key_padding_mask); pytorch/pytorch issue 41508.
    """

    code = "attention_fully_masked"
    title = "A row of attention sees nothing"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh the operation that was seen to make the first NaN."""
        found = born_as(series, "attention_fully_masked")
        if found is None:
            return None
        return birth_case(
            series,
            found,
            SEEN,
            "exp(-inf) sums to 0 over the row, and 0 / 0 is NaN.",
            "Let every row see at least one key (unmask the first position of a sequence that is all "
            "padding, or drop such sequences), or fill with a large negative number, "
            "torch.finfo(dtype).min, and not with -inf.",
        )
