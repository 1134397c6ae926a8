"""Cosine cycles of the learning rate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from pydantic import Field

from gradtracer.fixes._updates import hold, hyperparameters
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class CosineRestartParameters(FixParameters):
    """Parameters of `cosine_restart`."""

    steps: int = Field(ge=2, le=10_000_000, description="Updates of the first cycle.")
    cycles: int = Field(default=1, ge=1, le=100, description="How many cycles; then the optimizer's own rate rules.")
    lengthen: float = Field(default=1.0, ge=1, le=10, description="How much longer each cycle is than the one before.")
    learning_rate: float | None = Field(
        default=None, gt=0, le=1e3, description="The rate that a cycle begins at; each group's own by default."
    )
    final_fraction: float = Field(default=0.0, ge=0, le=1, description="The fraction of it that a cycle ends at.")


@FIXES.register
class CosineRestart(Fix[CosineRestartParameters]):
    """Let the rate fall along a cosine, once or several times over, in place of what the scheduler says.

    What:
        A warm restart: the rate jumps to its largest value, falls to its smallest, and does so again. After the last
        cycle the optimizer's own rate rules.

    Why:
        A rate that ran out too early leaves a run unfinished; a high rate that falls lets it leave a poor place and
        settle again.

    Definition:
        ``lr_used = f m + (1 - f) m (1 + cos(pi t / T)) / 2`` at the update that has t before it in a cycle of T; m is
        `learning_rate`, f is `final_fraction`; T grows by `lengthen` from cycle to cycle.

    Safety:
        Guarded: a restart from a settled state first makes the loss worse.

    Undo:
        From the next update on the optimizer uses its own value.

    References:
        Loshchilov & Hutter 2017, arXiv:1608.03983, equation 5.
    """

    code = "cosine_restart"
    title = "Restart the learning rate on a cosine"
    safety = Safety.GUARDED
    standing = True
    works_sharded = True
    shows_in_loss = False
    mends = ("scheduler_misuse",)
    Parameters = CosineRestartParameters

    def preview(self, run: LiveRun, parameters: CosineRestartParameters) -> list[Change]:
        """Each group's own rate, and that at which it would begin."""
        return [
            Change(target=target, old=float(rate), new=parameters.learning_rate or float(rate))
            for target, rate in hyperparameters(run, "lr")
        ]

    def apply(self, run: LiveRun, parameters: CosineRestartParameters) -> Undo:
        """Begin the first cycle at the next update."""
        self.preview(run, parameters)
        taken: Counter[int] = Counter()

        def plan(optimizer: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
            factor = _factor(taken[id(optimizer)], parameters)
            taken[id(optimizer)] += 1
            if factor is None:
                return lambda hyper: {}
            return lambda hyper: (
                {"lr": factor * (parameters.learning_rate or float(hyper["lr"]))} if "lr" in hyper else {}
            )

        return hold(run, plan)


def _factor(done: int, parameters: CosineRestartParameters) -> float | None:
    """By what the largest rate is multiplied after so many updates; None behind the last cycle."""
    length = float(parameters.steps)
    for _ in range(parameters.cycles):
        if done < round(length):
            cosine = (1 + math.cos(math.pi * done / round(length))) / 2
            return parameters.final_fraction + (1 - parameters.final_fraction) * cosine
        done -= round(length)
        length *= parameters.lengthen
    return None
