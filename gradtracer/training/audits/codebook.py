"""Which codes a vector quantiser uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradtracer.records import AuditFinding, Severity
from gradtracer.training.audits._reading import facing, first_tensor
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph

_MIN_CODES, _MIN_ROWS = 4, 16
_MAX_ROWS = 4_096
_MAX_CODES, _MAX_WIDTH = 65_536, 4_096
_LOOK_FOR_STEPS = 4


@dataclass
class _Vectors:
    """What layers put out in this forward pass, by width."""

    by_width: dict[int, list[tuple[str, Tensor]]] = field(default_factory=dict)


@AUDITS.register
class CodebookAudit(Audit):
    """Which rows of a table vectors are replaced with.

    What:
        Finds tables that serve as a codebook, whether an embedding, a parameter or a buffer kept as a moving average,
        and measures how many of its codes a batch uses.

    Why:
        A codebook drawn far from what the encoder puts out has one code, or a few, that are nearest to everything. The
        others never get a gradient, and the model's bottleneck is as narrow as those few.

    Definition:
        A two-dimensional parameter or buffer of K >= 4 rows of width d is a codebook if a module receives, or an
        embedding puts out, n >= 16 vectors of width d that are rows of the table, and these are the rows nearest (by
        distance or by cosine) to vectors that another layer put out before, for at least 95 % of the n. Usage p over
        codes, from at most 4096 vectors; codebook_perplexity ``exp(-sum p ln p)`` in codes, codebook_usage that over
        ``min(K, n)``. Where a batch uses fewer than 3 codes, the table must also be one that only the loss itself reads
        with a gradient, or have none: the straight-through estimator. Tables are looked for in the first 4 sampled
        steps.

    Thresholds:
        Rows chosen by data are nearest to another layer's output by chance for 1/K of the vectors; 95 % leaves ties and
        rounding. With one or two codes chance cannot be ruled out by numbers, hence the look at the graph.

    Fixes:
        See the detector `codebook_collapse`.

    References:
        van den Oord, Vinyals, Kavukcuoglu 2017, arXiv:1711.00937.
    """

    code = "codebook"

    def __init__(self) -> None:
        self._candidates: dict[str, Tensor] | None = None
        self._books: dict[str, str] = {}
        self._perhaps: dict[str, str] = {}
        """Names of codebooks and of the layers whose output they replace."""
        self._vectors = _Vectors()
        self._looks = 0
        self._told: set[str] = set()

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Look for rows of a table among what modules receive, and measure usage where a codebook is known."""
        if self._candidates is None:
            self._candidates = _tables(context.model)
        if not self._candidates or (not self._books and self._looks >= _LOOK_FOR_STEPS):
            return ()
        tensor = first_tensor(output)
        if not self._books or self._looks < _LOOK_FOR_STEPS:
            received = tensor if isinstance(module, nn.Embedding) else first_tensor(inputs)
            if received is not None and received.is_floating_point():
                for book, fed_by, num_codes in self._match(received):
                    if book not in self._books:
                        (self._books if num_codes >= 3 else self._perhaps)[book] = fed_by
        if tensor is None or not tensor.is_floating_point() or isinstance(module, nn.Embedding) or not name:
            return ()
        for book, fed_by in self._books.items():
            if fed_by == name:
                self._measure(context, book, tensor)
        widths = {table.shape[1] for table in self._candidates.values()}
        for width in widths:
            rows = _as_rows(tensor, width)
            if rows is not None and rows.shape[0] >= _MIN_ROWS and self._looks < _LOOK_FOR_STEPS:
                self._vectors.by_width.setdefault(width, []).append((name, rows))
        return ()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """The forward pass is over: settle what may be a codebook."""
        if self._vectors.by_width:
            self._looks += 1
            self._vectors = _Vectors()
        if self._perhaps:
            facing_loss = set(facing(graph, [graph.root]).values())
            for book, fed_by in self._perhaps.items():
                table = (self._candidates or {})[book]
                if not table.requires_grad or context.layer_of.get(id(table)) in facing_loss:
                    self._books[book] = fed_by
            self._perhaps.clear()
        for book, fed_by in self._books.items():
            if book not in self._told:
                self._told.add(book)
                yield finding(
                    context, "codebook", f"The outputs of {fed_by} are replaced with the nearest rows of {book}.",
                    layer=_layer(book), severity=Severity.INFO,
                )  # fmt: skip

    def _measure(self, context: AuditContext, book: str, output: Tensor) -> None:
        table = self._candidates[book] if self._candidates else None
        rows = _as_rows(output, table.shape[1]) if table is not None else None
        if table is None or rows is None or rows.shape[0] < _MIN_ROWS:
            return
        rows = _evenly(rows)
        perplexity = usage_perplexity(_nearest(rows, table.detach()), table.shape[0])
        context.record(_layer(book), "codebook_perplexity", perplexity)
        context.record(_layer(book), "codebook_usage", perplexity / min(table.shape[0], rows.shape[0]))

    def _match(self, received: Tensor) -> Iterable[tuple[str, str, int]]:
        for book, table in (self._candidates or {}).items():
            made = self._vectors.by_width.get(table.shape[1])
            rows = _as_rows(received, table.shape[1]) if made else None
            if rows is None or made is None or rows.shape[0] < _MIN_ROWS:
                continue
            codes = table.detach()
            if not _are_rows_of(_evenly(rows, 4), codes):
                continue
            some = _evenly(rows, 256)
            if not _are_rows_of(some, codes):
                continue
            chosen = _nearest(some, codes)
            for fed_by, vectors in made:
                if vectors.shape[0] != rows.shape[0]:
                    continue
                source = _evenly(vectors, 256)
                if float((source.float() - some.float()).abs().amax()) == 0.0:
                    continue  # the table's own rows, handed on
                if any(float((near == chosen).float().mean()) >= 0.95 for near in _both_nearest(source, codes)):
                    yield book, fed_by, len(chosen.unique())
                    break


