"""What fixes of the model share: finding its modules by name, and keeping numbers in order to put them back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gradtracer.errors import BadParameter
from gradtracer.fixes.base import LiveRun, Undo
from gradtracer.records import clean_name

ROOT = "(root)"


def all_modules(run: LiveRun) -> dict[str, Any]:
    """The model's modules by the names that records use."""
    return {clean_name(path) or ROOT: module for path, module in run.model.named_modules()}


def choose(run: LiveRun, names: str | None, fits: Callable[[Any], bool], kind: str) -> dict[str, Any]:
    """Modules by name.

    Args:
        run: The live run.
        names: Names with commas between them; a module that contains others stands for those that fit. None for all.
        fits: Whether the fix can act on a module.
        kind: What such modules are, for the message.

    Raises:
        BadParameter: If a name is unknown, or nothing of its kind is there.
    """
    known = all_modules(run)
    fitting = {name: module for name, module in known.items() if fits(module)}
    shown = ", ".join(list(fitting)[:12]) or "none"
    if names is None:
        if not fitting:
            raise BadParameter(f"the model has no {kind}")
        return fitting
    found: dict[str, Any] = {}
    for name in (n.strip() for n in names.split(",")):
        if name not in known:
            raise BadParameter(f"no layer {name[:80]!r}; of the kind {kind!r} there are: {shown}")
        within = {n: m for n, m in fitting.items() if n == name or n.startswith(f"{name}.") or name == ROOT}
        if not within:
            raise BadParameter(f"{name!r} is a {type(known[name]).__name__} and no {kind}; there are: {shown}")
        found.update(within)
    return found


def choose_one(run: LiveRun, name: str) -> Any:
    """The module of a name.

    Raises:
        BadParameter: If there is none.
    """
    known = all_modules(run)
    if name not in known:
        shown = ", ".join(list(known)[:12])
        raise BadParameter(f"no layer {name[:80]!r}; there are: {shown}")
    return known[name]


def keep(run: LiveRun, tensors: Iterable[Any]) -> Undo:
    """Copy tensors and the optimizers' state of them; the undo puts both back, in place."""
    unique = list({id(t): t for t in tensors}.values())
    values = [t.detach().clone() for t in unique]
    moments = keep_moments(run, unique)

    def undo() -> None:
        for tensor, value in zip(unique, values, strict=True):
            tensor.detach().copy_(value)
        moments()

    return undo


def keep_moments(run: LiveRun, parameters: Iterable[Any]) -> Undo:
    """Copy what optimizers remember of parameters; the undo puts it back."""
    states = [
        (o, p, copy.deepcopy(dict(o.state[p])) if p in o.state else None) for p in parameters for o in run.optimizers
    ]

    def undo() -> None:
        for optimizer, parameter, state in states:
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter].clear()
                optimizer.state[parameter].update(copy.deepcopy(state))

    return undo


def forget_moments(run: LiveRun, parameters: Iterable[Any]) -> None:
    """Drop what optimizers remember of parameters: they begin anew with the next update."""
    for parameter in parameters:
        for optimizer in run.optimizers:
            if parameter in optimizer.state:
                optimizer.state[parameter].clear()


def forget_moments_at(run: LiveRun, parameter: Any, index: Any, dim: int = 0) -> None:
    """Set moments of a part of a parameter to zero.

    Args:
        run: The live run.
        parameter: The parameter.
        index: Integers, ``[n]``, along `dim`.
        dim: The axis.
    """
    for optimizer in run.optimizers:
        for value in optimizer.state[parameter].values() if parameter in optimizer.state else ():
            if getattr(value, "shape", None) == parameter.shape:
                value.index_fill_(dim, index.to(value.device), 0)


def seeded(run: LiveRun, seed: int) -> Any:
    """A generator of its own: the same numbers on every rank, and the training's random states stay as they are."""
    import torch

    return torch.Generator().manual_seed(1_000_003 * seed + run.step + 1)


def rehearse_if_possible(run: LiveRun, num_batches: int) -> bool:
    """Rehearse where a step can run again; whether it did."""
    try:
        return run.rehearse(num_batches) > 0
    except BadParameter:
        return False


def draw_anew(run: LiveRun, modules: Mapping[str, Any], seed: int, scheme: str = "auto") -> Undo:
    """Draw the weights of modules anew, by what follows each, and forget their moments.

    Args:
        run: The live run.
        modules: By name; those that `gradtracer.training.initialise.can_initialise`.
        seed: Seed of the random numbers.
        scheme: See `gradtracer.training.initialise`.
    """
    from gradtracer.training.flow import reading_flow
    from gradtracer.training.initialise import initialise

    with reading_flow(run.model) as flow:
        seen = scheme == "auto" and rehearse_if_possible(run, 1)
    undo = keep(run, (t for m in modules.values() for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))))
    generator = seeded(run, seed)
    for name, module in modules.items():
        follows = flow.activation.get(name, "none" if seen and name in flow.order else "relu")
        initialise(module, follows, scheme, generator)
    forget_moments(run, (p for m in modules.values() for p in m.parameters(recurse=False)))
    return undo


def trained_layers(run: LiveRun, names: str | None = None) -> dict[str, Any]:
    """Layers whose weights can be drawn anew, by name.

    Raises:
        BadParameter: If there is none.
    """
    from gradtracer.training.initialise import can_initialise

    return choose(run, names, can_initialise, "layer with trained weights of a known kind")


def all_of(undos: Sequence[Undo]) -> Undo:
    """One undo for several, the last first."""

    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo
