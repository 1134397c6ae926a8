"""Clip the gradient by its norm."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
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
    mends = ("exploding_gradient", "learning_rate_too_high")
    Parameters = ClipGradNormParameters

    def preview(self, run: LiveRun, parameters: ClipGradNormParameters) -> list[Change]:
        """The bound that would come into force."""
        if not run.optimizers:
            raise BadParameter(
                "no optimizer has stepped yet, so there is no gradient to clip; try after the first step"
            )
        return [
            Change(target=f"optimizers[{o}].max_grad_norm", old=None, new=parameters.max_norm)
            for o in range(len(run.optimizers))
        ]

    def apply(self, run: LiveRun, parameters: ClipGradNormParameters) -> Undo:
        """Clip from the next update on."""
        import torch

        self.preview(run, parameters)

        def before(optimizer: Any) -> None:
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(held, parameters.max_norm)

        return run.around_update(before)
