"""What singular operations received in this step, held until the gradient is known to be finite.

When a gradient is not finite while the loss was, backward has freed what the graph kept. So at every step references
to the inputs of the few operations that can do that are held (nothing is copied or read), and looked at only then.
Which operations those are, and how to come to them from the loss, is learnt at sampled steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtracer.records import SourceLocation
from gradtracer.training.graph import LossGraph, operation_of, saved, shape_of
from gradtracer.training.program import Program
from gradtracer.training.singular import ATTENTION, KEPT, WHERE, Singularity, is_masked, singularity

_MAX_STOPS = 256
"""Nodes that are passed on the way at every step: 0.4 microseconds each, a tenth of a millisecond in all."""
_MAX_ELEMENTS = 4_000_000
"""Elements held; they would have been freed during backward (16 MB in float32)."""
_MAX_RELEARN_NODES = 400
_MAX_OWNERS = 5_000

_LAYERS = {"Addmm": 1, "Convolution": 0}
"""Operations of layers, and which of their edges leads to what came in."""
_RESIDUALS = frozenset({"Abs", "Pow"})
_DATA = {
    **dict.fromkeys(_RESIDUALS, "self"),
    "Addmm": "mat1",
    "Convolution": "input",
    **dict.fromkeys(
        ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"), "target"
    ),
}
"""What an operation keeps of the data that came in."""
_SELECTS = frozenset({"Where", "Clamp", "ClampMax", "ClampMin", "Maximum", "Minimum", "MaskedFill", "IndexPut"})
"""Operations that pass on a gradient of zero to what they did not take."""
_FINITE_VALUE = frozenset({"Sqrt", "Pow", "Acos", "Asin", "Atan2", "Where", "Softmax"})
"""Operations whose gradient can be infinite or NaN while every result that reaches the loss is finite."""


@dataclass(frozen=True)
class _Stop:
    parent: int
    """Which stop it is reached from; -1 for the root itself."""
    edge: int
    name: str
    keep: tuple[str, ...]
    owner: str | None


@dataclass(frozen=True)
class _Plan:
    """How to come to the nodes that matter."""

    stops: tuple[_Stop, ...]
    names: tuple[str, ...]
    """Names of all nodes in forward order, to know the graph again."""
    owners: tuple[str | None, ...]


@dataclass(frozen=True)
class _Held:
    node: Any
    owner: str | None
    values: Mapping[str, Any]


@dataclass
class HeldInputs:
    """The inputs of singular operations of one step.

    Args:
        everything: Hold what spoils the loss too: on a device the loss is not looked at before backward.
        program: The program that trains.
        source: Where the newest loss that was learnt is computed.
    """

    everything: bool = False
    program: Program | None = None
    source: SourceLocation | None = None
    _plans: dict[Hashable, _Plan] = field(default_factory=dict)
    _held: list[_Held] = field(default_factory=list)
    _losses: list[Tensor] = field(default_factory=list)
    """Of a step whose graph may be asked for later: backward frees what its nodes keep, not how they hang together."""
    _num_elements: int = 0
    _num_relearnt: int = 0

    def learn(self, key: Hashable, graph: LossGraph) -> None:
        """Take note of the operations of a graph.

        Args:
            key: Which of a step's losses it is.
            graph: Its graph.
        """
        nodes = graph.nodes
        self.source = graph.computed_at
        order = {node: i for i, node in enumerate(nodes)}
        below_select: set[Any] = set()
        for node in reversed(nodes):
            if node in below_select or operation_of(node) in _SELECTS:
                below_select.update(n for n, _ in node.next_functions if n is not None)
        parents: dict[Any, tuple[Any, int]] = {}
        waiting, seen = [graph.root], {graph.root}
        wanted: list[Any] = []
        for node in waiting:  # breadth first: what is nearest to the loss comes first
            if self._matters(node, node in below_select):
                wanted.append(node)
            for edge, (child, _) in enumerate(node.next_functions):
                if child is not None and child not in seen:
                    seen.add(child)
                    parents[child] = (node, edge)
                    waiting.append(child)
        owners = tuple(graph.owner(n) for n in nodes) if graph.module_of and len(nodes) <= 500 else ()
        stops: list[_Stop] = []
        index: dict[Any, int] = {}
        keep, expression = set(wanted), set(graph.expression)
        for node in wanted:
            way: list[Any] = []
            at: Any = node
            while at not in index and at is not graph.root:
                way.append(at)
                at = parents[at][0]
            if at is graph.root and at not in index:
                way.append(at)
            if len(stops) + len(way) > _MAX_STOPS:
                continue
            for stop in reversed(way):
                parent, edge = (-1, 0) if stop is graph.root else (index[parents[stop][0]], parents[stop][1])
                index[stop] = len(stops)
                kept = KEPT.get(operation_of(stop), ()) if stop in keep else ()
                owner = (owners[order[stop]] if owners else graph.owner(stop)) if kept else None
                if kept and owner in (None, "(root)") and stop not in expression:
                    owner = graph.nearest_layer(stop)
                stops.append(_Stop(parent, edge, stop.name(), kept, owner))
        names = tuple(n.name() for n in nodes) if len(nodes) <= _MAX_OWNERS else ()
        if not owners and (known := self._plans.get(key)) is not None and known.names == names:
            # A graph that was looked at without its modules does not make us forget where things stand.
            owners = known.owners
            stops = [_Stop(s.parent, s.edge, s.name, s.keep, o.owner) for s, o in zip(stops, known.stops, strict=False)]
        self._plans[key] = _Plan(tuple(stops), names, owners)

    def hold(self, key: Hashable, loss: Tensor) -> None:
        """Hold what the loss's graph keeps of the operations that were learnt."""
        plan = self._plans.get(key)
        if plan is None or not plan.stops:
            return
        if self.everything:
            self._losses.append(loss)
        found: list[Any] = []
        for stop in plan.stops:
            node = loss.grad_fn
            if stop.parent >= 0:
                below = found[stop.parent].next_functions
                node = below[stop.edge][0] if stop.edge < len(below) else None
            if node is None or (stop.keep and node.name() != stop.name):
                self._learn_again(key, plan, loss)
                return
            found.append(node)
            if stop.keep:
                self._take(node, stop.owner, stop.keep)

    def release(self) -> None:
        """Let go of everything: the step is over."""
        if self._held:
            self._held = []
            self._num_elements = 0
        self._losses.clear()

    def owners_in(self, graph: LossGraph) -> dict[Any, str | None]:
        """The modules that compute the nodes of a graph that was met before, by node."""
        names = tuple(n.name() for n in graph.nodes)
        for plan in self._plans.values():
            if plan.owners and plan.names == names:
                return dict(zip(graph.nodes, plan.owners, strict=True))
        return {}

    def blame(self) -> tuple[Singularity, str | None] | None:
        """The operation that made the gradient non-finite, and the module it stands in; None where none is known."""
        found: list[tuple[int, Singularity, str | None]] = []
        values = {item.node: item.values for item in self._held}
        for item in self._held:
            one = singularity(item.node, item.values.get)
            if one is None:
                continue
            select = _not_taken(one, values) if one.fault != ATTENTION else None
            if select is not None:
                name, owner = select.name(), next((i.owner for i in self._held if i.node is select), item.owner)
                detail = f"{one.detail} {name} did not take them, but their gradient is 0 times infinity, which is NaN."
                spoilt = Singularity(WHERE, one.node, one.count, one.total, False, detail)
                found.append((0, spoilt, owner or item.owner))
            else:
                rank = 1 if one.fault == ATTENTION else 2 if not one.in_result else 3
                found.append((rank, one, item.owner))
        if not found:
            return None
        _, one, owner = min(found, key=lambda f: f[0])
        return one, owner

    def graph_of(self, node: Any, layer_of: Mapping[int, str]) -> LossGraph | None:
        """The graph of this step in which a held node stands; None where it was not kept."""
        graphs = (LossGraph(loss, layer_of) for loss in self._losses)
        return next((graph for graph in graphs if node in graph.consumers or node is graph.root), None)

    def spoilt_data(self) -> tuple[Any, Tensor, str | None] | None:
        """The first operation that received data which is not finite: its node, the data, and its module."""
        for item in reversed(self._held):  # what is nearest to the loss was held first
            name = _DATA.get(operation_of(item.node))
            value = item.values.get(name) if name is not None else None
            if not isinstance(value, Tensor):
                continue
            if value.grad_fn is None and not bool(torch.isfinite(value).all()):
                return item.node, value, item.owner
            # The difference of two finite numbers is no NaN, so the target was not finite.
            if _is_residual(item.node) and bool(torch.isnan(value.detach()).any()):
                return item.node, value, None
        return None

    def _matters(self, node: Any, below_select: bool) -> bool:
        operation = operation_of(node)
        if operation not in KEPT:
            return False
        if self.everything and _is_residual(node):
            return True
        if operation == "Abs":
            return False
        if operation == "Pow":
            exponent = saved(node, "exponent")
            return isinstance(exponent, Tensor) or not _is_whole(exponent)
        if operation == "Softmax":
            return is_masked(node)
        if operation == "Where":
            return True
        if operation.startswith("Clamp"):
            return any(operation_of(n) in ("Exp", "Log", "Div", "Sqrt", "Pow", "Reciprocal") for n in _below(node))
        if operation in _LAYERS:  # its input is data where nothing made it
            return self.everything and node.next_functions[_LAYERS[operation]][0] is None
        return self.everything or below_select or operation in _FINITE_VALUE

    def _take(self, node: Any, owner: str | None, names: tuple[str, ...]) -> None:
        values = {name: saved(node, name) for name in names}
        size = sum(v.numel() for v in values.values() if isinstance(v, Tensor))
        if self._num_elements + size <= _MAX_ELEMENTS:
            self._num_elements += size
            self._held.append(_Held(node, owner, values))

    def _learn_again(self, key: Hashable, plan: _Plan, loss: Tensor) -> None:
        # The graph has changed. Small ones are learnt anew at once, others at the next sampled step.
        self._num_relearnt += 1
        if plan.names and len(plan.names) <= _MAX_RELEARN_NODES and self._num_relearnt <= 100:
            graph = LossGraph(loss, {}, program=self.program)
            del self._plans[key]
            self.learn(key, graph)
            self.hold(key, loss)


