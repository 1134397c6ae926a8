"""Where a NaN was born, read from the autograd graph of a loss that is not finite, before backward frees it.

Autograd nodes keep the tensors they need. Walking the graph from its leaves, the first node that stands where its
operation is not finite, or that keeps a tensor that is not finite, tells where it came in: it has no history (it is
data or a constant), it is a parameter, or it is the output of the node that made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradtracer.records import AuditFinding, Measure, NonFiniteOrigin, Severity, SourceLocation
from gradtracer.training.graph import LossGraph, count_non_finite, operation_of, saved_tensors
from gradtracer.training.singular import OVERFLOW, VARIANCE, Singularity, singularity

_RESULTS = ("_saved_result", "_saved_output", "_saved_log", "_saved_grad")
"""What a node keeps of its own result; all else that it keeps came in."""
_MASKS = ("_saved_attn_mask", "_saved_mask", "_saved_indices")
_RESIDUALS = frozenset({"Pow", "Abs", "Mul", "MseLoss", "Sum", "Mean"})
_LINEAR = frozenset({"Add", "Sub", "Rsub"})


@dataclass(frozen=True)
class Birth:
    """Where a NaN was born, as records."""

    origin: NonFiniteOrigin
    fault: AuditFinding | None
    """Which operation failed and how, where that is known."""


def birth_in_graph(graph: LossGraph, step: int) -> Birth:
    """Where the first non-finite number of a loss's graph was born, in forward order.

    Args:
        graph: The graph of a scalar that is not finite.
        step: The step it belongs to.
    """
    for parameter in graph.parameters():
        if count := count_non_finite(parameter):
            return Birth(
                NonFiniteOrigin(
                    step=step, where="weight", layer=graph.layer_of_parameter(parameter), num_non_finite=count,
                    detail="A parameter was not finite before this step's forward pass.",
                ),
                None,
            )  # fmt: skip
    # Minus infinity is how a mask is written, so it counts only where nothing else is found.
    for counts in (_num_nan_or_plus_infinity, count_non_finite):
        for node in graph.nodes:
            for kept, came_in in _kept(node):
                if came_in and (count := counts(kept)):
                    return _came_in(graph, step, node, kept, count)
            found = singularity(node)
            if found is not None and found.in_result:
                return born_at(graph, step, as_variance(graph, found), graph.layer_at(node))
            for kept, came_in in _kept(node):
                if not came_in and (count := counts(kept)):
                    return _made_by(graph, step, node, kept.numel(), count)
    name = graph.root.name() if graph.root is not None else None
    origin = NonFiniteOrigin(
        step=step, where="loss", operation=name, num_non_finite=1, source=graph.computed_at,
        detail="The last operation of the loss made it.",
    )  # fmt: skip
    return Birth(origin, None)


def as_variance(graph: LossGraph, found: Singularity) -> Singularity:
    """The overflow of a predicted precision, exp(-log variance) times a squared residual, by its own name."""
    if found.fault != OVERFLOW or operation_of(found.node) != "Exp":
        return found
    node = found.node
    for _ in range(3):  # factors of a half and the like may come between
        for consumer in graph.consumers.get(node, ()):
            others = [n for n, _ in consumer.next_functions if n is not None and n is not node]
            if operation_of(consumer) in ("Mul", "Div") and any(operation_of(n) in _RESIDUALS for n in others):
                detail = f"{found.detail} It weighs a residual: a predicted scale that has run away."
                return replace(found, fault=VARIANCE, detail=detail)
        above = graph.consumers.get(node, [])
        if len(above) != 1 or operation_of(above[0]) not in ("Mul", "Neg", "Expand", "Squeeze", "Unsqueeze"):
            break
        node = above[0]
    return found


def born_at(graph: LossGraph, step: int, found: Singularity, layer: str | None) -> Birth:
    """A singular operation as records."""
    in_loss = graph.is_in_loss(found.node)
    where = ("loss" if in_loss else "forward") if found.in_result else "backward"
    return _birth(step, where, None if in_loss else layer, found, graph.computed_at)


def born_in_gradient(
    step: int, found: Singularity, layer: str | None, reached: str, source: SourceLocation | None
) -> Birth:
    """A singular operation below a finite loss as records.

    Args:
        step: The step.
        found: The operation.
        layer: The module it stands in; None in the loss expression.
        reached: The layer nearest to the loss whose gradient is not finite.
        source: Where the loss is computed.
    """
    birth = _birth(step, "backward", layer, found, source)
    return Birth(birth.origin.model_copy(update={"layer": layer or reached}), birth.fault)


def born_in_loss(step: int, found: Singularity, layer: str | None, source: SourceLocation | None) -> Birth:
    """A singular operation that a step held, whose loss came out non-finite, as records."""
    return _birth(step, "loss" if layer is None else "forward", layer, found, source)


def born_in_data(step: int, node: Any, data: Tensor, layer: str | None, source: SourceLocation | None) -> Birth:
    """Data that a step received and held, and that is not finite, as records."""
    count = count_non_finite(data)
    origin = NonFiniteOrigin(
        step=step, where="data", layer=layer, operation=node.name(), num_non_finite=count, source=source,
        detail=f"A tensor of shape {list(data.shape)} that no layer computed holds {count} non-finite values; "
        f"{node.name()} received it.",
    )  # fmt: skip
    return Birth(origin, None)


def _birth(step: int, where: Any, layer: str | None, found: Singularity, source: SourceLocation | None) -> Birth:
    origin = NonFiniteOrigin(
        step=step, where=where, layer=layer, operation=found.node.name(), num_non_finite=found.count,
        source=source, detail=found.detail,
    )  # fmt: skip
    measure = Measure(name="elements", value=float(found.count), baseline=float(found.total))
    fault = AuditFinding(
        step=step, code=found.fault, layer=layer, severity=Severity.INFO, measures=(measure,), source=source,
        detail=found.detail,
    )  # fmt: skip
    return Birth(origin, fault)


def _came_in(graph: LossGraph, step: int, node: Any, kept: Tensor, count: int) -> Birth:
    made_by = kept.grad_fn
    if made_by is not None and not (
        operation_of(made_by) in _LINEAR
        and any(n is None for n, _ in made_by.next_functions)
        and bool(torch.isnan(kept.detach()).any())
    ):
        found = singularity(made_by)
        if found is not None and found.in_result:
            return born_at(graph, step, as_variance(graph, found), graph.layer_at(made_by))
        return _made_by(graph, step, made_by, kept.numel(), count)
    if made_by is None:
        layer, what = graph.own_layer(node), f"{node.name()} received it"
    else:
        # The sum or difference of two finite numbers is no NaN, so what was added or taken off was not finite.
        layer, what = None, f"{made_by.name()} received it, with a finite prediction"
    origin = NonFiniteOrigin(
        step=step, where="data", layer=layer, operation=node.name(), num_non_finite=count,
        detail=f"A tensor of shape {list(kept.shape)} that no layer computed holds {count} non-finite values; {what}.",
        source=graph.computed_at,
    )  # fmt: skip
    return Birth(origin, None)


def _made_by(graph: LossGraph, step: int, node: Any, total: int, count: int) -> Birth:
    detail = f"{node.name()} put out {count} non-finite values of {total}."
    return born_at(graph, step, Singularity(OVERFLOW, node, count, total, True, detail), graph.layer_at(node))


def _kept(node: Any) -> Iterator[tuple[Tensor, bool]]:
    """Tensors that the node keeps, and whether they came in (else they are its result)."""
    for attribute in dir(node):
        if attribute.startswith("_saved_") and not attribute.startswith(_MASKS):
            came_in = not attribute.startswith(_RESULTS)
            if attribute == "_saved_result1" or operation_of(node) in ("Max", "Min", "Logsumexp", "Topk"):
                continue
            yield from ((tensor, came_in) for tensor in saved_tensors(node, attribute))


def _num_nan_or_plus_infinity(tensor: Tensor) -> int:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    with torch.no_grad():
        kept = tensor.detach()
        if tensor.is_complex():
            return count_non_finite(kept)
        return int((torch.isnan(kept) | torch.isposinf(kept)).sum())
