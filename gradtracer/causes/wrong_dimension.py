"""An operation runs over the wrong axis."""

from __future__ import annotations

from gradtracer.causes._wiring import audit_case, audited
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class WrongDimension(Cause):
    """An operation runs over the samples of a batch, or over another wrong axis.

    What:
        Batch and time swapped before a recurrent or attention module, a softmax over the batch, a log-softmax over
        another axis than the classes.

    Why:
        Samples that have nothing to do with each other mix, and what belongs together is never seen together.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the audit of the batch axis saw it: +6.5. Root: the module.
        Onset: the step at which it was seen, 0 where that was among the first.

    Thresholds:
        Axes are exact, and stand so in one healthy program of some six hundred, ln 650 = 6.5.

    Fixes:
        None that is live: the source must change, where the hypothesis points.

    References:
        PyTorch documentation: LSTM and MultiheadAttention (batch_first), Softmax (dim), NLLLoss (shape).
    """

    code = "wrong_dimension"
    title = "An operation runs over the wrong axis"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh what the audit saw."""
        found = audited(
            series,
            "batch_taken_for_time",
            "softmax_over_batch",
            "log_softmax_over_wrong_axis",
        )
        if not found:
            return None
        return audit_case(
            series,
            found,
            "Samples of a batch see each other, or classes do not compete.",
            "Give the module the axes it expects: batch_first=True for [batch, time, features], or a "
            "transposition before and after; name the axis of softmax and norms (dim=-1 or dim=1 for "
            "classes, never the batch).",
            onset=found[0].step if found[0].step > 9 else 0,
        )
