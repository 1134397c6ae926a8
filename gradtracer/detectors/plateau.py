"""Losses that have stopped falling."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from gradtracer import stats
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class Plateau(Detector):
    """The loss no longer falls, as far as its noise lets one see.

    What:
        A stretch of at least 80 steps without a downward trend of the loss.

    Why:
        It may be the end of learning, a learning rate that wants lowering, a saddle before the next drop, or a fault.
        The loss alone cannot tell these apart, and healthy runs have long plateaus before they fall, so the event is
        `info`. What makes a plateau costly is reported by the rule that sees it: vanishing_gradient, dead_units,
        update_ratio_too_low, loss_spike.

    Definition:
        Every 16 steps the last 32 losses are compared with the 32 before them by the rank sum (Mann & Whitney); a
        plateau is ``z > -2`` twice in a row. Ranks have no unit.

    Thresholds:
        z = -2: a fall that chance would show once in 44 looks counts as a fall. Windows of 32 steps see a fall of the
        loss by about half a standard deviation of its noise.

    Fixes:
        None by itself. If nothing else is reported: lower the learning rate, or stop.

    References:
        Mann & Whitney 1947. Dauphin et al. 2014, arXiv:1406.2572 (saddles and plateaus).
    """

    code = "plateau"
    signal = "loss"
    enter_after = 2
    leave_after = 2

    WINDOW = 32
    INTERVAL = 16
    NO_FALL_Z = -2.0

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=2 * self.WINDOW)
        self._num_steps = 0

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The last 64 losses, every 16 steps."""
        if not math.isfinite(sample.loss):
            return None
        self._losses.append(sample.loss)
        self._num_steps += 1
        if len(self._losses) < 2 * self.WINDOW or self._num_steps % self.INTERVAL:
            return None
        losses = list(self._losses)
        before, after = losses[: self.WINDOW], losses[self.WINDOW :]
        z = stats.rank_sum_z(before, after)
        if z <= self.NO_FALL_Z:
            return ()
        return [
            Finding(
                state="plateau",
                severity=Severity.INFO,
                confidence=0.7,
                from_state="improving",
                evidence=(
                    Measure(name="rank_sum_z", value=z, threshold=self.NO_FALL_Z),
                    Measure(
                        name="loss",
                        value=sorted(after)[self.WINDOW // 2],
                        baseline=sorted(before)[self.WINDOW // 2],
                    ),
                ),
                message="The loss has not fallen over the last 64 steps.",
            )
        ]
