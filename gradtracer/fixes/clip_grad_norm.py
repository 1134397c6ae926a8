"""Clip the gradient by its norm."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.fixes._updates import grad_scale, gradients, norms, switch
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class ClipGradNormParameters(FixParameters):
    """Parameters of `clip_grad_norm`."""

    max_norm: float = Field(gt=0, le=1e6, description="Largest Euclidean norm over all gradients of an optimizer.")


@FIXES.register
class ClipGradNorm(Fix[ClipGradNormParameters]):
    """Scale the gradient down before every update in which its norm is above a bound, until reverted.

    What:
        Gradients of one optimizer are scaled together, so their direction stays.

    Why:
        One step along an exploding gradient can undo hours of training.

    Definition:
        ``g <- g * min(1, max_norm / ||g||)`` over all parameters of the optimizer.

    Safety:
        Guarded: a bound far below the usual norm slows the training as a lower rate would.

    Undo:
        From the next update on gradients are used as they are.

    References:
        Pascanu, Mikolov, Bengio 2013, "On the difficulty of training recurrent neural networks", algorithm 1.
    """

    code = "clip_grad_norm"
    title = "Clip the gradient norm"
    safety = Safety.GUARDED
    standing = True
    works_sharded = True
    mends = ("exploding_gradient", "learning_rate_too_high")
    Parameters = ClipGradNormParameters

    def preview(self, run: LiveRun, parameters: ClipGradNormParameters) -> list[Change]:
        """The bound that would come into force."""
        return switch(run, "max_grad_norm", parameters.max_norm)

    def apply(self, run: LiveRun, parameters: ClipGradNormParameters) -> Undo:
        """Clip from the next update on."""
        self.preview(run, parameters)

        def before(optimizer: Any) -> None:
            if held := gradients(optimizer):
                # No value is read here, so that a GPU is not waited for.
                ratio = parameters.max_norm * grad_scale(optimizer) / norms(held).norm().clamp_min(1e-30)
                for gradient in held:
                    gradient.mul_(ratio.clamp(max=1.0).to(gradient.device, gradient.dtype))

        return run.around_update(before)
