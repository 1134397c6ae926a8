"""Give the optimizer what it was not given."""

from __future__ import annotations

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._joining import group_to_join, join
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class AddMissingParametersParameters(FixParameters):
    """Parameters of `add_missing_parameters`."""

    optimizer: int = Field(default=0, ge=0, le=1000, description="Which optimizer they join, in order of first step.")
    group: int | None = Field(
        default=None,
        ge=0,
        le=10_000,
        description="Which of its groups, whose rate and other settings they share; the largest by default.",
    )


@FIXES.register
class AddMissingParameters(Fix[AddMissingParametersParameters]):
    """Let parameters that get a gradient and that no optimizer holds join an optimizer.

    What:
        Those of the model, and those of layers that it runs without having registered them (kept in a list or dict).
        They join an existing group, so that its rate and schedule are theirs; schedulers fail where there is a group
        more than they were built for. Their gradients, which nobody has cleared, are dropped first.

    Why:
        They keep their initial values for the whole run, while the loss falls on account of the others.

    Definition:
        ``group.params <- group.params + [p]`` for each p with ``requires_grad`` that has had a gradient and that no
        optimizer of the process holds.

    Safety:
        Guarded: parameters may be left out on purpose, and updated by something else. Layers that are not registered
        are missing from `state_dict()` whether they train or not; register them in the source. On several ranks only
        registered parameters are taken: DDP does not reduce the gradients of others.

    Undo:
        They leave the optimizer, at the values they have by then.

    References:
        PyTorch documentation, torch.optim, "Constructing it"; torch.nn.ModuleList.
    """

    code = "add_missing_parameters"
    title = "Add missing parameters to the optimizer"
    safety = Safety.GUARDED
    shows_in_loss = False
    standing = True
    mends = ("missing_optimizer_params", "unregistered_module")
    Parameters = AddMissingParametersParameters

    def preview(self, run: LiveRun, parameters: AddMissingParametersParameters) -> list[Change]:
        """Which parameters would join which group."""
        path, _ = group_to_join(run, parameters.optimizer, parameters.group)
        missing = run.missing_parameters()
        if not missing:
            raise BadParameter("every parameter that has had a gradient is held by an optimizer: none is missing")
        return [Change(target=f"{name}.optimizer_group", old=None, new=path) for name, _ in missing]

    def apply(self, run: LiveRun, parameters: AddMissingParametersParameters) -> Undo:
        """Let them join."""
        self.preview(run, parameters)
        return join(run, parameters.optimizer, parameters.group, [p for _, p in run.missing_parameters()])
