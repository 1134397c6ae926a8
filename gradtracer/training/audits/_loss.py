"""What several audits read off the loss expression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradtracer.training.graph import LossGraph, operation_of, saved

CLASSIFIERS = frozenset({"NllLoss", "NllLoss2D", "NllLossNd"})
BINARY = frozenset({"BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"})
DISTANCES = frozenset({"MseLoss", "SmoothL1Loss", "HuberLoss"})
MARGINS = frozenset({"SoftMarginLoss", "MultilabelMarginLoss"})
TARGETED = CLASSIFIERS | BINARY | DISTANCES | MARGINS


@dataclass(frozen=True)
class LossNode:
    """An operation of torch's that is a loss, with the target it keeps."""

    node: Any
    operation: str
    target: Tensor | None


def loss_nodes(graph: LossGraph) -> list[LossNode]:
    """The losses of torch's own in the loss expression."""
    found: list[LossNode] = []
    for node in graph.nodes:
        operation = operation_of(node)
        if operation in TARGETED:
            target = saved(node, "target")
            found.append(LossNode(node, operation, target.detach() if isinstance(target, Tensor) else None))
    return found


def batch_size(graph: LossGraph) -> int | None:
    """The first axis of the losses' targets, where all agree on it."""
    sizes = {n.target.shape[0] for n in loss_nodes(graph) if n.target is not None and n.target.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None


def operands(node: Any) -> list[Any]:
    """The nodes before this one that have a history."""
    return [child for child, _ in node.next_functions if child is not None]
