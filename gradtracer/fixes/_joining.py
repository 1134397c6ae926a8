"""Parameters that join an optimizer while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradtracer.errors import BadParameter
from gradtracer.fixes._updates import require_optimizer
from gradtracer.fixes.base import LiveRun, Undo


def group_to_join(run: LiveRun, optimizer: int, group: int | None) -> tuple[str, dict[str, Any]]:
    """Path and group that new parameters would join: by default the one that holds most elements.

    Raises:
        BadParameter: If it does not exist, or the optimizer can take no more parameters.
    """
    require_optimizer(run)
    if optimizer >= len(run.optimizers):
        raise BadParameter(f"optimizer {optimizer} does not exist: {len(run.optimizers)} have stepped so far")
    chosen = run.optimizers[optimizer]
    if type(chosen).__name__ == "LBFGS":
        raise BadParameter("LBFGS keeps one history of all its parameters, so none can join it; use another optimizer")
    groups = chosen.param_groups
    if group is not None and group >= len(groups):
        raise BadParameter(f"group {group} does not exist: optimizer {optimizer} has {len(groups)} groups")
    if group is None:
        group = max(range(len(groups)), key=lambda g: sum(p.numel() for p in groups[g]["params"]))
    return f"optimizers[{optimizer}].param_groups[{group}]", groups[group]


def join(run: LiveRun, optimizer: int, group: int | None, parameters: Sequence[Any]) -> Undo:
    """Let parameters join a group, with empty gradients: those that stand may be sums over the whole run.

    They join a group and make none of their own: schedulers count groups, and fail where there is one more.

    Returns:
        A callable that takes them out again.

    Raises:
        BadParameter: As `group_to_join`.
    """
    import torch

    _, hyper = group_to_join(run, optimizer, group)
    chosen = run.optimizers[optimizer]
    for parameter in parameters:
        parameter.grad = None
    hyper["params"].extend(parameters)
    if isinstance(chosen, torch.optim.Adagrad):  # it makes its state when it is built, not at the first step
        own = {name: value for name, value in hyper.items() if name != "params"}
        chosen.state.update(torch.optim.Adagrad([{**own, "params": list(parameters)}]).state)

    def undo() -> None:
        joined = {id(p) for p in parameters}
        hyper["params"][:] = [p for p in hyper["params"] if id(p) not in joined]
        for parameter in parameters:
            chosen.state.pop(parameter, None)
            parameter.grad = None

    return undo


def refuse_if_replicated(why: str) -> None:
    """Refuse on several ranks.

    Raises:
        BadParameter: If gradients of these parameters would not be reduced over the ranks.
    """
    import torch

    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise BadParameter(why)
