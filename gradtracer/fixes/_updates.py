"""What fixes of updates share: gradients as an optimizer is about to use them, hyperparameters held for one update.

torch is imported inside functions: the server lists fixes without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradtracer.errors import BadParameter
from gradtracer.fixes.base import LiveRun, Undo
from gradtracer.records import Change, ParameterScalar


def require_optimizer(run: LiveRun) -> None:
    """Refuse where nothing has been updated yet.

    Raises:
        BadParameter: If no optimizer is known.
    """
    if not run.optimizers:
        raise BadParameter("no optimizer has stepped yet, so there is nothing to act on; try after the first step")


def switch(run: LiveRun, name: str, new: ParameterScalar, old: ParameterScalar = None) -> list[Change]:
    """The same change of every optimizer.

    Raises:
        BadParameter: If no optimizer is known.
    """
    require_optimizer(run)
    return [Change(target=f"optimizers[{o}].{name}", old=old, new=new) for o in range(len(run.optimizers))]


def hyperparameters(run: LiveRun, name: str, group: int | None = None) -> list[tuple[str, Any]]:
    """Path and value of a hyperparameter in all groups that have it, or in one group of each optimizer.

    Raises:
        BadParameter: If there is none.
    """
    require_optimizer(run)
    found = [
        (f"optimizers[{o}].param_groups[{g}].{name}", hyper[name])
        for o, optimizer in enumerate(run.optimizers)
        for g, hyper in enumerate(optimizer.param_groups)
        if (group is None or g == group) and name in hyper
    ]
    if not found:
        counts = [len(o.param_groups) for o in run.optimizers]
        if group is not None and group >= max(counts):
            raise BadParameter(f"group {group} does not exist: the optimizers have {counts} groups")
        types = ", ".join(type(o).__name__ for o in run.optimizers)
        raise BadParameter(f"{types} has no {name}, so it cannot be set")
    return found


Plan = Callable[[Any], Callable[[dict[str, Any]], Mapping[str, Any]]]
"""Called once before an update of an optimizer; gives what each of its groups is to use in it."""


def hold(run: LiveRun, plan: Plan, group: int | None = None) -> Undo:
    """Put hyperparameters in before each update and the optimizer's own back after it.

    So a schedule neither overrides them nor is thrown off, and a checkpoint holds the user's values.

    Args:
        run: The run.
        plan: What to use; hyperparameters that a group does not have are left alone.
        group: Only this group of each optimizer; all by default.
    """
    own: list[tuple[dict[str, Any], str, Any]] = []

    def before(optimizer: Any) -> None:
        values_of = plan(optimizer)
        for g, hyper in enumerate(optimizer.param_groups):
            if group is None or g == group:
                for name, value in values_of(hyper).items():
                    if name in hyper:
                        own.append((hyper, name, _swap(hyper, name, value)))

    def after(optimizer: Any) -> None:
        for hyper, name, value in reversed(own):
            _swap(hyper, name, value)
        own.clear()

    return run.around_update(before, after)


def _swap(hyper: dict[str, Any], name: str, value: Any) -> Any:
    """Put a value in, hand the old one back; a tensor (the rate of a capturable optimizer) is changed in place."""
    held = hyper[name]
    if hasattr(held, "fill_"):
        old = float(held)
        held.fill_(value)
        return old
    hyper[name] = value
    return held


def parameters_of(optimizer: Any) -> list[Any]:
    """All parameters of an optimizer."""
    return [p for hyper in optimizer.param_groups for p in hyper["params"]]


def gradients(optimizer: Any) -> list[Any]:
    """The gradients of an optimizer as dense tensors to read or change in place; of a sparse one, its values."""
    found: list[Any] = []
    for parameter in parameters_of(optimizer):
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            found.append(parameter.grad.detach().values())
        else:
            found.append(parameter.grad.detach())
    return found


def norms(tensors: Sequence[Any], order: float = 2.0) -> Any:
    """Norms in float32 or better, `[len(tensors)]`, on the first one's device; of sharded tensors, over all ranks."""
    import torch

    found: list[Any] = []
    for tensor in tensors:
        kind = torch.float32 if tensor.element_size() < 4 else tensor.dtype
        found.append(whole(torch.linalg.vector_norm(tensor.detach(), order, dtype=kind)).to(torch.float64))
    return torch.stack([n.to(found[0].device) for n in found])


def whole(tensor: Any) -> Any:
    """A sharded tensor (DTensor) put together; others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def grad_norm(optimizer: Any) -> float:
    """Euclidean norm of the whole gradient as the optimizer will use it; infinity where not finite, 0 where empty."""
    held = gradients(optimizer)
    if not held:
        return 0.0
    norm = float(norms(held).norm()) / grad_scale(optimizer)
    return norm if norm < float("inf") else float("inf")


def grad_scale(optimizer: Any) -> float:
    """By what a fused optimizer will divide gradients inside its kernel; 1 for all others."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def named_parameters(run: LiveRun, layers: str) -> list[tuple[str, Any]]:
    """Names and parameters of these modules and all below them.

    Args:
        run: The run.
        layers: Module paths, separated by commas.

    Raises:
        BadParameter: If the model has no module of a path, or it has no parameters.
    """
    known = list(run.model.named_parameters())
    found: dict[int, tuple[str, Any]] = {}
    for path in (part.strip() for part in layers.split(",")):
        below = [(name, p) for name, p in known if name == path or name.startswith(f"{path}.")]
        if not below:
            some = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name, _ in known[:40]))
            raise BadParameter(f"the model has no parameters at {path[:80]!r}; there are: {some}")
        found.update((id(p), (name, p)) for name, p in below)
    return list(found.values())
