"""Where a NaN was born, read from the autograd graph of a loss that is not finite, before backward frees it.

Autograd nodes keep the tensors they need. Walking the graph from its leaves, the first kept tensor that is not finite
tells where it came in: it has no history (it is data or a constant), it is a parameter, or it is the output of the
node that made it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradtracer.records import NonFiniteOrigin
from gradtracer.training.graph import LossGraph, count_non_finite, saved_tensors

# Operations that keep their input and not their result: the input tells that the result is not finite.
_SINGULAR: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "LogBackward0": ("_saved_self", lambda x: x <= 0),
    "Log2Backward0": ("_saved_self", lambda x: x <= 0),
    "Log10Backward0": ("_saved_self", lambda x: x <= 0),
    "Log1PBackward0": ("_saved_self", lambda x: x <= -1),
    "DivBackward0": ("_saved_other", lambda x: x == 0),
}


def origin_in_graph(graph: LossGraph, step: int) -> NonFiniteOrigin:
    """The first non-finite tensor of a loss's graph, in forward order.

    Args:
        graph: The graph of a scalar that is not finite.
        step: The step it belongs to.
    """
    for parameter in graph.parameters():
        if count := count_non_finite(parameter):
            return NonFiniteOrigin(
                step=step, where="weight", layer=graph.layer_of_parameter(parameter), num_non_finite=count,
                detail="A parameter was not finite before this step's forward pass.",
            )  # fmt: skip
    for node in graph.nodes:
        for saved in saved_tensors(node):
            count = count_non_finite(saved)
            if not count:
                continue
            if saved.grad_fn is None:
                return NonFiniteOrigin(
                    step=step, where="data", layer=graph.own_layer(node), operation=node.name(), num_non_finite=count,
                    detail=f"A tensor of shape {list(saved.shape)} that no layer computed holds {count} non-finite "
                    f"values; {node.name()} received it.",
                )  # fmt: skip
            born = saved.grad_fn
            return NonFiniteOrigin(
                step=step,
                where="loss" if graph.is_in_loss(born) else "forward",
                layer=graph.nearest_layer(born),
                operation=born.name(),
                num_non_finite=count,
                detail=f"{born.name()} put out {count} non-finite values of {saved.numel()}.",
            )
    for node in graph.nodes:
        kept, is_singular = _SINGULAR.get(node.name(), ("", None))
        for saved in saved_tensors(node, kept):
            if is_singular is not None and (count := int(is_singular(saved.detach()).sum())):
                return NonFiniteOrigin(
                    step=step, where="loss", operation=node.name(), num_non_finite=count,
                    detail=f"{node.name()} received {count} values at which it is not finite.",
                )  # fmt: skip
    name = graph.root.name() if graph.root is not None else None
    return NonFiniteOrigin(
        step=step, where="loss", operation=name, num_non_finite=1, detail="The last operation of the loss made it."
    )
