"""What several audits read from a loss's graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from gradtracer.training.audits.base import AuditContext
from gradtracer.training.graph import LossGraph
from gradtracer.training.layers import ROOT

# Nodes that hand on their one input with its values as they are, in another shape, layout or type.
RESHAPING = frozenset(
    {
        "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AsStridedBackward0", "ExpandBackward0",
        "CloneBackward0", "ToCopyBackward0", "TransposeBackward0", "PermuteBackward0", "TBackward0", "AliasBackward0",
        "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0", "ContiguousBackward0",
    }
)  # fmt: skip

# Names of nodes, up to their number, in which a layer meets its input: what is left of a penalty on the weights
# themselves, or of an element-wise use of a parameter, is no output of a layer.
_APPLIED = (
    "Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Linear", "Mkldnn", "Cudnn", "Miopen", "Thnn", "Native", "Fused",
    "Embedding", "IndexSelect", "Index", "Gather",
)  # fmt: skip


def dim_of(node: Any) -> int:
    """The axis that a node keeps; negative ones are kept as unsigned 64-bit numbers."""
    dim = int(node._saved_dim)
    return dim - 2**64 if dim >= 2**63 else dim


def children(node: Any) -> Iterator[Any]:
    """Nodes that made the inputs of a node, without those that need no gradient."""
    return (n for n, _ in node.next_functions if n is not None)


def below_reshaping(node: Any, more: Iterable[str] = (), max_hops: int = 12) -> Any:
    """The first node from here toward the input that is no mere reshaping."""
    passing = RESHAPING.union(more)
    for _ in range(max_hops):
        if node.name() not in passing:
            break
        below = next(children(node), None)
        if below is None:
            break
        node = below
    return node


def applied_layer(graph: LossGraph, node: Any) -> str | None:
    """The layer that a node applies to an input; None for other nodes."""
    return graph.own_layer(node) if node.name().startswith(_APPLIED) else None


def facing(graph: LossGraph, starts: Iterable[Any], max_nodes: int = 2_000) -> dict[Any, str]:
    """Nodes of layers that are met first on the way from `starts` toward the input, and the layers' names."""
    found: dict[Any, str] = {}
    seen: set[Any] = set()
    stack = list(starts)
    while stack and len(seen) < max_nodes:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        layer = applied_layer(graph, node)
        if layer is not None:
            found[node] = layer
        else:
            stack.extend(children(node))
    return found


def owner_of(context: AuditContext, layers: Sequence[str]) -> str:
    """The module that layers belong to together: their common parent, or the layer if it is a module of its own kind.

    A single `nn.Linear` is a part of something, so its parent is named; an `nn.MultiheadAttention`, or a class of the
    user's that holds parameters, is the thing itself.
    """
    names = list(dict.fromkeys(layers))
    if len(names) == 1:
        layer = next((found for found in context.layers if found.name == names[0]), None)
        if layer is None or type(layer.module).__module__.partition(".")[0] != "torch" or _is_whole(layer.module):
            return names[0]
        return names[0].rpartition(".")[0] or names[0]
    parts = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return ".".join(common) or ROOT


def _is_whole(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention)


def first_tensor(values: Any) -> Tensor | None:
    """The first tensor among a module's inputs or outputs."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        return None
    return next((v for v in values if isinstance(v, Tensor)), None)
