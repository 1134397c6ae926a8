"""The terms of a loss, with prediction and target, read from the nodes that torch keeps for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradtracer.training.graph import LossGraph, saved

_CLASSES = ("NllLossBackward0", "NllLoss2DBackward0", "MultiMarginLossBackward0")
_BINARY = ("BinaryCrossEntropyWithLogitsBackward0", "BinaryCrossEntropyBackward0")
_VALUES = ("MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0")
_NO_REDUCTION = 0
_MAX_HOPS = 6


@dataclass(frozen=True)
class LossTerm:
    """One call of a loss function."""

    kind: str
    """`classes`: one class of several a row; `binary`: 0 or 1; `values`: regression."""
    node: Any
    prediction: Tensor
    """Log-probabilities or scores with classes in the second axis, logits or probabilities, or values."""
    target: Tensor
    is_objective: bool
    """Whether it is, up to a constant factor, all that is minimised, and no row has a weight of its own."""
    weights: tuple[Tensor, ...]
    """Weights of classes or positives."""
    ignore_index: int = -100

    @property
    def num_outputs(self) -> int:
        """Classes that the prediction tells apart."""
        return self.prediction.shape[1] if self.kind == "classes" and self.prediction.dim() > 1 else 2


def loss_terms(graph: LossGraph) -> list[LossTerm]:
    """The terms whose prediction and target torch has kept, in forward order."""
    nodes = [node for node in graph.nodes if node.name() in (*_CLASSES, *_BINARY, *_VALUES)]
    return [term for node in nodes if (term := _term(graph, node, alone=len(nodes) == 1)) is not None]


def _term(graph: LossGraph, node: Any, *, alone: bool) -> LossTerm | None:
    prediction, target = saved(node, "self"), saved(node, "target")
    weights = [saved(node, name) for name in ("weight", "pos_weight")]
    reduction = int(getattr(node, "_saved_reduction", 1))
    ignore_index = int(getattr(node, "_saved_ignore_index", -100))
    if not isinstance(prediction, Tensor) or not isinstance(target, Tensor) or prediction.numel() == 0:
        return None
    name = node.name()
    kind = "classes" if name in _CLASSES else "binary" if name in _BINARY else "values"
    # torch holds ignore_index as a 64-bit number that autograd shows without its sign.
    ignore_index = ignore_index - 2**64 if ignore_index >= 2**63 else ignore_index
    return LossTerm(
        kind=kind,
        node=node,
        prediction=prediction.detach(),
        target=target.detach(),
        is_objective=alone and reduction != _NO_REDUCTION and _is_scaled_root(graph, node),
        weights=tuple(w for w in weights if isinstance(w, Tensor)),
        ignore_index=ignore_index,
    )


def _is_scaled_root(graph: LossGraph, node: Any) -> bool:
    """Whether nothing but factors stands between the node and the loss."""
    now = graph.root
    for _ in range(_MAX_HOPS):
        if now is node:
            return True
        parents = [n for n, _ in now.next_functions if n is not None]
        if len(parents) != 1:
            # Label smoothing adds a term over the same log-probabilities.
            return _is_smoothed(now, node)
        now = parents[0]
    return False


def _is_smoothed(node: Any, term: Any) -> bool:
    if node.name() != "AddBackward0":
        return False
    branches = [n for n, _ in node.next_functions if n is not None]
    direct = [b for b in branches if any(child is term for child, _ in b.next_functions)]
    source = term.next_functions[0][0]
    reached, hops = [b for b in branches if b not in direct], 0
    while reached and hops < _MAX_HOPS:
        if any(n is source for n in reached):
            return len(direct) == 1
        reached = [n for b in reached for n, _ in b.next_functions if n is not None]
        hops += 1
    return False


def rows_of(term: LossTerm) -> tuple[Tensor, Tensor]:
    """Prediction as `[rows, features]` and target as `[rows]`, classes as integers where there are any."""
    prediction, target = term.prediction, term.target
    if term.kind == "classes":
        if prediction.dim() == 1:
            prediction, target = prediction[None], target.reshape(1)
        return prediction.movedim(1, -1).reshape(-1, prediction.shape[1]), target.reshape(-1).long()
    if term.kind == "binary":
        return prediction.reshape(-1, 1), (target.reshape(-1) > 0.5).long()
    return prediction.reshape(-1, 1), target.reshape(-1)
