"""What detectors of wrong labels remember of a run: the label signals of the sampled steps, in order."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from gradtracer.samples import Sample

LOSS, INPUT = "(loss)", "(input)"


@dataclass(frozen=True)
class LabelReading:
    """The label signals of one sampled step; NaN where a signal was not recorded."""

    step: int
    values: dict[tuple[str, str], float]

    def __getitem__(self, signal: str) -> float:
        return self.values.get((LOSS, signal), math.nan)

    def input(self, signal: str) -> float:
        """The signal of the model's input."""
        return self.values.get((INPUT, signal), math.nan)


class LabelHistory:
    """Readings of the last sampled steps."""

    def __init__(self, length: int = 64) -> None:
        self.readings: deque[LabelReading] = deque(maxlen=length)

    def update(self, sample: Sample, signal: str) -> bool:
        """Take in a sample; whether it has the signal at the loss."""
        table = sample.layers
        if table is None or math.isnan(table.get(LOSS, signal)):
            return False
        columns = [c for c in table.layout.columns if c[0] in (LOSS, INPUT)]
        self.readings.append(LabelReading(sample.step, {c: table.get(*c) for c in columns}))
        return True
