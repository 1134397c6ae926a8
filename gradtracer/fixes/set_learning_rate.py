"""Set the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class SetLearningRateParameters(FixParameters):
    """Parameters of `set_learning_rate`."""

    learning_rate: float = Field(gt=0, le=10, description="The rate to use from the next update on.")
    group: int | None = Field(default=None, ge=0, description="Only this parameter group; all groups by default.")


@FIXES.register
class SetLearningRate(Fix[SetLearningRateParameters]):
    """Use this learning rate for every update until it is reverted, whatever a scheduler says.

    What:
        The rate is put in before each update and the scheduler's own value put back after it, so that a scheduler
        neither overrides the fix nor is thrown off by it.

    Why:
        A rate that is too high makes steps overshoot; one that is too low wastes the run.

    Definition:
        ``lr_used = learning_rate`` for the chosen groups.

    Safety:
        Guarded: a rate that suits one state of the training may not suit another.

    Undo:
        From the next update on the optimizer uses its own value again.

    References:
        Bengio 2012, "Practical recommendations for gradient-based training of deep architectures", section 3.1.1.
    """

    code = "set_learning_rate"
    title = "Set the learning rate"
    safety = Safety.GUARDED
    standing = True
    mends = ("learning_rate_too_high", "learning_rate_too_low", "exploding_gradient", "dead_relu")
    Parameters = SetLearningRateParameters

    def preview(self, run: LiveRun, parameters: SetLearningRateParameters) -> list[Change]:
        """Old and new rate of each group that would change."""
        changes = [
            Change(target=f"optimizers[{o}].param_groups[{g}].lr", old=float(group["lr"]), new=parameters.learning_rate)
            for o, g, group in _groups(run, parameters.group)
        ]
        if not changes:
            counts = [len(o.param_groups) for o in run.optimizers]
            if not counts:
                raise BadParameter("no optimizer has stepped yet, so there is no rate to set; try after the first step")
            raise BadParameter(f"group {parameters.group} does not exist: the optimizers have {counts} groups")
        return changes

    def apply(self, run: LiveRun, parameters: SetLearningRateParameters) -> Undo:
        """Hold the rate from the next update on."""
        self.preview(run, parameters)
        own: list[tuple[dict[str, Any], Any]] = []

        def before(optimizer: Any) -> None:
            for _, _, group in _groups(run, parameters.group):
                if any(group is g for g in optimizer.param_groups):
                    own.append((group, _swap(group, parameters.learning_rate)))

        def after(optimizer: Any) -> None:
            for group, rate in reversed(own):
                _swap(group, rate)
            own.clear()

        return run.around_update(before, after)


def _groups(run: LiveRun, group: int | None) -> Iterator[tuple[int, int, dict[str, Any]]]:
    for o, optimizer in enumerate(run.optimizers):
        for g, parameters in enumerate(optimizer.param_groups):
            if (group is None or g == group) and "lr" in parameters:
                yield o, g, parameters


def _swap(group: dict[str, Any], rate: Any) -> Any:
    """Put a rate in, hand the old one back; a tensor rate (capturable optimizers) is changed in place."""
    held = group["lr"]
    if hasattr(held, "fill_"):
        old = float(held)
        held.fill_(rate)
        return old
    group["lr"] = rate
    return held
