"""CTC has no alignment."""

from __future__ import annotations

from gradtracer.causes._born import SEEN, birth_case, born_as
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class CtcInfinite(Cause):
    """The CTC loss of a sample is infinite: its input is too short for its target.

    What:
        A clipped recording, a length computed before down-sampling, a target with repeats (each needs a blank
        between).

    Why:
        An infinite loss in one sample makes every gradient NaN.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the CTC node's own losses hold infinity: +7. Root: the module
        that the operation stands in, none where it is part of the loss expression. Onset: the step at which it was
        seen.

    Thresholds:
        The operation and its operand were seen, not inferred: ln 1000 = 7.

    Fixes:
        skip_nonfinite_step keeps the weights; rollback where they are lost already. The operation itself is changed
        in the source.

    References:
        Graves et al. 2006, ICML, section 3. PyTorch documentation, torch.nn.CTCLoss (zero_infinity).
    """

    code = "ctc_infinite"
    title = "CTC has no alignment"
    prior = 0.02

    def consider(self, series: Series) -> Case | None:
        """Weigh the operation that was seen to make the first NaN."""
        found = born_as(series, "ctc_infinite")
        if found is None:
            return None
        return birth_case(
            series,
            found,
            SEEN,
            "A target of n labels with r repeats needs at least n + r frames.",
            "Leave out samples with input_length < target_length + number of repeats, check how "
            "lengths are down-sampled, or pass zero_infinity=True to CTCLoss.",
        )
