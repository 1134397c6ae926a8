"""Hold layers still."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._updates import named_parameters, parameters_of, require_optimizer
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class FreezeParameters(FixParameters):
    """Parameters of `freeze`."""

    layers: str = Field(
        min_length=1,
        max_length=2000,
        description="Module paths, separated by commas; each with everything below it.",
    )


@FIXES.register
class Freeze(Fix[FreezeParameters]):
    """Leave layers out of every update, weight decay included, until reverted.

    What:
        Their gradients are computed as before and withheld from the optimizer. `requires_grad` stays as it is, so the
        graph, DDP and the program's own backward calls go on as they are; no time is saved.

    Why:
        A layer that breaks while the rest trains well (an embedding, a norm, a pretrained part at too high a rate) can
        be held while one looks for the reason.

    Definition:
        ``w_used = w`` for the chosen layers; their moments stand still too.

    Safety:
        Guarded: what is frozen does not learn.

    Undo:
        From the next update on the layers train again, with the moments they had.

    References:
        Chen, Xie, He 2021, arXiv:2104.02057, section 4 (a frozen patch projection ends the spikes of vision
        transformers).
    """

    code = "freeze"
    title = "Freeze layers"
    safety = Safety.GUARDED
    standing = True
    shows_in_loss = False
    mends = ("exploding_gradient",)
    Parameters = FreezeParameters

    def preview(self, run: LiveRun, parameters: FreezeParameters) -> list[Change]:
        """Which parameters would no longer train."""
        require_optimizer(run)
        held = {id(p) for optimizer in run.optimizers for p in parameters_of(optimizer)}
        chosen = [(name, p) for name, p in named_parameters(run, parameters.layers) if id(p) in held]
        if not chosen:
            raise BadParameter(f"no optimizer holds parameters of {parameters.layers[:80]!r}: they stand still already")
        return [Change(target=f"{name}.trains", old=True, new=False) for name, _ in chosen]

    def apply(self, run: LiveRun, parameters: FreezeParameters) -> Undo:
        """Withhold their gradients from the next update on."""
        self.preview(run, parameters)
        frozen = {id(p): p for _, p in named_parameters(run, parameters.layers)}
        withheld: list[tuple[Any, Any]] = []

        def before(optimizer: Any) -> None:
            for parameter in parameters_of(optimizer):
                if id(parameter) in frozen and parameter.grad is not None:
                    # An optimizer passes over parameters without a gradient; the user's gradient comes back after.
                    withheld.append((parameter, parameter.grad))
                    parameter.grad = None

        def after(optimizer: Any) -> None:
            for parameter, gradient in withheld:
                parameter.grad = gradient
            withheld.clear()

        return run.around_update(before, after)
