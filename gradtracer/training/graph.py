"""The autograd graph of a loss, read before backward frees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_MAX_NODES = 50_000
_PASS_THROUGH = frozenset({"TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0", "ExpandBackward0"})


class LossGraph:
    """Nodes, their order, the parameters they use and the tensors they keep.

    Args:
        loss: The tensor that backward is about to be called on.
        layer_of: Names of layers by id of parameter.
        unscaled: The loss before a GradScaler scaled it; the loss itself where none did.
    """

    def __init__(self, loss: Tensor, layer_of: Mapping[int, str], unscaled: Tensor | None = None) -> None:
        self.loss, self._layer_of = loss, layer_of
        self.unscaled = loss if unscaled is None else unscaled

    @property
    def root(self) -> Any:
        """The node that made the loss; None where it has no history."""
        return self.loss.grad_fn

    @property
    def loss_scale(self) -> Tensor | None:
        """The factor by which a GradScaler multiplied the loss, a tensor of one element; None where none did."""
        if self.unscaled is self.loss or self.root is None:
            return None
        return next((s for name in ("other", "self") for s in saved_tensors(self.root, f"_saved_{name}")), None)

    @cached_property
    def nodes(self) -> list[Any]:
        """All nodes, each after those it depends on (forward order)."""
        return forward_order(self.root)

    def parameters(self) -> Iterator[Tensor]:
        """Leaf tensors that the loss depends on."""
        for node in self.nodes:
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor):
                yield variable

    def layer_of_parameter(self, parameter: Tensor) -> str | None:
        """The layer of a leaf; None where it is none of the model's."""
        return self._layer_of.get(id(parameter))

    def own_layer(self, node: Any) -> str | None:
        """The layer whose parameter the node uses directly, or through a transposition or cast."""
        for child, _ in node.next_functions:
            hops = 0
            while child is not None and hops < 2:
                variable = getattr(child, "variable", None)
                if variable is not None:
                    return self._layer_of.get(id(variable))
                if child.name() not in _PASS_THROUGH:
                    break
                child = child.next_functions[0][0]
                hops += 1
        return None

    def nearest_layer(self, node: Any) -> str | None:
        """The last layer before the node's output, its own included."""
        return next((n for n in map(self.own_layer, reversed(forward_order(node))) if n is not None), None)

    def between(self, node: Any) -> list[Any]:
        """Nodes between `node` and the loss, in forward order, without `node`."""
        reached = {node}
        above: list[Any] = []
        for other in self.nodes:
            if other not in reached and any(n in reached for n, _ in other.next_functions):
                reached.add(other)
                above.append(other)
        return above

    def is_in_loss(self, node: Any) -> bool:
        """Whether the node belongs to the loss expression: no parameter is used in it or between it and the loss."""
        return self.own_layer(node) is None and all(self.own_layer(other) is None for other in self.between(node))


def forward_order(root: Any) -> list[Any]:
    """Nodes reachable from `root`, every node after those it depends on (iterative depth-first post-order)."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(root, False)] if root is not None else []
    while stack and len(seen) < _MAX_NODES:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((n, False) for n, _ in node.next_functions if n is not None and n not in seen)
    return order


def saved_tensors(node: Any, prefix: str = "_saved_") -> Iterator[Tensor]:
    """Tensors that the node keeps for backward, under attributes that begin with `prefix`."""
    for attribute in dir(node):
        if prefix and attribute.startswith(prefix):
            try:
                saved = getattr(node, attribute)
            except RuntimeError:  # freed, or changed in place since: nothing to read there
                continue
            if isinstance(saved, Tensor):
                yield saved
            elif isinstance(saved, (tuple, list)):
                yield from (s for s in saved if isinstance(s, Tensor))


def count_non_finite(tensor: Tensor) -> int:
    """Elements that are NaN or infinite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    with torch.no_grad():
        return int((~torch.isfinite(tensor.detach())).sum())
