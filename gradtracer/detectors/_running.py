"""Running levels that detectors compare a sample with: plain floats, constant work a step."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gradtracer.samples import LayerTable, Sample


class GeometricLevel:
    """Exponential mean of the logarithm of a positive quantity, free of the bias towards the start.

    Args:
        span: Number of values over which it averages, ``alpha = 2 / (span + 1)``.
    """

    def __init__(self, span: float) -> None:
        self._alpha = 2.0 / (span + 1.0)
        self._sum = 0.0
        self._weight = 0.0
        self.count = 0

    def update(self, value: float) -> None:
        """Take in a value; what is not positive and finite is left out."""
        if 0.0 < value < math.inf:
            self._sum += self._alpha * (math.log(value) - self._sum)
            self._weight += self._alpha * (1.0 - self._weight)
            self.count += 1

    @property
    def value(self) -> float:
        """The level; NaN before the first value."""
        return math.exp(self._sum / self._weight) if self.count else math.nan


class LossHistory:
    """First, best and present level of the loss.

    Levels are medians of five losses, so that a single odd batch is none. The first is the very first loss: five steps
    of a fast optimizer may have learned half of the task, or ruined the weights.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=5)
        self._noise = 0.0
        self._noise_at_best = 0.0
        self.count = 0
        self.first = math.nan
        self.best = math.inf

    def update(self, loss: float) -> None:
        """Take in a finite loss."""
        if self.count == 0:
            self.first = loss
        else:
            self._noise += 0.1 * (abs(loss - self._last[-1]) - self._noise)
        self._last.append(loss)
        self.count += 1
        if self.count >= 5 and (level := self.level) < self.best:
            self.best = level
            self._noise_at_best = self._noise

    @property
    def level(self) -> float:
        """Median of the last losses."""
        ordered = sorted(self._last)
        return ordered[len(ordered) // 2]

    @property
    def gained(self) -> float:
        """Way from the first level to the best; 0 where there is none."""
        return max(0.0, self.first - self.best) if self.count >= 5 else 0.0

    @property
    def has_learned(self) -> bool:
        """Whether what was gained stands out from the noise of the loss at its best."""
        return self.gained > 4.0 * self._noise_at_best

    def lost_progress(self, level: float) -> float:
        """Share of the way from the first level down to the best that is undone at this level.

        Infinite where the loss rose without having ever fallen.
        """
        lost = level - self.best
        if self.gained > 0:
            return lost / self.gained
        return math.inf if lost > 0 else 0.0


class LossScale:
    """What a change of the loss is measured against: its size, but at least a tenth of what the run has gained.

    The size is the exponential mean of |loss| over 20 steps, at least the newest: a loss that passes through zero has
    a small value and no small scale. The floor is for runs that have fitted their data: where the loss went from 2 to
    1e-6, a jump to 1e-3 is a large ratio and costs nothing.
    """

    SPAN = 20.0
    OF_GAIN = 0.1

    def __init__(self) -> None:
        self._alpha = 2.0 / (self.SPAN + 1.0)
        self._sum = 0.0
        self._weight = 0.0
        self._last = 0.0
        self._history = LossHistory()

    def update(self, loss: float) -> None:
        """Take in a loss; what is not finite is left out."""
        if math.isfinite(loss):
            self._last = abs(loss)
            self._sum += self._alpha * (self._last - self._sum)
            self._weight += self._alpha * (1.0 - self._weight)
            self._history.update(loss)

    @property
    def floor(self) -> float:
        """A tenth of the way from the first level of the loss to its best."""
        return self.OF_GAIN * self._history.gained

    @property
    def value(self) -> float:
        """The scale; 0 before the first loss."""
        return max(self._last, self._sum / self._weight, self.floor) if self._weight else 0.0


@dataclass(frozen=True)
class StepSize:
    """How large an update was, in terms that no rescaling of loss or weights changes."""

    ratio: float
    """Largest ||update|| / ||weights|| over the layers."""
    layer: str
    """Layer of that ratio."""
    work: float
    """sum_l ||g_l|| ||update_l||: the change of the loss that the gradient allows this update, to first order."""
    predicted_change: float
    """The same over |loss|."""


def step_size(table: LayerTable, loss_scale: float) -> StepSize | None:
    """The update of a sampled step; None where no layer's update is known.

    Args:
        table: Layers of the step.
        loss_scale: `LossScale` of the run; where it is 0 the predicted change is 0.
    """
    ratios = {n: u for n, u in table.signal("update_ratio").items() if math.isfinite(u)}
    if not ratios:
        return None
    norms, gradients = table.signal("weight_norm"), table.signal("grad_norm")
    work = sum(gradients.get(n, 0.0) * u * norms.get(n, 0.0) for n, u in ratios.items())
    layer = max(ratios, key=ratios.__getitem__)
    change = work / loss_scale if loss_scale > 0 and math.isfinite(work) else 0.0
    return StepSize(ratios[layer], layer, work, change)


@dataclass
class Rise:
    """A run of losses that all lie above everything in the window before it."""

    first_step: int
    values: list[float] = field(default_factory=list)


class SustainedRise:
    """Finds losses that rise above all of the last `num_before` and stay there for `num_after` steps.

    For exchangeable losses of any distribution the chance of that is ``1 / C(num_before + num_after, num_after)``
    (`gradtracer.stats.exceedance_probability`): with 32 and 6 it is 4e-7 a step, without any assumption on the noise.
    At the start of a run half of the window has to do, with a chance of 1e-5.
    """

    def __init__(self, num_before: int = 32, num_after: int = 6, patience: int = 64) -> None:
        self.before: deque[float] = deque(maxlen=num_before)
        self._min_before = num_before // 2
        self._num_after = num_after
        self._patience = patience
        self._ceiling = math.inf
        self.rise: Rise | None = None

    def update(self, step: int, loss: float) -> Rise | None:
        """Take in a finite loss; the rise while it is sustained, else None."""
        if self.rise is None:
            if len(self.before) >= self._min_before and loss > self._ceiling:
                self.rise = Rise(step, [loss])
            else:
                self._take([loss])
            return None
        if loss > self._ceiling and len(self.rise.values) < self._patience:
            self.rise.values.append(loss)
            return self.rise if len(self.rise.values) >= self._num_after else None
        # Back below, or the new level has become the usual one.
        self._take([*self.rise.values, loss])
        self.rise = None
        return None

    def jump(self, rise: Rise) -> float:
        """How far the rise clears the window, over the largest change between neighbours in the window.

        A loss that climbs smoothly clears it by no more than one of its own steps; a sudden one by far more.
        """
        window = list(self.before)
        largest = max(abs(b - a) for a, b in itertools.pairwise(window))
        clearance = min(rise.values[: self._num_after]) - self._ceiling
        return clearance / largest if largest > 0 else math.inf

    def _take(self, losses: Iterable[float]) -> None:
        for loss in losses:
            dropped = self.before[0] if len(self.before) == self.before.maxlen else -math.inf
            self.before.append(loss)
            if loss >= self._ceiling or len(self.before) == 1:
                self._ceiling = loss
            elif dropped >= self._ceiling:
                self._ceiling = max(self.before)


T = TypeVar("T")


class BrokenPromises(Generic[T]):
    """Updates after which the loss rose by as much as first order promised that it would fall, or more.

    Gradient descent on ``lambda x^2 / 2`` multiplies the loss by ``(eta lambda - 1)^2`` and promises a fall of
    ``2 eta lambda`` times the loss: the loss rises by that much exactly from ``eta lambda = 4`` on, where networks
    diverge (Lewkowycz et al. 2020). Both sides are differences of the loss, so its level, sign and scale do not matter.
    """

    PATIENCE = 3

    def __init__(self) -> None:
        self._open: list[tuple[int, float, float, T]] = []

    def check(self, sample: Sample) -> list[tuple[int, float, T]]:
        """The earlier updates that this step's loss proves wrong: step, rise of the loss, and what was noted."""
        if not self._open:
            return []
        broken: list[tuple[int, float, T]] = []
        still_open: list[tuple[int, float, float, T]] = []
        for step, loss, promise, note in self._open:
            if math.isinf(sample.loss) or sample.loss - loss >= promise:
                broken.append((step, sample.loss - loss, note))
            elif sample.step - step < self.PATIENCE:
                still_open.append((step, loss, promise, note))
        self._open = still_open
        return broken

    def note(self, sample: Sample, promise: float, what: T) -> None:
        """Keep an update whose first-order promise is to be compared with the next losses."""
        if math.isfinite(sample.loss) and math.isfinite(promise):
            self._open.append((sample.step, sample.loss, promise, what))


def largest_update(sample: Sample, scale: LossScale) -> StepSize | None:
    """`step_size` of a sample, None at unsampled steps."""
    return step_size(sample.layers, scale.value) if sample.layers is not None else None
