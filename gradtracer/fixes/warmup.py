"""Raise the learning rate slowly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from pydantic import Field

from gradtracer.fixes._updates import hold, hyperparameters
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class WarmupParameters(FixParameters):
    """Parameters of `warmup`."""

    steps: int = Field(ge=1, le=1_000_000, description="Updates until the optimizer's own rate is reached.")
    from_fraction: float = Field(default=0.0, ge=0, le=1, description="The fraction of the rate to begin at.")


@FIXES.register
class Warmup(Fix[WarmupParameters]):
    """Let the rate rise from a fraction to what optimizer and scheduler say, over the next updates.

    What:
        The rate of each update is multiplied by a factor that rises linearly to 1; after that the fix has no effect.
        Rates that a scheduler changes meanwhile are multiplied just so.

    Why:
        The second moments of an adaptive optimizer rest on a few batches at first, or after they were lost, so its
        steps are wild; and large steps from fresh weights end where a deep model cannot leave.

    Definition:
        ``lr_used = lr * (f + (1 - f) * min(k / n, 1))`` at the k-th update of an optimizer since the fix, from k = 1;
        f is `from_fraction`, n is `steps`.

    Safety:
        Guarded: it costs a healthy run about half of the progress of n updates.

    Undo:
        From the next update on the optimizer uses its own value.

    References:
        Goyal et al. 2017, arXiv:1706.02677, section 2.2. Ma & Yarats 2021, arXiv:1910.04209 (linear, over
        2 / (1 - beta2) updates, for Adam).
    """

    code = "warmup"
    title = "Warm the learning rate up"
    safety = Safety.GUARDED
    standing = True
    works_sharded = True
    shows_in_loss = False
    mends = ("optimizer_state_lost", "warmup_missing", "learning_rate_too_high")
    Parameters = WarmupParameters

    def preview(self, run: LiveRun, parameters: WarmupParameters) -> list[Change]:
        """Each group's own rate, and that of the next update."""
        factor = _factor(1, parameters)
        return [
            Change(target=target, old=float(rate), new=float(rate) * factor)
            for target, rate in hyperparameters(run, "lr")
        ]

    def apply(self, run: LiveRun, parameters: WarmupParameters) -> Undo:
        """Count updates from here on."""
        self.preview(run, parameters)
        taken: Counter[int] = Counter()

        def plan(optimizer: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
            taken[id(optimizer)] += 1
            factor = _factor(taken[id(optimizer)], parameters)
            return lambda hyper: {} if factor == 1 or "lr" not in hyper else {"lr": float(hyper["lr"]) * factor}

        return hold(run, plan)


def _factor(update: int, parameters: WarmupParameters) -> float:
    return parameters.from_fraction + (1 - parameters.from_fraction) * min(update / parameters.steps, 1.0)
