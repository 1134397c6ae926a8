"""Clip the gradient element by element."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.fixes._updates import grad_scale, gradients, switch
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class ClipGradValueParameters(FixParameters):
    """Parameters of `clip_grad_value`."""

    max_value: float = Field(gt=0, le=1e6, description="Largest magnitude of an element of a gradient.")


@FIXES.register
class ClipGradValue(Fix[ClipGradValueParameters]):
    """Cut every element of the gradient to a bound before every update, until reverted.

    What:
        Elements are cut one by one, so a few large ones no longer rule the step; the direction changes.

    Why:
        Where single elements explode (a rare feature, one gate), clipping the norm would scale all others to nothing.

    Definition:
        ``g_i <- min(max(g_i, -max_value), max_value)``.

    Safety:
        Guarded: a bound below the usual elements turns the step into its signs.

    Undo:
        From the next update on gradients are used as they are.

    References:
        Mikolov 2012, "Statistical language models based on neural networks", PhD thesis, section 3.2.2.
    """

    code = "clip_grad_value"
    title = "Clip gradient elements"
    safety = Safety.GUARDED
    standing = True
    works_sharded = True
    mends = ("exploding_gradient",)
    Parameters = ClipGradValueParameters

    def preview(self, run: LiveRun, parameters: ClipGradValueParameters) -> list[Change]:
        """The bound that would come into force."""
        return switch(run, "max_grad_value", parameters.max_value)

    def apply(self, run: LiveRun, parameters: ClipGradValueParameters) -> Undo:
        """Clip from the next update on."""
        self.preview(run, parameters)

        def before(optimizer: Any) -> None:
            bound = parameters.max_value * grad_scale(optimizer)
            for gradient in gradients(optimizer):
                gradient.clamp_(-bound, bound)

        return run.around_update(before)
