"""Updates that are too large for the weights and for the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer.detectors._running import BrokenPromises, LossScale, StepSize, largest_update
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
        Beyond the region in which the gradient describes the loss, a step raises the loss instead of lowering it.
        Repeated, it throws away what the weights held, kills rectifiers and diverges.

    Definition:
        ``u_l = ||update_l|| / ||w_l||`` per step, and ``P = sum_l ||g_l|| ||update_l|| / |loss|``, the relative change
        of the loss that first order allows; neither has a unit. large: max_l u_l >= 0.1. overshooting: that, P >= 8,
        and within 3 steps the loss rises by ``P |loss|`` or more, or is no longer finite. |loss| is its exponential
        mean over 20 steps, at least the newest and at least a tenth of what the loss has gained since the start.

    Thresholds:
        0.1 is a hundred times the ratio of about 1e-3 at which training usually goes well (Karpathy, CS231n).
        8 is where a network diverges: gradient descent on ``loss = lambda x^2 / 2`` has ``P = 2 eta lambda``. Beyond
        ``eta lambda = 2`` a quadratic diverges, but a network is first thrown to a flatter place, in healthy training
        too (Cohen et al. 2021); from ``eta lambda = 4`` on it is lost (Lewkowycz et al. 2020, section 2). A loss with a
        floor above 0 has a smaller P, so the bound errs on the quiet side. P alone is not enough: a loss near 0
        inflates it. The rise by as much as the promised fall begins at ``eta lambda = 4`` too; it tells a step that did
        harm from one that only looked long.

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
        self._promises: BrokenPromises[StepSize] = BrokenPromises()

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The size of the update at a sampled step, and what became of the ones before."""
        self._scale.update(sample.loss)
        findings = [self._overshoot(step, rise, update) for step, rise, update in self._promises.check(sample)[:1]]
        update = largest_update(sample, self._scale)
        if update is None:
            return findings or None
        if update.ratio >= self.LARGE_RATIO:
            if update.predicted_change >= self.UNSTABLE_CHANGE:
                self._promises.note(sample, update.work, update)
            findings.append(self._large(update))
        return findings

    def _large(self, update: StepSize) -> Finding:
        return Finding(
            state="large",
            severity=Severity.INFO,
            confidence=0.5,
            evidence=self._measures(update),
            message=f"One step moves {update.layer} by {update.ratio:.2g} of its norm.",
        )

    def _overshoot(self, step: int, rise: float, update: StepSize) -> Finding:
        became = f"rose by {rise:.3g}" if math.isfinite(rise) else "is no longer finite"
        return Finding(
            state="overshooting",
            severity=Severity.WARNING,
            confidence=0.95,
            evidence=(
                *self._measures(update),
                Measure(
                    name="loss_rise",
                    value=rise if math.isfinite(rise) else None,
                    threshold=update.work,
                    num_non_finite=0 if math.isfinite(rise) else 1,
                ),
            ),
            message=f"The update of step {step} moved {update.layer} by {update.ratio:.2g} of its norm. To first order "
            f"the loss could fall by {update.work:.3g}; it {became}.",
            since=step,
        )

    def _measures(self, update: StepSize) -> tuple[Measure, ...]:
        return (
            Measure(name="update_ratio", value=update.ratio, threshold=self.LARGE_RATIO, baseline=1e-3),
            Measure(
                name="predicted_relative_loss_change",
                value=update.predicted_change,
                threshold=self.UNSTABLE_CHANGE,
            ),
        )
