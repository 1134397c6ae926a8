"""Multiply gradients by a constant."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.fixes._updates import gradients, switch
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class ScaleGradientsParameters(FixParameters):
    """Parameters of `scale_gradients`."""

    factor: float = Field(gt=0, le=1e8, description="What every gradient is multiplied by before an update.")


@FIXES.register
class ScaleGradients(Fix[ScaleGradientsParameters]):
    """Multiply all gradients by a constant before every update, until reverted.

    What:
        The same as a loss that is multiplied by the constant: moments, clipping thresholds that come later and weight
        decay keep their meaning, which a changed learning rate would not leave them.

    Why:
        A loss that is summed, divided twice, or accumulated and not averaged makes all gradients wrong by one factor.

    Definition:
        ``g <- factor * g``.

    Safety:
        Guarded: a factor that does not belong there is a wrong learning rate. Adam and its kin hardly feel it.

    Undo:
        From the next update on gradients are used as they are.

    References:
        Goyal et al. 2017, arXiv:1706.02677, section 3 (remark 3: normalise by the whole batch).
    """

    code = "scale_gradients"
    title = "Scale the gradients"
    safety = Safety.GUARDED
    standing = True
    works_sharded = True
    mends = ("gradient_accumulation", "loss_scale")
    Parameters = ScaleGradientsParameters

    def preview(self, run: LiveRun, parameters: ScaleGradientsParameters) -> list[Change]:
        """The factor that would come into force."""
        return switch(run, "grad_factor", parameters.factor, 1.0)

    def apply(self, run: LiveRun, parameters: ScaleGradientsParameters) -> Undo:
        """Scale from the next update on."""
        self.preview(run, parameters)

        def before(optimizer: Any) -> None:
            for gradient in gradients(optimizer):
                gradient.mul_(parameters.factor)

        return run.around_update(before)