def _is_residual(node: Any) -> bool:
    """Whether a prediction less data that nothing computed comes into the node."""
    if operation_of(node) not in _RESIDUALS:
        return False
    child = node.next_functions[0][0]
    return (
        child is not None
        and operation_of(child) in ("Sub", "Rsub", "Add")
        and any(n is None for n, _ in child.next_functions)
    )


def _is_whole(exponent: Any) -> bool:
    try:
        value = float(exponent)
    except (TypeError, ValueError):
        return True
    return value >= 1 or value == 0


def _not_taken(found: Singularity, values: Mapping[Any, Mapping[str, Any]]) -> Any:
    """The selecting operation above a singular one that took none of the singular elements; None if there is none."""
    # Upwards is not recorded in a graph, so look down from every held selection.
    for select, kept in values.items():
        operation = operation_of(select)
        if operation not in _SELECTS:
            continue
        condition = kept.get("condition")
        for edge, (child, _) in enumerate(select.next_functions):
            if child is None or all(node is not found.node for node in _below(child)):
                continue
            if isinstance(condition, Tensor) and found.where is not None and shape_of(child) == found.where.shape:
                taken = condition if edge == 0 else ~condition
                with torch.no_grad():
                    if bool((taken.expand(found.where.shape) & found.where).any()):
                        continue  # it was taken: the fault is the operation's own
            elif operation != "Where" and not found.in_result:
                continue  # a clamp hides what is too large, and a root at 0 is not
            return select
    return None


def _below(node: Any, limit: int = 24) -> list[Any]:
    """The node and the nearest ones before it."""
    waiting = [node]
    for current in waiting:
        for child, _ in current.next_functions:
            if child is not None and child not in waiting and len(waiting) < limit:
                waiting.append(child)
    return waiting
