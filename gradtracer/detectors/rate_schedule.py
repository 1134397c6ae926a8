"""Schedules that take the learning rate away."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from gradtracer import stats
from gradtracer.detectors._running import GeometricLevel, LossHistory
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Observation, OptimizerDescription, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class RateSchedule(Detector):
    """The schedule brings the learning rate to next to nothing long before the run is over, or never up.

    What:
        A decay meant for epochs that is stepped at every batch, a schedule that has come to its end while training
        goes on, a warm-up that does not move.

    Why:
        From then on nothing is learned, while the loss was still falling.

    Definition:
        r, the learning rate over the largest so far (a median over 9 steps; no unit).
        ran_out: r <= 0.009 for at least 30 steps and a quarter of all steps so far; the rate does not rise; the largest
        update ratio is at most a tenth of its median while r was above 0.1; and either the rate is 0, or the loss was
        still falling in the 40 steps before r fell below 0.1 (rank sum of their halves z <= -2) and keeps at least a
        tenth of its first level.
        not_started: a scheduler gave the optimizer an initial rate, and for 50 steps from the start the rate is the
        same and at most a hundredth of it, while the loss has gained less than a tenth.

    Thresholds:
        0.009: step schedules end at a hundredth of the first rate, cosine and linear ones are below it for less than a
        sixteenth of the run; a quarter leaves room for both. z = -2 is one in forty by chance.

    Fixes:
        set_learning_rate to the largest rate so far, or the initial one. In the source: step the scheduler once an
        epoch, or give it the number of batches.

    References:
        PyTorch documentation, torch.optim, "How to adjust learning rate". Loshchilov & Hutter 2017, arXiv:1608.03983.
    """

    code = "rate_schedule"
    signal = "learning_rate"

    GONE = 0.009
    SMALL = 0.1
    MIN_STEPS = 30
    SHARE = 0.25
    NOT_STARTED_STEPS = 50
    NOT_STARTED = 0.01
    FALLING_Z = -2.0

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=9)
        self._largest = 0.0
        self._largest_rate_at = 0
        self._initial = math.nan
        self._first_rate = math.nan
        self._never_moved = True
        self._gone_since: int | None = None
        self._rate_then = 0.0
        self._small_since: int | None = None
        self._was_falling = False
        self._losses: deque[float] = deque(maxlen=40)
        self._loss = LossHistory()
        self._usual_ratio = GeometricLevel(20)
        self._ratio = math.nan
        self._num_steps = 0

    def observe(self, observation: Observation) -> None:
        """Learn the rate that a scheduler started from."""
        if isinstance(observation, OptimizerDescription) and observation.groups and math.isnan(self._initial):
            values = {p.name: p.value for p in observation.groups[0].hyperparameters}
            initial = values.get("initial_lr")
            if isinstance(initial, float):
                self._initial = initial

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The rate of this step."""
        rate = sample.learning_rate
        if math.isfinite(sample.loss):
            self._loss.update(sample.loss)
            self._losses.append(sample.loss)
        if math.isnan(rate):
            return None
        self._num_steps += 1
        if math.isnan(self._first_rate):
            self._first_rate = rate
        self._never_moved &= rate == self._first_rate
        self._rates.append(rate)
        usual = sorted(self._rates)[len(self._rates) // 2]
        self._largest = max(self._largest, usual)
        if rate >= self._largest:
            self._largest_rate_at = sample.step
        self._note_ratio(sample, rate)
        if self._never_moved:
            return self._not_started(rate)
        return self._ran_out(sample.step, rate)

    def _note_ratio(self, sample: Sample, rate: float) -> None:
        if sample.layers is not None:
            ratios = [u for u in sample.layers.signal("update_ratio").values() if math.isfinite(u)]
            if ratios:
                self._ratio = max(ratios)
                if rate > self.SMALL * self._largest:
                    self._usual_ratio.update(self._ratio)

    def _not_started(self, rate: float) -> list[Finding]:
        loss = self._loss
        if self._num_steps < self.NOT_STARTED_STEPS or not rate <= self.NOT_STARTED * self._initial:
            return []
        if loss.count < 10 or loss.first - loss.level >= 0.1 * abs(loss.first):
            return []
        return [
            Finding(
                state="not_started",
                severity=Severity.WARNING,
                confidence=0.9,
                evidence=(Measure(name="learning_rate", value=rate, baseline=self._initial),),
                message=f"For {self._num_steps} steps the schedule has held the learning rate at {rate:.3g}; it was "
                f"built for {self._initial:.3g}.",
                since=0,
            )
        ]

    def _ran_out(self, step: int, rate: float) -> list[Finding]:
        if rate > self.SMALL * self._largest:
            self._small_since = self._gone_since = None
            return []
        if self._small_since is None:
            self._small_since = step
            losses = list(self._losses)
            half = len(losses) // 2
            self._was_falling = half >= 5 and stats.rank_sum_z(losses[:half], losses[half:]) <= self.FALLING_Z
        if rate > self.GONE * self._largest:
            self._gone_since = None
            return []
        if self._gone_since is None:
            self._gone_since, self._rate_then = step, rate
        num = step - self._gone_since + 1
        if num < self.MIN_STEPS or num < self.SHARE * self._num_steps or rate > self._rate_then:
            return []
        if self._usual_ratio.count and not self._ratio <= 0.1 * self._usual_ratio.value:
            return []
        loss = self._loss
        unfinished = self._was_falling and loss.count >= 10 and loss.level >= 0.1 * loss.first
        if rate > 0 and not unfinished:
            return []
        return [
            Finding(
                state="ran_out",
                severity=Severity.WARNING,
                confidence=0.9,
                evidence=(
                    Measure(name="learning_rate", value=rate, baseline=self._largest),
                    Measure(name="first_step", value=float(self._largest_rate_at), unit="step"),
                ),
                message=f"The schedule took the learning rate from {self._largest:.3g} to {rate:.3g}; it has been "
                f"below a hundredth since step {self._gone_since}, and the loss was still falling.",
                since=self._largest_rate_at + 1,
            )
        ]
