"""Parameters that the model does not know, or that no optimizer holds."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_MAX_DEPTH = 4
_MAX_VISITED = 20_000


@dataclass(frozen=True)
class Stray:
    """A tensor that hangs on a module of the model outside of its registered parameters, buffers and modules."""

    tensor: Tensor
    owner: str
    """Path of the module."""
    attribute: str
    within: str
    """Where in the attribute, e.g. ``[0].weight``."""
    holder: str
    """The type of what holds it."""

    @property
    def place(self) -> str:
        """Path of the attribute."""
        return f"{self.owner}.{self.attribute}" if self.owner else self.attribute

    @property
    def name(self) -> str:
        """Path of the tensor."""
        return self.place + self.within


def strays(model: nn.Module) -> Iterator[Stray]:
    """Tensors found in the attributes of a model's modules, to a depth of 4, each once."""
    known = {id(p) for p in model.parameters()}
    visited: set[int] = set()
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_modules", "_buffers") or attribute.endswith("_hooks"):
                continue
            for tensor, within, holder in _tensors_in(value, "", type(value).__name__, visited, 0):
                if id(tensor) not in known:
                    known.add(id(tensor))
                    yield Stray(tensor, path, attribute, within, holder)


def held_by_any_optimizer() -> set[int]:
    """Ids of the parameters that optimizers of this process hold, stepped or not: a walk over all objects, 10 ms."""
    # By type and not by isinstance, which asks every object of the process for its class and wakes deprecated ones.
    return {
        id(parameter)
        for thing in gc.get_objects()
        if issubclass(type(thing), Optimizer)
        for group in thing.param_groups
        for parameter in group["params"]
    }


def _tensors_in(
    value: Any, within: str, holder: str, visited: set[int], depth: int
) -> Iterator[tuple[Tensor, str, str]]:
    if isinstance(value, Tensor):
        yield value, within, holder
        return
    if depth > _MAX_DEPTH or len(visited) > _MAX_VISITED or isinstance(value, (str, bytes, int, float, type)):
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, nn.Module):
        for path, module in value.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                yield parameter, f"{within}.{path}.{name}" if path else f"{within}.{name}", type(module).__name__
        return
    inside: Iterable[tuple[str, Any]]
    if isinstance(value, dict):
        inside = [(f"[{key!r}]"[:80], item) for key, item in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = [(f"[{i}]", item) for i, item in enumerate(value)]
    elif hasattr(value, "__dict__") and not callable(value):
        inside = [(f".{name}", item) for name, item in vars(value).items()]
    else:
        return
    for step, item in inside:
        yield from _tensors_in(item, within + step, type(item).__name__, visited, depth + 1)
