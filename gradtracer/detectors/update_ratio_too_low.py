"""Updates that are too small to train anything."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from gradtracer import stats
from gradtracer.detectors._running import GeometricLevel
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class UpdateRatioTooLow(Detector):
    """From the first step on no layer moves, although gradients arrive, and the loss does not fall.

    What:
        A run all of whose updates were negligible beside the weights and whose loss is where it began.

    Why:
        It uses up its time without training. Usually the learning rate is orders of magnitude too small, or a schedule
        or a scale divides it away.

    Definition:
        ``u = max_l ||update_l|| / ||w_l||`` per step, no unit. All must hold: u <= 1e-5 at every sampled step since the
        start; at least 50 steps; the learning rate is not rising (that is a warm-up); the gradient norm is at least
        half of what it was in the first steps (a run that has converged has lost its gradient); the loss of the last
        20 steps is not below that of the first 20 (rank sum z > -3), or by less than 0.1 % of it.

    Thresholds:
        1e-5 is a hundredth of the usual 1e-3 (Karpathy, CS231n): a hundred thousand steps in one direction to move the
        weights by their own norm. 50 steps are enough for the rank test and few enough to be told in time. z = 3 is one
        in a thousand by chance.

    Fixes:
        set_learning_rate so that the ratio comes to about 1e-3.

    References:
        Karpathy, CS231n notes, "Ratio of weights:updates". Mann & Whitney 1947.
    """

    code = "update_ratio_too_low"
    signal = "update_ratio"

    NEGLIGIBLE = 1e-5
    MIN_STEPS = 50
    KEPT_GRADIENT = 0.5
    WINDOW = 20
    NO_TREND_Z = -3.0
    NO_PROGRESS = 1e-3

    def __init__(self) -> None:
        self._largest = 0.0
        self._first_losses: list[float] = []
        self._last_losses: deque[float] = deque(maxlen=self.WINDOW)
        self._first_gradient = GeometricLevel(10)
        self._gradient = GeometricLevel(10)
        self._first_rate = math.nan
        self._num_steps = 0

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """Whether the run as a whole stands still, at a sampled step."""
        if self._largest > self.NEGLIGIBLE:
            return None  # Something moved once: this rule has nothing more to say about the run.
        self._num_steps += 1
        if math.isfinite(sample.loss):
            if len(self._first_losses) < self.WINDOW:
                self._first_losses.append(sample.loss)
            self._last_losses.append(sample.loss)
        if math.isnan(self._first_rate):
            self._first_rate = sample.learning_rate
        if self._num_steps <= 10:
            self._first_gradient.update(sample.grad_norm)
        self._gradient.update(sample.grad_norm)
        if sample.layers is None:
            return None
        ratios = [u for u in sample.layers.signal("update_ratio").values() if math.isfinite(u)]
        if not ratios:
            return None
        self._largest = max(self._largest, *ratios)
        if self._largest > self.NEGLIGIBLE or self._num_steps < self.MIN_STEPS or not self._stands_still(sample):
            return ()
        return [
            Finding(
                state="too_low",
                severity=Severity.WARNING,
                confidence=0.9,
                evidence=(
                    Measure(name="update_ratio", value=self._largest, threshold=self.NEGLIGIBLE, baseline=1e-3),
                    Measure(
                        name="loss",
                        value=_median(self._last_losses),
                        baseline=_median(self._first_losses),
                    ),
                    Measure(name="grad_norm", value=self._gradient.value, baseline=self._first_gradient.value),
                ),
                message=f"No layer has moved by more than {self._largest:.1g} of its norm in any step, and the loss is "
                "where it began.",
            )
        ]

    def _stands_still(self, sample: Sample) -> bool:
        first, last = self._first_losses, list(self._last_losses)
        if sample.learning_rate > self._first_rate or len(first) < self.WINDOW:
            return False
        # NaN (no gradient seen at all) compares false: without a gradient another rule has to speak.
        if not self._gradient.value >= self.KEPT_GRADIENT * self._first_gradient.value:
            return False
        gained = _median(first) - _median(last)
        scale = max(abs(_median(first)), stats.median_absolute_deviation(first))
        return stats.rank_sum_z(first, last) > self.NO_TREND_Z or gained < self.NO_PROGRESS * scale


def _median(values: Sequence[float] | deque[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
