"""Leave out updates."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from gradtracer import stats
from gradtracer.errors import BadParameter
from gradtracer.fixes._updates import grad_norm, switch
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety

_NUM_TOLD = 50
_LEAST_NORMS = 10
_LEAST_DEVIATION = 0.25
"""Of the logarithm: gradient norms of healthy batches differ by a quarter and more, also where the last few agree."""


class SkipBatchParameters(FixParameters):
    """Parameters of `skip_batch`."""

    num_updates: int = Field(default=0, ge=0, le=100_000, description="Leave out the next so many updates.")
    max_deviations: float | None = Field(
        default=None,
        ge=3,
        le=100,
        description="After that, leave out updates whose gradient norm is this many deviations above the recent ones.",
    )
    window: int = Field(default=50, ge=_LEAST_NORMS, le=10_000, description="How many recent norms are compared with.")


@FIXES.register
class SkipBatch(Fix[SkipBatchParameters]):
    """Leave out the next updates, or those whose gradient norm stands out from the recent ones.

    What:
        The batch is computed and its gradient thrown away: weights and optimizer state stay as they are. The numbers of
        the steps that were left out are told by the intervention.

    Why:
        Loss spikes of long runs come from single batches met in a certain state of the weights; without them the run
        goes on as if nothing had been.

    Definition:
        An update is skipped if ``log ||g|| - median > max_deviations * max(MAD, 0.25)``, median and median absolute
        deviation (times 1.4826) taken over the logarithms of the last `window` norms, skipped ones included, so that a
        norm that has risen for good is let through after half a window; and if ``||g||`` is not finite. Nothing else is
        skipped before 10 norms are known.

    Safety:
        Guarded: rare samples with a large gradient may be the ones that matter.

    Undo:
        Every update is made again.

    References:
        Chowdhery et al. 2022, arXiv:2204.02311, section 5.1 (skipping the batches around a spike).
    """

    code = "skip_batch"
    title = "Leave out batches"
    safety = Safety.GUARDED
    standing = True
    works_sharded = True
    shows_in_loss = False
    mends = ("exploding_gradient", "nan_in_data")
    Parameters = SkipBatchParameters

    def preview(self, run: LiveRun, parameters: SkipBatchParameters) -> list[Change]:
        """How many updates would be left out, and from which deviation on."""
        if not parameters.num_updates and parameters.max_deviations is None:
            raise BadParameter("nothing would be skipped: give num_updates, max_deviations, or both")
        changes = switch(run, "num_updates_left_out", parameters.num_updates, 0) if parameters.num_updates else []
        if parameters.max_deviations is not None:
            changes += switch(run, "max_grad_norm_deviations", parameters.max_deviations)
        return changes

    def apply(self, run: LiveRun, parameters: SkipBatchParameters) -> Undo:
        """Watch the norms from the next update on."""
        self.preview(run, parameters)
        skipper = _Skipper(run, parameters)
        skipper.end = run.around_update(skipper.before)
        return skipper


class _Skipper:
    """Decides on each update, remembers what it left out, and ends when called."""

    end: Undo

    def __init__(self, run: LiveRun, parameters: SkipBatchParameters) -> None:
        self._run, self._parameters = run, parameters
        self._taken: Counter[int] = Counter()
        self._norms: dict[int, deque[float]] = {}
        self._skipped: list[int] = []

    def __call__(self) -> None:
        self.end()

    def before(self, optimizer: Any) -> None:
        """Leave the update out if it is one of the next, or an outlier."""
        self._taken[id(optimizer)] += 1
        skip = self._taken[id(optimizer)] <= self._parameters.num_updates
        if self._parameters.max_deviations is not None:
            norm = grad_norm(optimizer)
            recent = self._norms.setdefault(id(optimizer), deque(maxlen=self._parameters.window))
            skip |= not math.isfinite(norm) or _stands_out(norm, recent, self._parameters.max_deviations)
            if 0 < norm < math.inf:
                recent.append(math.log(norm))
        if skip:
            self._run.skip_update(optimizer)
            step = self._run.step + 1
            if step not in self._skipped[-1:]:
                self._skipped.append(step)

    def report(self) -> str:
        """The steps whose updates were left out."""
        if not self._skipped:
            return ""
        steps = ", ".join(map(str, self._skipped[-_NUM_TOLD:]))
        earlier = len(self._skipped) - _NUM_TOLD
        return f"left out the updates of steps {steps}" + (f" and {earlier} earlier ones" if earlier > 0 else "")


def _stands_out(norm: float, recent: Sequence[float], max_deviations: float) -> bool:
    if len(recent) < _LEAST_NORMS or norm <= 0:
        return False
    deviation = max(stats.median_absolute_deviation(recent), _LEAST_DEVIATION)
    return math.log(norm) - statistics.median(recent) > max_deviations * deviation
