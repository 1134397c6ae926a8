"""Lower the loss scale of mixed precision."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class LowerLossScaleParameters(FixParameters):
    """Parameters of `lower_loss_scale`."""

    scale: float | None = Field(
        default=None, gt=0, le=2.0**24, description="The new scale; half of the present one by default."
    )
    growth_interval: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Good steps before the scaler doubles it; left alone by default."
    )


@FIXES.register
class LowerLossScale(Fix[LowerLossScaleParameters]):
    """Set the scale of every GradScaler, and how soon it may grow again.

    What:
        The scale goes down at once, in place of one skipped step for every halving; a longer growth interval keeps it
        from coming back every 2000 steps.

    Why:
        Each overflow skips a step without a word; a scaler that climbs back too soon skips again and again.

    Definition:
        ``scale <- scale / 2``, or the value given; ``growth_interval`` as given.

    Safety:
        Guarded: a scale that is too low lets small gradients round to 0 in float16.

    Undo:
        The growth interval is as before, and the scale too, where the scaler has not changed it since.

    References:
        Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
    """

    code = "lower_loss_scale"
    title = "Lower the loss scale"
    safety = Safety.GUARDED
    shows_in_loss = False
    mends = ("fp16_overflow",)
    Parameters = LowerLossScaleParameters

    def preview(self, run: LiveRun, parameters: LowerLossScaleParameters) -> list[Change]:
        """Old and new scale and interval of each scaler."""
        changes: list[Change] = []
        for s, scaler in _scalers(run):
            scale, interval = scaler.get_scale(), scaler.get_growth_interval()
            new = parameters.scale if parameters.scale is not None else scale / 2
            changes.append(Change(target=f"grad_scalers[{s}].scale", old=scale, new=new))
            if parameters.growth_interval is not None:
                target = f"grad_scalers[{s}].growth_interval"
                changes.append(Change(target=target, old=interval, new=parameters.growth_interval))
        return changes

    def apply(self, run: LiveRun, parameters: LowerLossScaleParameters) -> Undo:
        """Set scale and interval."""
        before: list[tuple[Any, float, float, int]] = []
        for _, scaler in _scalers(run):
            scale, interval = scaler.get_scale(), scaler.get_growth_interval()
            new = parameters.scale if parameters.scale is not None else scale / 2
            before.append((scaler, scale, new, interval))
            _set(scaler, new, parameters.growth_interval or interval)

        def undo() -> None:
            for scaler, scale, new, interval in before:
                now = scaler.get_scale()
                _set(scaler, scale if now == new else now, interval)

        return undo


def _scalers(run: LiveRun) -> list[tuple[int, Any]]:
    found = [(s, scaler) for s, scaler in enumerate(run.grad_scalers) if scaler.is_enabled()]
    if not found:
        raise BadParameter("no enabled GradScaler has scaled a loss so far, so there is no scale to lower")
    return found


def _set(scaler: Any, scale: float, interval: int) -> None:
    # Not by update(): inside a step that would throw away the overflow checks that the user's own update() wants.
    scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "growth_interval": interval})
