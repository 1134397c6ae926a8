"""The autograd graph of a loss, read before backward frees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradtracer.records import SourceLocation
from gradtracer.training.program import Program
from gradtracer.training.stack import calling_line

_MAX_NODES = 50_000
_PASS_THROUGH = frozenset(
    f"{name}Backward0"
    for name in (
        "T", "Transpose", "ToCopy", "View", "Expand", "Split", "SplitWithSizes", "Chunk", "Unbind", "Select", "Slice",
        "Unsqueeze", "Squeeze",
    )
)  # fmt: skip
"""What may stand between a parameter and the operation that uses it."""
_SAME_VALUES = frozenset(
    f"{name}Backward{i}"
    for name in (
        "View", "UnsafeView", "ReshapeAlias", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "T", "Permute", "Clone",
        "ToCopy", "Alias", "Select", "Slice", "Index", "IndexSelect", "Gather", "Narrow", "Split", "SplitWithSizes",
        "Unbind", "Movedim", "Contiguous", "Cat", "Stack", "Expand",
    )
    for i in range(3)
)  # fmt: skip
"""Operations that put out values of their input, in another order or shape."""


class LossGraph:
    """Nodes, their order, the parameters they use and the tensors they keep.

    Args:
        loss: The tensor that backward is about to be called on.
        layer_of: Names of layers by id of parameter.
        module_of: Names of the modules whose outputs the nodes are, where that was seen; the model itself is empty.
        unscaled: The loss before a GradScaler scaled it; the loss itself where none did.
        program: The program that calls backward on it.
    """

    def __init__(
        self,
        loss: Tensor,
        layer_of: Mapping[int, str],
        module_of: Mapping[Any, str] | None = None,
        unscaled: Tensor | None = None,
        program: Program | None = None,
    ) -> None:
        self.loss, self._layer_of, self._program = loss, layer_of, program
        self.module_of: Mapping[Any, str] = module_of or {}
        self.owners: Mapping[Any, str | None] = {}
        """Modules that compute the nodes, where a graph like this was met before and its modules were seen."""
        self.unscaled = loss if unscaled is None else unscaled

    @cached_property
    def computed_at(self) -> SourceLocation | None:
        """Where the user's program computes the loss, else where it calls backward; to be asked for while it does."""
        return (self._program.loss_line() if self._program else None) or calling_line("backward")

    @cached_property
    def scaled_at(self) -> SourceLocation | None:
        """Where the program last multiplies or divides the loss, else where it computes it; see `computed_at`."""
        return (self._program.loss_line(factors=True) if self._program else None) or calling_line("backward")

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

    @cached_property
    def consumers(self) -> dict[Any, list[Any]]:
        """For each node, those that use its output."""
        found: dict[Any, list[Any]] = {}
        for node in self.nodes:
            for child, _ in node.next_functions:
                if child is not None:
                    found.setdefault(child, []).append(node)
        return found

    @cached_property
    def expression(self) -> list[Any]:
        """The nodes of the loss expression, from the loss down to the outputs of the model (those are not in it).

        The model's output is where a module's was seen, else where a parameter is used.
        """
        found: list[Any] = []
        seen: set[Any] = set()
        waiting = deque([self.root])
        while waiting:
            node = waiting.popleft()
            if node is None or node in seen or node in self.module_of or self.own_layer(node) is not None:
                continue
            seen.add(node)
            found.append(node)
            waiting.extend(child for child, _ in node.next_functions)
        return found

    def owner(self, node: Any) -> str | None:
        """The innermost module that was seen to compute the node; None in the loss expression or where unknown."""
        if node in self.owners:
            return self.owners[node]
        seen: set[Any] = set()
        waiting = deque([node])
        while waiting:
            current = waiting.popleft()
            if current in self.module_of and (current is node or self.own_layer(current) is None):
                return self.module_of[current] or "(root)"
            for consumer in self.consumers.get(current, ()):
                if consumer not in seen:
                    seen.add(consumer)
                    if consumer in self.module_of or self.own_layer(consumer) is None:
                        waiting.append(consumer)
        return None

    def layer_at(self, node: Any) -> str | None:
        """The module that computed the node where one was seen to, else the last layer before it."""
        owner = self.owner(node)
        if owner is not None and owner != "(root)":
            return owner
        return self.nearest_layer(node)

    def parameters(self) -> Iterator[Tensor]:
        """Leaf tensors that the loss depends on."""
        for node in self.nodes:
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor) and not _is_freed(variable):
                yield variable

    def layer_of_parameter(self, parameter: Tensor) -> str | None:
        """The layer of a leaf; None where it is none of the model's."""
        return self._layer_of.get(id(parameter))

    def own_layer(self, node: Any) -> str | None:
        """The layer whose parameter the node uses directly, or through a transposition or cast."""
        for child, _ in node.next_functions:
            hops = 0
            while child is not None and hops < 4:  # under autocast: transposition, cast, parameter
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
        """Whether the node belongs to the loss expression.

        No parameter is used in it or between it and the loss, and no module is known to compute it.
        """
        if self.owner(node) is not None:
            return False
        return self.own_layer(node) is None and all(self.own_layer(other) is None for other in self.between(node))


def operation_of(node: Any) -> str:
    """The operation without its number: `Sub` of `SubBackward0`."""
    name = node.name().rpartition("::")[2]
    return name.partition("Backward")[0]


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Shape of the node's first output; None where torch does not tell."""
    metadata = getattr(node, "_input_metadata", None)
    if not metadata:
        return None
    try:
        return tuple(metadata[0].shape)
    except (AttributeError, RuntimeError):
        return None


def producer_of(node: Any) -> Any:
    """The node whose values reach this place unchanged but for order and shape: `node` itself, or one before it."""
    for _ in range(16):
        if node is None or node.name() not in _SAME_VALUES or not node.next_functions:
            return node
        node = node.next_functions[0][0]
    return node


def saved(node: Any, name: str) -> Any:
    """What the node keeps under `_saved_NAME`; None where it keeps nothing there, or reading it has effects.

    Under gradient checkpointing (`torch.utils.checkpoint`, not reentrant) and other saved-tensor hooks, reading a kept
    tensor runs the user's forward pass again, which moves the running statistics of batch norms among other things.
    Parameters that `fully_shard` has put together for the forward pass have no memory between it and backward.
    """
    try:
        if getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None:
            return None
        kept = getattr(node, f"_saved_{name}", None)
        return None if isinstance(kept, Tensor) and _is_freed(kept) else kept
    except RuntimeError:  # freed, or changed in place since
        return None


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
            kept = saved(node, attribute.removeprefix("_saved_"))
            if isinstance(kept, Tensor):
                yield kept
            elif isinstance(kept, (tuple, list)):
                yield from (s for s in kept if isinstance(s, Tensor) and not _is_freed(s))


def _is_freed(tensor: Tensor) -> bool:
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().size() == 0
    except (RuntimeError, NotImplementedError):  # sparse, or a subclass without one memory of its own
        return False


def count_non_finite(tensor: Tensor) -> int:
    """Elements that are NaN or infinite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    with torch.no_grad():
        return int((~torch.isfinite(tensor.detach())).sum())
