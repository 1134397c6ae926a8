"""Whether an intervention made the training worse: the losses before it against those after, and the noise of both."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_STEPS, MAX_STEPS = 20, 100
_WORSE_DEVIATIONS = 4.0
_SEEN_RISE = 0.1
"""A lasting rise of the loss by a tenth is to be seen where the noise allows it within the longest window."""
_MEDIAN_EFFICIENCY = 1.2533
"""Standard error of a median of n normal values: 1.2533 sigma / sqrt(n)."""


@dataclass(frozen=True)
class Watch:
    """What was before an intervention, and for how long to look after it."""

    loss: float | None
    """Median loss before; None where no loss was finite."""
    noise: float
    """Standard deviation of the losses about their trend."""
    num_steps: int

    @classmethod
    def after(cls, losses: Sequence[float]) -> Watch:
        """A watch whose length follows from the run's own noise.

        Args:
            losses: The finite losses of the last steps before the intervention, in order.

        Returns:
            ``n = (4 * 1.2533 * noise / (0.1 * |median|))^2`` steps, so that a rise by a tenth stands 4 standard errors
            out, within 20 and 100.
        """
        if not losses:
            return cls(None, 0.0, MIN_STEPS)
        median, noise = statistics.median(losses), _noise(losses)
        if noise == 0 or median == 0:
            return cls(median, noise, MIN_STEPS)
        wanted = (_WORSE_DEVIATIONS * _MEDIAN_EFFICIENCY * noise / (_SEEN_RISE * abs(median))) ** 2
        return cls(median, noise, round(min(max(wanted, MIN_STEPS), MAX_STEPS)))

    def worse(self, losses: Sequence[float]) -> str | None:
        """Why the losses after the intervention are worse than before; None where they are not.

        Args:
            losses: All losses since, infinite or NaN where one was not finite.
        """
        finite = [x for x in losses if math.isfinite(x)]
        if not finite:
            return f"the loss was not finite in all {len(losses)} steps after it" if losses else None
        after = statistics.median(finite)
        if self.loss is None:
            return None
        if 2 * len(finite) < len(losses):
            return f"the loss was not finite in {len(losses) - len(finite)} of {len(losses)} steps after it"
        if after > self.loss + _WORSE_DEVIATIONS * max(self.noise, 1e-3 * abs(self.loss)):
            return f"the median loss rose from {self.loss:.4g} to {after:.4g}"
        return None


def _noise(losses: Sequence[float]) -> float:
    """Standard deviation about the trend: of neighbours' differences, over sqrt(2), by their median (1.4826 MAD)."""
    if len(losses) < 3:
        return 0.0
    steps = [b - a for a, b in itertools.pairwise(losses)]
    middle = statistics.median(steps)
    return 1.4826 * statistics.median(abs(d - middle) for d in steps) / math.sqrt(2)
