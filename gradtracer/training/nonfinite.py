"""Where a NaN was born, read from the autograd graph of a loss that is not finite, before backward frees it.

Autograd nodes keep the tensors they need. Walking the graph from its leaves, the first kept tensor that is not finite
tells where it came in: it has no history (it is data or a constant), it is a parameter, or it is the output of the
node that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradtracer.records import NonFiniteOrigin

_MAX_NODES = 50_000


def origin_in_graph(loss: Tensor, layer_of: Mapping[int, str], step: int) -> NonFiniteOrigin:
    """The first non-finite tensor of a loss's graph, in forward order.

    Args:
        loss: A scalar that is not finite, with its graph intact.
        layer_of: Names of layers by id of parameter.
        step: The step it belongs to.
    """
    order = _forward_order(loss.grad_fn)
    for node in order:
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and (count := count_non_finite(variable)):
            return NonFiniteOrigin(
                step=step, where="weight", layer=layer_of.get(id(variable)), operation=None, num_non_finite=count,
                detail="A parameter was not finite before this step's forward pass.",
            )  # fmt: skip
    for node in order:
        for saved in _saved_tensors(node):
            count = count_non_finite(saved)
            if not count:
                continue
            if saved.grad_fn is None:
                return NonFiniteOrigin(
                    step=step, where="data", layer=None, operation=node.name(), num_non_finite=count,
                    detail=f"A tensor of shape {list(saved.shape)} that no layer computed holds {count} non-finite "
                    f"values; {node.name()} received it.",
                )  # fmt: skip
            return _inside(saved, loss, order, layer_of, step, count)
    for node in order:
        kept, is_singular = _SINGULAR.get(node.name(), ("", None))
        for saved in _saved_tensors(node, kept):
            if is_singular is not None and (count := int(is_singular(saved.detach()).sum())):
                return NonFiniteOrigin(
                    step=step, where="loss", operation=node.name(), num_non_finite=count,
                    detail=f"{node.name()} received {count} values at which it is not finite.",
                )  # fmt: skip
    name = loss.grad_fn.name() if loss.grad_fn is not None else None
    return NonFiniteOrigin(
        step=step, where="loss", operation=name, num_non_finite=1, detail="The last operation of the loss made it."
    )


def count_non_finite(tensor: Tensor) -> int:
    """Elements that are NaN or infinite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    with torch.no_grad():
        return int((~torch.isfinite(tensor.detach())).sum())


def _inside(
    saved: Tensor, loss: Tensor, order: list[Any], layer_of: Mapping[int, str], step: int, count: int
) -> NonFiniteOrigin:
    born = saved.grad_fn
    assert born is not None
    own = _parameter_layer(born, layer_of)
    above = _ancestors(born, order)
    in_model = own is not None or any(_parameter_layer(node, layer_of) is not None for node in above)
    layer = own
    for node in reversed(_forward_order(born)):
        if layer is None:
            layer = _parameter_layer(node, layer_of)
    return NonFiniteOrigin(
        step=step,
        where="forward" if in_model else "loss",
        layer=layer,
        operation=born.name(),
        num_non_finite=count,
        detail=f"{born.name()} put out {count} non-finite values of {saved.numel()}.",
    )


def _forward_order(root: Any) -> list[Any]:
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


def _ancestors(born: Any, order: list[Any]) -> list[Any]:
    """Nodes between `born` and the loss."""
    reached = {born}
    above = []
    for node in order:
        if node not in reached and any(n in reached for n, _ in node.next_functions):
            reached.add(node)
            above.append(node)
    return above


def _parameter_layer(node: Any, layer_of: Mapping[int, str]) -> str | None:
    """The layer whose parameter the node uses directly, or through a transposition or cast."""
    for child, _ in node.next_functions:
        hops = 0
        while child is not None and hops < 2:
            variable = getattr(child, "variable", None)
            if variable is not None:
                return layer_of.get(id(variable))
            if child.name() not in _PASS_THROUGH:
                break
            child = child.next_functions[0][0]
            hops += 1
    return None


# Operations that keep their input and not their result: the input tells that the result is not finite.
_SINGULAR: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "LogBackward0": ("_saved_self", lambda x: x <= 0),
    "Log2Backward0": ("_saved_self", lambda x: x <= 0),
    "Log10Backward0": ("_saved_self", lambda x: x <= 0),
    "Log1PBackward0": ("_saved_self", lambda x: x <= -1),
    "DivBackward0": ("_saved_other", lambda x: x == 0),
}

_PASS_THROUGH = frozenset({"TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0", "ExpandBackward0"})


def _saved_tensors(node: Any, prefix: str = "_saved_") -> Iterator[Tensor]:
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
