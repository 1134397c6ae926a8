"""How far the rows lie apart that the loss is computed from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradtracer.records import AuditFinding, Severity
from gradtracer.training.audits._reading import RESHAPING, children, facing, first_tensor
from gradtracer.training.audits.base import AUDITS, LOSS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph, saved

_MAX_ROWS, _MAX_FEATURES = 256, 512
_MIN_ROWS = 8
_PRODUCTS = ("MmBackward0", "BmmBackward0", "BaddbmmBackward0", "CdistBackward0", "EuclideanDistBackward0")
_PAIRING = ("SubBackward0", "MulBackward0", "MaximumBackward0", "DivBackward0")
_PICKING = (
    "IndexBackward0", "SelectBackward0", "SliceBackward0", "UnsqueezeBackward0", "TransposeBackward0",
    "SplitBackward0", "UnbindBackward0", "IndexSelectBackward0", "RollBackward0", "PermuteBackward0",
)  # fmt: skip

_LAYERS = ("Addmm", "Mm", "Convolution", "Native", "Embedding", "Linear", "Cudnn", "IndexSelect", "Index")
_NORMALISING = frozenset({"DivBackward0", "ClampMinBackward0", "MeanBackward1", "IndexBackward0", "SelectBackward0"})
_TARGETS = {
    "MulBackward0": "other", "MseLossBackward0": "target", "SmoothL1LossBackward0": "target",
    "HuberLossBackward0": "target", "SoftMarginLossBackward0": "target",
}  # fmt: skip


@AUDITS.register
class RowSpreadAudit(Audit):
    """The outputs that face the loss, compared row by row.

    What:
        For the layers that the loss is computed from: how much the outputs of different examples differ, and whether
        the loss compares rows with each other (a triplet, contrastive, ranking or self-supervised loss).

    Why:
        A loss that only compares rows can be content when all rows are one: it sits at its margin or at its least, and
        nothing was learned.

    Definition:
        For rows x (examples; positions of a sequence), at most 256 evenly spaced: ``1 - |mean(x / |x|)|^2``
        (row_spread, no unit), which is 1 minus the mean cosine over all pairs, a row with itself included. Layers that
        face the loss are those met first on the way from the loss into its graph.
        `loss_compares_rows` (info) says that a difference, a product, a distance or a maximum in the loss has both
        sides from one layer, by separate calls or by picked rows; or from two layers as they are or normalised; or is a
        matrix product of outputs. For losses whose targets are a network's own outputs without gradient, the least
        row_spread of the tensors without history in products and squared errors is recorded as that of `(loss)`.

    Thresholds:
        Those of the detector `embedding_collapse`. 8 rows at least, of width 2 at least.

    Fixes:
        See `embedding_collapse`.

    References:
        Jing, Vincent, LeCun, Tian 2022, arXiv:2110.09348.
    """

    code = "row_spread"

    def __init__(self) -> None:
        self._facing: set[str] = set()
        self._seen: dict[str, Tensor] = {}

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Read a layer that faces the loss, as far as that is known; every layer with parameters at first."""
        if not name or (self._facing and name not in self._facing):
            return ()
        if next(module.parameters(recurse=False), None) is None:
            return ()
        tensor = first_tensor(output)
        if tensor is not None and tensor.is_floating_point():
            spread = row_spread(tensor)
            if spread is not None:
                self._seen[name] = spread
        return ()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Learn which layers face the loss, and record these."""
        if not self._facing or context.step < 2:
            nodes = facing(graph, [graph.root])
            self._facing.update(nodes.values())
            for layer in _compared(graph, nodes):
                yield finding(
                    context, "loss_compares_rows", f"The loss compares outputs of {layer} with each other.",
                    layer=layer, severity=Severity.INFO,
                )  # fmt: skip
        targets = _target_spread(graph)
        if targets is not None:
            context.record(LOSS, "row_spread", targets)
        for name in self._facing:
            found = self._seen.pop(name, None)
            if found is not None:
                context.record(name, "row_spread", found)
        self._seen.clear()


def row_spread(output: Tensor) -> Tensor | None:
    """One minus the mean cosine over pairs of rows, scalar in [0, 1]; None where rows are too few.

    Args:
        output: ``[rows, features]``, ``[examples, positions, features]``, or ``[examples, channels, height, width]``,
            which is read as one row an example.
    """
    rows = output.detach()
    if rows.dim() < 2:
        return None
    rows = rows.flatten(1) if rows.dim() > 3 else rows.flatten(0, -2)
    rows = rows[:: max(1, rows.shape[0] // _MAX_ROWS), :: max(1, rows.shape[1] // _MAX_FEATURES)].float()
    if rows.shape[0] < _MIN_ROWS or rows.shape[1] < 2:
        return None
    # 1 - |mean|^2 as the variance between unit rows, which keeps its digits where all are nearly one.
    directions = torch.nn.functional.normalize(rows, dim=1)
    return directions.var(dim=0, unbiased=False).sum()


def _compared(graph: LossGraph, nodes: dict[Any, str]) -> list[str]:
    """Layers whose rows the loss compares with each other."""
    found: dict[str, None] = {}
    stack, seen = [graph.root], set(nodes)
    while stack and len(seen) < 2_000:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        below = list(children(node))
        stack.extend(below)
        if len(below) != 2 or not node.name().startswith((*_PRODUCTS, *_PAIRING)):
            continue
        left, right = (facing(graph, [child]) for child in below)
        shared = set(left.values()) & set(right.values())
        is_product = node.name() in _PRODUCTS
        # Of one layer: by separate calls (other nodes), or the same call with rows picked on one side.
        two = not shared and node.name().startswith(("SubBackward0", "MulBackward0")) and all(map(_is_direct, below))
        apart = any({n for n in left if left[n] == x} != {n for n in right if right[n] == x} for x in shared)
        if is_product or two or (shared and (apart or any(_picks(child) for child in below))):
            found.update(dict.fromkeys(sorted(shared or {*left.values(), *right.values()})))
    return list(found)


def _is_direct(node: Any) -> bool:
    """Whether a node is a layer's output, perhaps normalised by its length."""
    for _ in range(8):
        if node.name().startswith(_LAYERS):
            return True
        if node.name() not in RESHAPING and node.name() not in _NORMALISING:
            return False
        below = next(children(node), None)
        if below is None:
            return False
        node = below
    return False


def _target_spread(graph: LossGraph) -> Tensor | None:
    """The least spread among tensors without history that the loss multiplies with or is a distance to."""
    found: list[Tensor] = []
    stack, seen = [graph.root], set[Any]()
    while stack and len(seen) < 200:
        node = stack.pop()
        if node in seen or node.name().startswith(_LAYERS):
            continue
        seen.add(node)
        stack.extend(children(node))
        kept = _TARGETS.get(node.name())
        if kept is None or len(list(children(node))) != 1:
            continue
        target = saved(node, kept)
        if isinstance(target, Tensor) and target.is_floating_point() and not target.requires_grad:
            spread = row_spread(target)
            if spread is not None:
                found.append(spread)
    return torch.stack(found).amin() if found else None


def _picks(node: Any) -> bool:
    for _ in range(6):
        if node.name() in _PICKING:
            return True
        if node.name() not in RESHAPING:
            return False
        below = next(children(node), None)
        if below is None:
            return False
        node = below
    return False
