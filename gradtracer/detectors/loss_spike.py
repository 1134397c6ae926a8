"""Losses far above what the run has just shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer import stats
from gradtracer.detectors._running import GeometricLevel, LossHistory, SustainedRise
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class LossSpike(Detector):
    """The loss jumps: for a moment (info), or to a new level that undoes what the run had learned (warning).

    What:
        Single losses far outside the spread of the last ones, and sudden lasting shifts that come with a jump of the
        gradient or of the learning rate.

    Why:
        One odd batch raises one loss and is forgotten. A shift that stays means that the update damaged the weights.

    Definition:
        spike (`info`): the loss is above all of the last 32 and ``(loss - median) / sigma >= 10`` with
        ``sigma = 1.4826 MAD`` of those. shifted (`warning`): all must hold,
        (1) six losses in a row lie above all of the 32 before them (16 at the start of a run),
        (2) they clear these by at least twice the largest change between neighbours among the 32,
        (3) their median undoes at least half of the way from the first level of the loss down to its best,
        (4) at the jump (2 steps before to 5 after) the gradient norm was at least 10 times its usual value, or the
        learning rate at least doubled.
        Losses are compared with each other only, so no unit and no sign matters.

    Thresholds:
        For losses in any exchangeable order, of any distribution, (1) has a chance of 1 / C(38, 6) = 4e-7. (2) leaves
        out losses that climb smoothly, as in adversarial training. (3) leaves out warm restarts, which give up a small
        part for a short time. 10 sigma for a spike, because losses of small batches are heavy-tailed.

    Fixes:
        rollback to before the jump, then set_learning_rate to the value before it; clip_grad_norm if the gradient
        jumped on its own.

    References:
        Rousseeuw & Croux 1993 (MAD). Chowdhery et al. 2022, arXiv:2204.02311, section 5.1 (loss spikes, and skipping
        them by going back).
    """

    code = "loss_spike"
    signal = "loss"

    SPIKE_SIGMAS = 10.0
    SUDDEN = 2.0
    LOST = 0.5
    GRADIENT_JUMP = 10.0
    RATE_JUMP = 2.0
    BEFORE_STEPS = 2
    AFTER_STEPS = 5

    def __init__(self) -> None:
        self._rise = SustainedRise()
        self._history = LossHistory()
        self._gradient = GeometricLevel(20)
        self._rate = math.nan
        self._trigger: tuple[int, str, float, float] | None = None
        """Step, signal, value and value before of the last jump of gradient or rate."""

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The loss of this step against those before it."""
        self._note_jumps(sample)
        if not math.isfinite(sample.loss):
            return None
        before = self._rise.rise
        rise = self._rise.update(sample.step, sample.loss)
        findings: list[Finding] = []
        if rise is not None:
            findings = self._shift(rise.first_step, rise.values, self._rise.jump(rise))
        elif before is None and self._rise.rise is not None:
            findings = self._spike(sample.loss)
        if rise is None:
            # While it is above everything before, it must not become its own baseline.
            self._history.update(sample.loss)
        return findings

    def _note_jumps(self, sample: Sample) -> None:
        usual, norm, rate = self._gradient.value, sample.grad_norm, sample.learning_rate
        if self._gradient.count >= 10 and norm >= self.GRADIENT_JUMP * usual:
            self._trigger = (sample.step, "grad_norm", norm, usual)
        if rate >= self.RATE_JUMP * self._rate and self._rate > 0:
            self._trigger = (sample.step, "learning_rate", rate, self._rate)
        self._gradient.update(norm)
        self._rate = rate

    def _spike(self, loss: float) -> list[Finding]:
        window = list(self._rise.before)
        z = stats.robust_z(loss, window)
        if z < self.SPIKE_SIGMAS:
            return []
        return [
            Finding(
                state="spike",
                severity=Severity.INFO,
                confidence=0.7,
                evidence=(
                    Measure(name="loss", value=loss, baseline=sorted(window)[len(window) // 2]),
                    Measure(name="robust_z", value=z if math.isfinite(z) else None, threshold=self.SPIKE_SIGMAS),
                ),
                message=f"The loss jumped to {loss:.4g}, {z:.0f} robust standard deviations above the last 32.",
            )
        ]

    def _shift(self, first_step: int, values: list[float], jump: float) -> list[Finding]:
        level = sorted(values[-6:])[3]
        lost = self._history.lost_progress(level)
        if jump < self.SUDDEN or lost < self.LOST or self._trigger is None:
            return []
        at, signal, value, usual = self._trigger
        if not first_step - self.BEFORE_STEPS <= at <= first_step + self.AFTER_STEPS:
            return []
        return [
            Finding(
                state="shifted",
                severity=Severity.WARNING,
                confidence=0.95,
                evidence=(
                    Measure(name="loss", value=level, baseline=self._history.best),
                    Measure(name="lost_progress", value=lost if math.isfinite(lost) else None, threshold=self.LOST),
                    Measure(name=signal, value=value if math.isfinite(value) else None, baseline=usual),
                ),
                since=first_step,
                message=f"The loss rose to {level:.4g} at step {first_step} and stays there; the best was "
                f"{self._history.best:.4g}. The {signal.replace('_', ' ')} jumped at step {at}.",
            )
        ]
