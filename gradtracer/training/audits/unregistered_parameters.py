"""Parameters that the loss depends on and the model does not know."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure, Severity, clean_name
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph
from gradtracer.training.layers import ROOT, source_of

_MAX_DEPTH = 4
_MAX_VISITED = 20_000


@AUDITS.register
class UnregisteredParameters(Audit):
    """Layers that run but are not in `model.modules()`.

    What:
        Modules or parameters kept in a plain list, tuple, dict or object, or tensors with requires_grad that are no
        nn.Parameter: the model does not see them, so neither do its optimizer, `to()` and `state_dict()`.

    Why:
        They keep their initial values and are missing from every checkpoint.

    Definition:
        A leaf of the loss's graph that is no parameter of the model, that hangs on a module of the model outside of
        its registered parameters and modules (found in the attributes, to a depth of 4), that no optimizer of the
        process holds, and whose values have not been written between two sampled steps. Named after the attribute.

    Thresholds:
        None: it is in the graph or not. Leaves that hang on no module of the model (inputs that require a gradient, a
        loss module with parameters of its own) are not reported.

    Fixes:
        In the source: nn.ModuleList, nn.ModuleDict, nn.ParameterList or nn.Parameter.

    References:
        PyTorch documentation, torch.nn.ModuleList and torch.nn.Parameter. pytorch/pytorch issue 715.
    """

    code = "unregistered_parameters"

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._leaves: dict[int, Tensor] = {}
        self._first_step = 0
        self._done = False

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Look for leaves that are none of the model's."""
        if self._done:
            return
        known = {id(p) for p in context.model.parameters()}
        held = {id(p) for o in context.optimizers for g in o.param_groups for p in g["params"]}
        foreign = {id(p): p for p in graph.parameters() if id(p) not in known and id(p) not in held and p.requires_grad}
        if not foreign:
            return
        still = {key: p for key, p in foreign.items() if self._versions.get(key) == p._version}
        if not self._versions:
            self._first_step = context.step
        self._versions = {key: p._version for key, p in foreign.items()}
        self._leaves = foreign  # keeps ids unique until the next look
        if not still:
            return
        self._done = True
        places: dict[tuple[str, str], list[str]] = {}
        for owner, attribute, type_name in _places(context.model, set(still)).values():
            places.setdefault((owner, attribute), []).append(type_name)
        if not places or _held_elsewhere(set(still)):
            return
        modules = dict(context.model.named_modules())
        for (owner, attribute), types in places.items():
            path = f"{owner}.{attribute}" if owner else attribute
            yield finding(
                context, "unregistered_parameters",
                f"{len(types)} parameters in {path} ({', '.join(sorted(set(types))[:3])}) are in the loss's graph and "
                f"not in {owner or ROOT}'s parameters, and no optimizer holds them.",
                layer=clean_name(path), severity=Severity.WARNING,
                measures=(Measure(name="num_parameters", value=float(len(types)), unit="tensors"),),
                source=source_of(modules[owner]),
            )  # fmt: skip


def _held_elsewhere(wanted: set[int]) -> bool:
    """Whether an optimizer that holds nothing of the model holds them; asked once a run."""
    # By type and not by isinstance, which asks every object of the process for its class and wakes deprecated ones.
    return any(
        id(p) in wanted
        for thing in gc.get_objects()
        if issubclass(type(thing), Optimizer)
        for group in thing.param_groups
        for p in group["params"]
    )


def _places(model: nn.Module, wanted: set[int]) -> dict[int, tuple[str, str, str]]:
    """For each parameter found: the path of the module that it hangs on, the attribute, and the type that holds it."""
    found: dict[int, tuple[str, str, str]] = {}
    visited: set[int] = set()
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_modules", "_buffers") or attribute.endswith("_hooks"):
                continue
            for tensor, holder in _leaves_in(value, type(value).__name__, visited, 0):
                if id(tensor) in wanted:
                    found.setdefault(id(tensor), (path, attribute, holder))
    return found


def _leaves_in(value: Any, holder: str, visited: set[int], depth: int) -> Iterator[tuple[Tensor, str]]:
    if isinstance(value, Tensor):
        yield value, holder
        return
    if depth > _MAX_DEPTH or len(visited) > _MAX_VISITED or isinstance(value, (str, bytes, int, float, type)):
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, nn.Module):
        for module in value.modules():
            for parameter in module.parameters(recurse=False):
                yield parameter, type(module).__name__
        return
    if isinstance(value, dict):
        inside: Iterable[Any] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    elif hasattr(value, "__dict__") and not callable(value):
        inside = list(vars(value).values())
    else:
        return
    for item in inside:
        yield from _leaves_in(item, type(item).__name__, visited, depth + 1)
