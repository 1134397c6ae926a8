"""Clip gradients by the weights that they move."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.fixes._updates import grad_scale, parameters_of, switch
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class AdaptiveGradClipParameters(FixParameters):
    """Parameters of `adaptive_grad_clip`."""

    clipping: float = Field(
        default=0.01, gt=0, le=10, description="Largest ratio of a unit's gradient norm to its weight norm."
    )
    epsilon: float = Field(default=1e-3, gt=0, le=1, description="Weight norms count as at least this.")


@FIXES.register
class AdaptiveGradClip(Fix[AdaptiveGradClipParameters]):
    """Scale down the gradient of each unit whose norm is large against that of its weights, until reverted.

    What:
        A unit is a row of a weight matrix, an output channel of a convolution, a row of a table, or a whole vector
        (bias, gain). Each is clipped for itself, so one exploding layer does not slow the others.

    Why:
        What a step does depends on the gradient relative to the weights; a single bound for all layers is too tight
        for some and too loose for others.

    Definition:
        ``G_i <- clipping * max(||W_i||, epsilon) / ||G_i|| * G_i`` where ``||G_i|| / max(||W_i||, epsilon)`` is above
        `clipping`; i runs over units.

    Safety:
        Guarded: units that must grow from zero do so slowly.

    Undo:
        From the next update on gradients are used as they are.

    References:
        Brock, De, Smith, Simonyan 2021, arXiv:2102.06171, equation 3 and section 4.1.
    """

    code = "adaptive_grad_clip"
    title = "Clip gradients by their weights"
    safety = Safety.GUARDED
    standing = True
    mends = ("exploding_gradient", "learning_rate_too_high")
    Parameters = AdaptiveGradClipParameters

    def preview(self, run: LiveRun, parameters: AdaptiveGradClipParameters) -> list[Change]:
        """The ratio that would come into force."""
        return switch(run, "max_unit_grad_ratio", parameters.clipping)

    def apply(self, run: LiveRun, parameters: AdaptiveGradClipParameters) -> Undo:
        """Clip from the next update on."""
        import torch

        self.preview(run, parameters)

        def clip(gradient: Any, weight: Any, scale: float) -> None:
            dims = tuple(range(1, gradient.dim())) or None
            bound = torch.linalg.vector_norm(weight, dim=dims, keepdim=dims is not None, dtype=torch.float32)
            bound = parameters.clipping * scale * bound.clamp_min(parameters.epsilon)
            norm = torch.linalg.vector_norm(gradient, dim=dims, keepdim=dims is not None, dtype=torch.float32)
            gradient.mul_((bound / norm.clamp_min(1e-30)).clamp(max=1.0).to(gradient.dtype))

        def before(optimizer: Any) -> None:
            scale = grad_scale(optimizer)
            for parameter in parameters_of(optimizer):
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
                    gradient = parameter.grad.detach()
                    clip(gradient.values(), parameter.detach()[gradient.indices()[0]], scale)
                else:
                    clip(parameter.grad.detach(), parameter.detach(), scale)

        return run.around_update(before)
