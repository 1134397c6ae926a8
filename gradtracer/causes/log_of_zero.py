"""A logarithm met zero."""

from __future__ import annotations

from gradtracer.causes._born import SEEN, birth_case, born_as
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class LogOfZero(Cause):
    """A logarithm received a value that had reached 0.

    What:
        log of a probability that underflowed: -log(sigmoid(x)) written by hand, log(1 - p) at p = 1, log(softmax(x)),
        p log p at p = 0.

    Why:
        In float32 sigmoid(x) is 0 below x = -104 and 1 above x = 17, so the loss is infinite once the model is sure.

    Definition:
        Evidence, with its log-likelihood ratio in nats: of the loss's graph, in forward order, a logarithm is the
        first operation that receives values at which it is not finite: +7. Root: the module that the operation stands
        in, none where it is part of the loss expression. Onset: the step at which it was seen.

    Thresholds:
        The operation and its operand were seen, not inferred: ln 1000 = 7.

    Fixes:
        skip_nonfinite_step keeps the weights; rollback where they are lost already. The operation itself is changed
        in the source.

    References:
        PyTorch documentation, torch.nn.functional.logsigmoid and binary_cross_entropy_with_logits.
    """

    code = "log_of_zero"
    title = "The logarithm of a value that reached 0"
    prior = 0.04

    def consider(self, series: Series) -> Case | None:
        """Weigh the operation that was seen to make the first NaN."""
        found = born_as(series, "log_of_zero")
        if found is None:
            return None
        return birth_case(
            series,
            found,
            SEEN,
            "The logarithm of 0 is minus infinity, and its gradient infinite.",
            "Compute the logarithm from the scores and not from the probability: F.logsigmoid(x), "
            "F.log_softmax(x), F.softplus(-x) or binary_cross_entropy_with_logits; where that is "
            "impossible, clamp the argument, torch.log(p.clamp_min(1e-6)).",
        )
