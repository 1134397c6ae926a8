"""A mean was taken over nothing."""

from __future__ import annotations

from gradtracer.causes._born import SEEN, birth_case, born_as
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class EmptyMean(Cause):
    """A loss or a pooled value is the mean of no elements.

    What:
        A batch whose targets are all ignored, a mask that selects nothing, a sum divided by a count of 0, the spread
        of a single row.

    Why:
        0 / 0 is NaN; one such micro-batch spoils the weights.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the loss's total weight is 0, a mean's number of elements is
        0, or a spread has n - 1 = 0: +7; a sum is divided by a constant 0: +6.5. Root: the module that the operation
        stands in, none where it is part of the loss expression. Onset: the step at which it was seen.

    Thresholds:
        The operation and its operand were seen, not inferred: ln 1000 = 7.

    Fixes:
        skip_nonfinite_step keeps the weights; rollback where they are lost already. The operation itself is changed
        in the source.

    References:
        PyTorch documentation, torch.nn.CrossEntropyLoss (ignore_index). pytorch/pytorch issue 70348.
    """

    code = "empty_mean"
    title = "A mean over nothing"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh the operation that was seen to make the first NaN."""
        found = born_as(series, "empty_mean", "sum_over_zero")
        if found is None:
            return None
        is_certain = found.code == "empty_mean"
        return birth_case(
            series,
            found,
            SEEN if is_certain else SEEN - 0.5,
            "0 divided by 0 is NaN.",
            "Skip the batch when nothing is selected, or sum and divide by the count kept above 0: "
            "F.cross_entropy(..., reduction='sum') / (target != ignore_index).sum().clamp_min(1); for "
            "a masked mean, mask.sum(...).clamp_min(1).",
        )
