"""The model as layers: which parameters belong together, and how a layer is called."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradtracer.records import LayerInfo, ModelDescription, SourceLocation, clean_name

ROOT = "(root)"
_TORCH_FOLDER = os.path.dirname(torch.__file__)


@dataclass(frozen=True)
class Layer:
    """A module that holds parameters itself."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]
    """Full parameter names and the parameters; one that is shared belongs to the first layer that has it."""


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a model, in order of registration."""
    seen: set[int] = set()
    found: list[Layer] = []
    for path, module in model.named_modules():
        own = [(f"{path}.{n}" if path else n, p) for n, p in module.named_parameters(recurse=False)]
        fresh = tuple((name, p) for name, p in own if id(p) not in seen)
        seen.update(id(p) for _, p in fresh)
        if fresh:
            found.append(Layer(clean_name(path) or ROOT, module, fresh))
    return found


def watched_modules(model: nn.Module) -> dict[int, str]:
    """Names, by id, of the modules whose output is of interest: those with parameters of their own, and leaves."""
    return {
        id(module): clean_name(path) or ROOT
        for path, module in model.named_modules()
        if next(module.children(), None) is None or next(module.parameters(recurse=False), None) is not None
    }


def source_of(thing: object) -> SourceLocation | None:
    """Where the class (or function) stands in the user's program; None for those of torch and of other packages."""
    target = thing if inspect.isfunction(thing) or inspect.isclass(thing) else type(thing)
    try:
        file = inspect.getsourcefile(target)
        line = inspect.getsourcelines(target)[1]
    except (OSError, TypeError):
        return None
    if file is None or file.startswith(_TORCH_FOLDER) or "site-packages" in file:
        return None
    return SourceLocation(file=file, line=max(line, 1), what=target.__qualname__)


def owner_sources(model: nn.Module) -> dict[str, SourceLocation]:
    """For each module path, where the innermost class of the user's that contains it stands."""
    found: dict[str, SourceLocation] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        source = source_of(module) or found.get(parent) or found.get("")
        if source is not None:
            found[path] = source
    return {clean_name(path) or ROOT: source for path, source in found.items()}


def describe_model(
    model: nn.Module,
    layers: Sequence[Layer],
    *,
    step: int,
    held: set[int],
    forward_order: Sequence[str],
    fed_by: dict[str, str],
    types: dict[str, str],
    loss_source: SourceLocation | None = None,
) -> ModelDescription:
    """The model as a record.

    Args:
        model: The model.
        layers: Its layers.
        step: The step at which this is known.
        held: Ids of the parameters that optimizers hold.
        forward_order: Names of watched modules in the order in which the forward pass ran them; empty if unknown.
        fed_by: For a module, the one whose output is its input.
        types: Class names of modules without parameters that the forward pass ran, by name.
        loss_source: Where the loss is computed.
    """
    by_name = {layer.name: layer for layer in layers}
    sources = owner_sources(model)
    ordered = list(dict.fromkeys([*(n for n in forward_order if n in by_name or n in types), *by_name]))
    infos: list[LayerInfo] = []
    for name in ordered:
        layer = by_name.get(name)
        parameters = [p for _, p in layer.parameters] if layer else []
        infos.append(
            LayerInfo(
                name=name,
                type=type(layer.module).__name__ if layer else types[name],
                num_parameters=sum(p.numel() for p in parameters),
                trainable=any(p.requires_grad for p in parameters),
                in_optimizer=all(id(p) in held for p in parameters if p.requires_grad),
                fed_by=fed_by.get(name),
                source=sources.get(name.partition("#")[0]),
            )
        )
    parameters = list(model.parameters())
    return ModelDescription(
        step=step,
        type=type(model).__name__,
        num_parameters=sum(p.numel() for p in parameters),
        num_bytes=sum(p.numel() * p.element_size() for p in parameters),
        forward_order_known=bool(forward_order),
        layers=tuple(infos),
        source=source_of(model),
        loss_source=loss_source,
    )
