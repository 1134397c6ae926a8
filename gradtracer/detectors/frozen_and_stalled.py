"""Frozen layers behind which nothing is learnt."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import AuditFinding, Measure, Observation, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class FrozenAndStalled(Detector):
    """Layers are frozen at random values, and the loss does not fall.

    What:
        A run whose frozen layers look as drawn at random (the audit `frozen_layers`), and that learns next to nothing.

    Why:
        Random features may be meant, and then the layers behind them learn; where they do not, what was frozen is
        what should have been trained.

    Definition:
        1 - (mean loss of the last 20 steps) / (mean loss of the first 10), a ratio without unit, once 50 steps have
        been made, at 5 steps in a row, for a loss that is above 0 throughout.

    Thresholds:
        4 %: means over 20 steps scatter by 1 to 2 % in batches of tens of rows, and a network that learns at all
        takes off more than that in 50 steps.

    Fixes:
        In the source: requires_grad_(True) for the layers that the event names.

    References:
        Rahimi and Recht 2007 (random features train).
    """

    code = "frozen_and_stalled"
    signal = "loss"
    enter_after = 5

    MIN_STEPS, FIRST, LAST, FALL = 50, 10, 20, 0.04

    def __init__(self) -> None:
        self._frozen: list[AuditFinding] = []
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=self.LAST)
        self._num_steps = 0

    def observe(self, observation: Observation) -> None:
        """Learn which layers are frozen at random."""
        if isinstance(observation, AuditFinding) and observation.code == "frozen_at_random":
            self._frozen.append(observation)

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The stall, if there are frozen layers."""
        if math.isnan(sample.loss):
            return None
        self._num_steps += 1
        if len(self._first) < self.FIRST:
            self._first.append(sample.loss)
        self._last.append(sample.loss)
        if not self._frozen or self._num_steps < self.MIN_STEPS:
            return None
        losses = [*self._first, *self._last]
        if not all(math.isfinite(x) and x > 0 for x in losses):
            return ()
        before, now = sum(self._first) / len(self._first), sum(self._last) / len(self._last)
        fall = 1.0 - now / before
        if fall >= self.FALL:
            return ()
        names = [f.layer for f in self._frozen if f.layer]
        return [
            Finding(
                state="stalled",
                severity=Severity.WARNING,
                layer=names[0] if names else None,
                confidence=0.9,
                evidence=(Measure(name="relative_fall_of_loss", value=fall, threshold=self.FALL),),
                message=f"The loss has fallen by {fall:.1%} in {self._num_steps} steps, and {', '.join(names[:4])} "
                "were frozen at random values.",
            )
        ]
