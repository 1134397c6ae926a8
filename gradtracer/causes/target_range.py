"""Targets lie outside of what the loss accepts."""

from __future__ import annotations

from gradtracer.causes._wiring import SEEN, audit_case, audited
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class TargetRange(Cause):
    """Targets lie outside of what the loss accepts.

    What:
        Masks in {0, 255} or {-1, 1} for binary cross-entropy, classes in {0, 1} for a soft-margin loss, negative
        counts for a Poisson likelihood, targets beyond what a bounded output can reach.

    Why:
        The loss has no lower bound there, and falls for ever.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the audit of targets saw it: +6.5; the output is bounded and
        the targets are not, which the activation may be to blame for: +4. Root: none. Onset: the step at which it was
        seen.

    Thresholds:
        Targets were read, and stand so in one healthy program of some six hundred, ln 650 = 6.5.

    Fixes:
        None that is live: the source must change, where the hypothesis points.

    References:
        PyTorch documentation: BCELoss, SoftMarginLoss, PoissonNLLLoss.
    """

    code = "target_range"
    title = "Targets lie outside of what the loss accepts"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh what the audit saw."""
        found = audited(
            series,
            "target_out_of_range",
            "output_cannot_reach_target",
        )
        if not found:
            return None
        is_bound = found[0].code == "output_cannot_reach_target"
        return audit_case(
            series,
            found,
            "Outside of its domain the loss has no minimum.",
            "Scale the target where the data are prepared: masks to {0, 1} (do not normalise them "
            "with the image), counts to 0 and above, labels to what the loss documents.",
            onset=found[0].step if found[0].step > 9 else 0,
            ratio=SEEN - 2.5 if is_bound else SEEN,
            layer="",
        )
