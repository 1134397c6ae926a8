"""The output activation does not fit the loss."""

from __future__ import annotations

from gradtracer.causes._wiring import SEEN, audit_case, audited
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class LossActivationMismatch(Cause):
    """The model's last activation does not fit the loss that it feeds.

    What:
        A softmax or sigmoid before a loss that applies its own, probabilities where log-probabilities are meant,
        scores where either is, a bounded output with targets beyond the bound.

    Why:
        The gradient is a fraction of what it should be and the loss has a floor, or no floor at all.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the audit of the output activation saw it in the loss's
        graph: +6.5; targets that the output cannot reach, which the data may be to blame for: +5. Root: the module
        that applies the activation, else the last layer before. Onset: the step at which it was seen.

    Thresholds:
        The structure stands in one healthy program of some six hundred, ln 650 = 6.5.

    Fixes:
        None that is live: the source must change, where the hypothesis points.

    References:
        PyTorch documentation: CrossEntropyLoss, NLLLoss, BCEWithLogitsLoss, KLDivLoss.
    """

    code = "loss_activation_mismatch"
    title = "The output activation does not fit the loss"
    prior = 0.04

    def consider(self, series: Series) -> Case | None:
        """Weigh what the audit saw."""
        found = audited(
            series,
            "activation_into_cross_entropy",
            "activation_into_bce_with_logits",
            "nll_of_no_log_probability",
            "divergence_of_no_log_probability",
            "output_cannot_reach_target",
        )
        if not found:
            return None
        is_range = found[0].code == "output_cannot_reach_target"
        return audit_case(
            series,
            found,
            "The loss takes other numbers than it is given.",
            "Give the loss what it expects: raw scores for cross_entropy and "
            "binary_cross_entropy_with_logits (remove the activation, keep it for inference), "
            "log_softmax for nll_loss and kl_div, an unbounded output for unbounded targets.",
            onset=found[0].step if found[0].step > 9 else 0,
            source=found[0].source,
            ratio=SEEN - 1.5 if is_range else SEEN,
        )
