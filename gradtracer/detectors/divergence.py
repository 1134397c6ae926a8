"""Losses that run away."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from gradtracer.detectors._running import BrokenPromises, GeometricLevel, LossScale, StepSize, largest_update
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class Divergence(Detector):
    """The loss is many times what it was a few steps ago, right after updates that overshoot.

    What:
        A loss that leaves the scale on which the run has been, while steps are too large or the gradient explodes.

    Why:
        It seldom comes back: the larger loss gives a larger gradient and that a larger step, up to NaN.

    Definition:
        ``loss >= 10 max |loss|`` over the 10 steps before the rise, and at least ten times a tenth of all that the loss
        has gained since the start (no unit), for two steps in a row, while within the
        last 10 steps an update overshot (as update_ratio_too_high defines it), or the gradient norm was 100 times its
        geometric mean. `critical` from a factor of 1000 on. It lasts until the loss is back below the bound.

    Thresholds:
        Losses of small batches vary by more than a factor of 10 in healthy runs, so the factor never decides alone:
        the second condition is the mechanism, with the thresholds of update_ratio_too_high. 1000: beyond
        the range of any loss that fluctuates about a level.

    Fixes:
        rollback to a snapshot from before, then set_learning_rate to a tenth or less; clip_grad_norm if the gradient
        exploded first.

    References:
        Lewkowycz et al. 2020, arXiv:2003.02218. Goodfellow, Bengio, Courville 2016, Deep Learning, section 8.2.4.
    """

    code = "divergence"
    signal = "loss"
    enter_after = 2

    FACTOR = 10.0
    RUNAWAY = 1000.0
    WINDOW = 10
    LARGE_RATIO = 0.1
    UNSTABLE_CHANGE = 8.0
    GRADIENT_GROWTH = 100.0

    def __init__(self) -> None:
        self._scale = LossScale()
        self._gradient = GeometricLevel(20)
        self._promises: BrokenPromises[StepSize] = BrokenPromises()
        self._before: deque[float] = deque(maxlen=self.WINDOW)
        self._usual = math.nan
        """Largest |loss| before the rise that is now looked at; NaN where there is none."""
        self._rose_at = 0
        self._overshot = -math.inf
        """Last step at which an update was too large."""

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The loss of this step against the last ones."""
        self._scale.update(sample.loss)
        self._note_mechanism(sample)
        loss = sample.loss
        if not math.isfinite(loss):
            return None
        if math.isnan(self._usual) and self._before and loss >= self.FACTOR * self._before[-1]:
            usual = max(max(self._before), self._scale.floor)
            if usual > 0 and loss >= self.FACTOR * usual:
                self._usual, self._rose_at = usual, sample.step
        if math.isnan(self._usual):
            self._before.append(abs(loss))
            return ()
        factor = loss / self._usual
        if factor < self.FACTOR:
            self._usual = math.nan
            self._before.append(abs(loss))
            return ()
        if sample.step - self._overshot > self.WINDOW:
            return ()
        return [
            Finding(
                state="diverging",
                severity=Severity.CRITICAL if factor >= self.RUNAWAY else Severity.WARNING,
                confidence=0.95,
                evidence=(Measure(name="loss", value=loss, baseline=self._usual, threshold=self.FACTOR * self._usual),),
                message=f"The loss is {loss:.4g}, {factor:.3g} times the largest of the steps before the rise.",
                since=self._rose_at,
            )
        ]

    def _note_mechanism(self, sample: Sample) -> None:
        norm = sample.grad_norm
        if self._gradient.count >= self.WINDOW and norm >= self.GRADIENT_GROWTH * self._gradient.value:
            self._overshot = sample.step
        self._gradient.update(norm)
        if self._promises.check(sample):
            self._overshot = sample.step
        update = largest_update(sample, self._scale)
        if update and update.ratio >= self.LARGE_RATIO and update.predicted_change >= self.UNSTABLE_CHANGE:
            self._promises.note(sample, update.work, update)
