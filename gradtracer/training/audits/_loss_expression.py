"""Reading the end of a loss's graph: constants it is multiplied by, and how it was reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradtracer.training.graph import LossGraph, saved_tensors

_TRANSPARENT = frozenset(
    {"NegBackward0", "ViewBackward0", "SqueezeBackward0", "SqueezeBackward1", "ToCopyBackward0",
     "ReshapeAliasBackward0", "UnsafeViewBackward0", "CloneBackward0", "AliasBackward0"}
)  # fmt: skip
_OWN_REDUCTION = frozenset(
    {"NllLossBackward0", "NllLoss2DBackward0", "MseLossBackward0", "BinaryCrossEntropyBackward0", "L1LossBackward0",
     "BinaryCrossEntropyWithLogitsBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "SoftMarginLossBackward0"}
)  # fmt: skip
_MEAN, _SUM = 1, 2
_MAX_HOPS = 12


@dataclass(frozen=True)
class LossEnd:
    """The last operations of a loss, from its reduction on."""

    factor: float
    """Product of the constants by which the whole loss is multiplied."""
    reduction: str
    """`mean`, `sum`, or empty where it is none of these."""
    num_terms: int
    """Elements that were reduced; 0 where unknown."""
    node: Any
    """The node that reduces, or the first that is no constant factor."""


def loss_end(graph: LossGraph) -> LossEnd:
    """Follow a loss from its end to its reduction. The factor of a GradScaler is left out."""
    node, factor = graph.root, 1.0
    if node is not None and graph.loss_scale is not None:
        node = _only_input(node) or node
    for _ in range(_MAX_HOPS):
        if node is None:
            break
        name = node.name()
        if name in ("MulBackward0", "DivBackward0"):
            below, constant = _only_input(node), _constant(node)
            if below is None or constant is None or constant == 0:
                break
            factor *= constant if name == "MulBackward0" else 1.0 / constant
            node = below
        elif name in _TRANSPARENT and _only_input(node) is not None:
            node = _only_input(node)
        else:
            break
    reduction, num_terms = _reduction(node)
    return LossEnd(factor, reduction, num_terms, node)


def chain(graph: LossGraph, hops: int = 8) -> tuple[str, ...]:
    """Names of the nodes from the end of the loss down its first inputs: tells one kind of loss from another."""
    names: list[str] = []
    node = graph.root
    while node is not None and len(names) < hops:
        names.append(node.name())
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return tuple(names)


def _only_input(node: Any) -> Any:
    inputs = [n for n, _ in node.next_functions if n is not None]
    return inputs[0] if len(inputs) == 1 else None


def _constant(node: Any) -> float | None:
    """The one-element operand of a product or quotient whose other operand has a history."""
    for name in ("_saved_other", "_saved_self"):
        for saved in saved_tensors(node, name):
            if saved.numel() == 1 and saved.grad_fn is None and not saved.requires_grad and saved.device.type == "cpu":
                return float(saved)
    return None


def _reduction(node: Any) -> tuple[str, int]:
    if node is None:
        return "", 0
    name = node.name()
    if name.startswith(("MeanBackward", "SumBackward")):
        size = getattr(node, "_saved_self_sym_numel", None)
        if size is None:
            size = 1
            for n in getattr(node, "_saved_self_sym_sizes", ()):
                size *= int(n)
        return ("mean" if name.startswith("Mean") else "sum"), int(size)
    if name in _OWN_REDUCTION:
        kind = getattr(node, "_saved_reduction", None)
        target: Tensor | None = next(saved_tensors(node, "_saved_target"), None)
        size = target.numel() if target is not None else 0
        return {_MEAN: "mean", _SUM: "sum"}.get(int(kind) if kind is not None else 0, ""), size
    return "", 0
