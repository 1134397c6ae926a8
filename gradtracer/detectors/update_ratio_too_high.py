"""Updates that are too large for the weights and for the loss."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.detectors._running import LossScale, largest_update
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class UpdateRatioTooHigh(Detector):
    """One step moves weights by a large part of themselves, farther than the gradient can vouch for.

    What:
        Steps whose update is at least a tenth of some layer's weights (`info`: usual for small or fresh weights under
        an adaptive optimizer), and among them those that overshoot (`warning`).

    Why:
        Beyond the region in which the gradient describes the loss, a step is as likely to raise the loss as to lower
        it. Repeated, it throws away what the weights held, kills rectifiers and diverges.

    Definition:
        ``u_l = ||update_l|| / ||w_l||`` per step, and ``P = sum_l ||g_l|| ||update_l|| / |loss|``, the relative change
        of the loss that first order allows; neither has a unit. large: max_l u_l >= 0.1. overshooting: that and
        P >= 8. |loss| is its exponential mean over 20 steps, at least the newest and at least a tenth of what the loss
        has gained since the start.

    Thresholds:
        0.1 is a hundred times the ratio of about 1e-3 at which training usually goes well (Karpathy, CS231n).
        8 is where a network diverges: gradient descent on ``loss = lambda x^2 / 2`` has ``P = 2 eta lambda``. Beyond
        ``eta lambda = 2`` a quadratic diverges, but a network is first thrown to a flatter place, in healthy training
        too (Cohen et al. 2021); from ``eta lambda = 4`` on it is lost (Lewkowycz et al. 2020, section 2). A loss with a
        floor above 0 has a smaller P, so the bound errs on the quiet side. P alone is not enough: a loss near 0
        inflates it.

    Fixes:
        set_learning_rate to a tenth or less; rollback if the loss has already jumped; a warm-up if it is the first
        steps that overshoot.

    References:
        Karpathy, CS231n notes, "Ratio of weights:updates". Lewkowycz, Bahri, Dyer, Sohl-Dickstein, Gur-Ari 2020,
        arXiv:2003.02218. Cohen, Kaur, Li, Kolter, Talwalkar 2021, arXiv:2103.00065.
    """

    code = "update_ratio_too_high"
    signal = "update_ratio"

    LARGE_RATIO = 0.1
    UNSTABLE_CHANGE = 8.0

    def __init__(self) -> None:
        self._scale = LossScale()

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The size of the update at a sampled step."""
        self._scale.update(sample.loss)
        update = largest_update(sample, self._scale)
        if update is None:
            return None
        if update.ratio < self.LARGE_RATIO:
            return ()
        overshoots = update.predicted_change >= self.UNSTABLE_CHANGE
        return [
            Finding(
                state="overshooting" if overshoots else "large",
                severity=Severity.WARNING if overshoots else Severity.INFO,
                confidence=0.9 if overshoots else 0.5,
                evidence=(
                    Measure(name="update_ratio", value=update.ratio, threshold=self.LARGE_RATIO, baseline=1e-3),
                    Measure(
                        name="predicted_relative_loss_change",
                        value=update.predicted_change,
                        threshold=self.UNSTABLE_CHANGE,
                    ),
                ),
                message=f"One step moves {update.layer} by {update.ratio:.2g} of its norm; to first order it may "
                f"change the loss by {update.predicted_change:.2g} times its value.",
            )
        ]
