"""Let the optimizer forget."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._updates import require_optimizer
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class ResetOptimizerStateParameters(FixParameters):
    """Parameters of `reset_optimizer_state`."""

    optimizer: int | None = Field(
        default=None, ge=0, le=1000, description="Only this optimizer, in order of first step; all by default."
    )


@FIXES.register
class ResetOptimizerState(Fix[ResetOptimizerStateParameters]):
    """Throw away the optimizer's moments and step counts: it goes on as if it had just been built.

    What:
        All that an optimizer remembers by parameter. Hyperparameters and weights stay.

    Why:
        Moments that a few wild or non-finite gradients have filled steer the run wrong for the next 1 / (1 - beta2)
        updates, while the weights may be sound.

    Definition:
        ``state[p] <- {}`` for each parameter p, as after construction.

    Safety:
        Guarded: fresh adaptive moments make the first updates as large as the rate allows; put `warmup` with it.

    Undo:
        The old state is put back.

    References:
        Kingma & Ba 2015, arXiv:1412.6980, section 3 (bias correction after a start from zero).
    """

    code = "reset_optimizer_state"
    title = "Reset the optimizer's state"
    safety = Safety.GUARDED
    mends = ("exploding_gradient", "zero_grad_missing")
    Parameters = ResetOptimizerStateParameters

    def preview(self, run: LiveRun, parameters: ResetOptimizerStateParameters) -> list[Change]:
        """How many parameters have a state that would go."""
        changes = [
            Change(target=f"optimizers[{o}].num_parameters_with_state", old=len(optimizer.state), new=0)
            for o, optimizer in _chosen(run, parameters)
            if optimizer.state
        ]
        if not changes:
            raise BadParameter("the optimizer keeps no state, so there is nothing to reset")
        return changes

    def apply(self, run: LiveRun, parameters: ResetOptimizerStateParameters) -> Undo:
        """Forget."""
        import torch

        self.preview(run, parameters)
        old = [(optimizer, dict(optimizer.state)) for _, optimizer in _chosen(run, parameters)]
        for optimizer, _ in old:
            optimizer.state.clear()
            if isinstance(optimizer, torch.optim.Adagrad):  # it makes its state when it is built, not at the first step
                groups = [dict(group) for group in optimizer.param_groups]
                optimizer.state.update(torch.optim.Adagrad(groups).state)

        def undo() -> None:
            for optimizer, state in old:
                optimizer.state.clear()
                optimizer.state.update(state)

        return undo


def _chosen(run: LiveRun, parameters: ResetOptimizerStateParameters) -> list[tuple[int, Any]]:
    require_optimizer(run)
    chosen = [(o, x) for o, x in enumerate(run.optimizers) if parameters.optimizer in (None, o)]
    if not chosen:
        raise BadParameter(
            f"optimizer {parameters.optimizer} does not exist: {len(run.optimizers)} have stepped so far"
        )
    return chosen
