"""Prediction and target broadcast against each other."""

from __future__ import annotations

from gradtracer.causes._wiring import audit_case, audited
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class ShapeBroadcast(Cause):
    """Prediction and target have different shapes, and broadcast.

    What:
        A prediction [N, 1] and a target [N], or the other way round: the difference is [N, N].

    Why:
        Every prediction is compared with every target, so the model learns the mean of the targets.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the audit of the loss's shapes saw a vector become a square:
        +6.5. Root: none. Onset: the step at which it was seen.

    Thresholds:
        The shapes are exact, and stand so in one healthy program of some six hundred, ln 650 = 6.5.

    Fixes:
        None that is live: the source must change, where the hypothesis points.

    References:
        PyTorch documentation, Broadcasting semantics.
    """

    code = "shape_broadcast"
    title = "Prediction and target broadcast against each other"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh what the audit saw."""
        found = audited(
            series,
            "loss_broadcast",
        )
        if not found:
            return None
        return audit_case(
            series,
            found,
            "The mean of all pairs is least where every prediction is the mean of the targets.",
            "Give both one shape before the loss: prediction.squeeze(-1), or target.unsqueeze(-1) "
            "(target[:, None]); assert prediction.shape == target.shape.",
            onset=found[0].step if found[0].step > 9 else 0,
        )