def usage_perplexity(codes: Tensor, num_codes: int) -> Tensor:
    """``exp`` of the entropy of the codes' shares, scalar in [1, num_codes].

    Args:
        codes: Integers, ``[n]``.
        num_codes: Size of the codebook.
    """
    counts = torch.zeros(num_codes, device=codes.device, dtype=torch.float32)
    counts.scatter_add_(0, codes, torch.ones_like(codes, dtype=torch.float32))
    shares = counts / counts.sum()
    return torch.special.entr(shares).sum().exp()


def _are_rows_of(rows: Tensor, table: Tensor) -> bool:
    """Whether all rows stand in the table, up to the rounding of the straight-through estimator."""
    nearest = torch.cdist(rows.float(), table.float()).amin(dim=1)
    return bool(nearest.amax() <= 1e-3 * table[:: max(1, len(table) // 256)].float().norm(dim=1).mean())


def _nearest(rows: Tensor, table: Tensor) -> Tensor:
    return torch.cdist(rows.float(), table.float()).argmin(dim=1)


def _both_nearest(rows: Tensor, table: Tensor) -> Iterable[Tensor]:
    yield _nearest(rows, table)
    normalised = nn.functional.normalize(rows.float(), dim=1) @ nn.functional.normalize(table.float(), dim=1).T
    yield normalised.argmax(dim=1)


def _tables(model: nn.Module) -> dict[str, Tensor]:
    """Two-dimensional parameters and buffers that might be a codebook, by name.

    The weights of linear and recurrent layers are none; a table without trained rows may be a moving average.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Embedding):
            continue
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            if (
                tensor.dim() == 2
                and tensor.is_floating_point()
                and _MIN_CODES <= tensor.shape[0] <= _MAX_CODES
                and 2 <= tensor.shape[1] <= _MAX_WIDTH
            ):
                found[f"{path}.{name}" if path else name] = tensor
    return found


def _layer(book: str) -> str:
    """The module of an embedding's weight; a bare parameter is named itself."""
    return book.rpartition(".")[0] if book.endswith(".weight") else book


def _as_rows(tensor: Tensor, width: int) -> Tensor | None:
    """``[n, width]`` from a tensor whose last axis, or second of an image or sequence, is `width` long."""
    tensor = tensor.detach()
    if tensor.dim() < 2:
        return None
    if tensor.shape[-1] == width and (tensor.dim() != 4 or tensor.shape[1] != width):
        return tensor.reshape(-1, width)
    if tensor.dim() in (3, 4, 5) and tensor.shape[1] == width:
        return tensor.movedim(1, -1).reshape(-1, width)
    return None


def _evenly(rows: Tensor, count: int = _MAX_ROWS) -> Tensor:
    return rows[:: max(1, math.ceil(rows.shape[0] / count))]
