"""Clear gradients behind every update."""

from __future__ import annotations

from typing import Any

from gradtracer.fixes._updates import parameters_of, switch
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


@FIXES.register
class ClearGradients(Fix[FixParameters]):
    """Set all gradients of an optimizer to zero after each of its updates, until reverted.

    What:
        What `optimizer.zero_grad(set_to_none=False)` does, called once an update; and once now, so that what has piled
        up does not go into the next one. Gradients stay in place as zeros: a program that reads them finds a tensor.

    Why:
        Where nobody clears gradients, every step follows the sum of all that were computed so far.

    Definition:
        ``g <- 0`` behind each update.

    Safety:
        Guarded: a program that carries gradients over updates on purpose loses that.

    Undo:
        Gradients stand after an update again.

    References:
        PyTorch documentation, torch.optim.Optimizer.zero_grad.
    """

    code = "clear_gradients"
    title = "Clear gradients after each update"
    safety = Safety.GUARDED
    standing = True
    shows_in_loss = False
    loss_may_rise = True
    works_sharded = True
    mends = ("gradient_accumulation", "zero_grad_missing")

    def preview(self, run: LiveRun, parameters: FixParameters) -> list[Change]:
        """That gradients would be cleared."""
        return switch(run, "clear_gradients", new=True, old=False)

    def apply(self, run: LiveRun, parameters: FixParameters) -> Undo:
        """Clear now, and after each update."""
        self.preview(run, parameters)
        for optimizer in run.optimizers:
            _clear(optimizer)
        return run.around_update(lambda optimizer: None, _clear)


def _clear(optimizer: Any) -> None:
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None:
            parameter.grad.detach_().zero_()
