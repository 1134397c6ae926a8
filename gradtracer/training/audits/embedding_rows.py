"""Embedding tables row by row, at sampled steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure, Severity
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding

_MAX_ROWS, _MAX_LOOKUPS, _MAX_FIELDS = 1_000_000, 1_000_000, 1_000


@dataclass
class _Table:
    name: str
    module: nn.Embedding | nn.EmbeddingBag
    lookups: list[Tensor] = field(default_factory=list)
    times: Tensor | None = None
    """Sampled steps in which each row was looked up, ``[rows]``."""
    had_gradient: Tensor | None = None
    before: tuple[Tensor, Tensor] | None = None
    num_samples: int = 0
    largest_by_field: Tensor | None = None


@AUDITS.register
class EmbeddingRowsAudit(Audit):
    """Which rows of embedding tables are looked up, moved, and left out.

    What:
        Rows that are looked up and never receive a gradient; rows that no batch looks up; how far rows move in a step;
        how the gradient of rare rows compares with that of frequent ones.

    Why:
        Each row is a parameter with a life of its own, and the norms of a whole table do not tell that half of it is
        dead.

    Definition:
        Over the sampled steps: unseen_row_fraction, the share of rows never looked up; silent_row_fraction, of the rows
        looked up in at least 10 of them (padding_idx left out) the share whose gradient was zero each time;
        row_update_ratio, ``|dw_r| / |w_r|`` as a mean over the rows of this batch; rare_row_gradient, the mean of
        ``|g_r| / c_r`` (c_r look-ups in this batch) over rows drawn at most as often as the median row of the batch,
        over that of the rows at or above its 90th percentile, if these were drawn at least ten times as often (else 1).
        The finding `embedding_fields_overlap` needs look-ups ``[rows, fields]`` in a table whose size is the sum over
        fields of the largest index plus one, within 2 %, while all indices lie below the largest of these: the offsets
        of the fields were not added. `embedding_rows_silent` needs a fifth of the rows silent, five at least, and not
        one block of the table (rows that are frozen by a mask are one).
        Tables above a million rows are left out.

    Thresholds:
        A row that has a gradient in a share q of its look-ups stays silent for ten of them with probability
        ``(1 - q)^10``, so a silent row has q below 0.26 at 95 % confidence. A rectifier behind a narrow table silences
        a share 2^-width of its rows from the start, 6 % at width 4, hence a fifth. That a table's size is the sum of
        its fields' sizes, and only the largest of these is in use, is no accident within 2 %.

    Fixes:
        In the source: the index that is looked up, or what masks the rows.

    References:
        PyTorch documentation, nn.Embedding (padding_idx). Rendle 2010, "Factorization machines" (one table for all
        fields).
    """

    code = "embedding_rows"

    MIN_TIMES = 10
    MIN_SILENT, SILENT_SHARE = 5, 0.2
    FIELD_TOLERANCE = 0.02

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Note which rows are looked up."""
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.num_embeddings > _MAX_ROWS:
            return ()
        index = next((x for x in inputs if isinstance(x, Tensor)), None)
        if index is None or index.is_floating_point() or index.numel() > _MAX_LOOKUPS or index.numel() == 0:
            return ()
        table = self._tables.setdefault(name, _Table(name, module))
        if len(table.lookups) < 16:
            table.lookups.append(index.detach())
        return ()

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Compare what was looked up with what has a gradient."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for table in self._tables.values():
            weight = table.module.weight
            if id(weight) in held and table.lookups and weight.grad is not None:
                yield from self._read(context, table, weight.grad)
            if id(weight) in held:
                table.lookups = []

    def on_update(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Record how far the rows of this batch have moved."""
        for table in self._tables.values():
            if table.before is None:
                continue
            rows, before = table.before
            table.before = None
            moved = (table.module.weight.detach()[rows] - before).float().norm(dim=1)
            size = before.float().norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
            context.record(table.name, "row_update_ratio", (moved / size).mean())
        return ()

    def _read(self, context: AuditContext, table: _Table, gradient: Tensor) -> Iterable[AuditFinding]:
        num_rows = table.module.num_embeddings
        index = torch.cat([x.reshape(-1) for x in table.lookups]).long()
        counts = torch.zeros(num_rows, device=index.device)
        counts.scatter_add_(0, index, torch.ones_like(index, dtype=counts.dtype))
        norms = row_norms(gradient)
        drawn = counts > 0
        padding = table.module.padding_idx
        if padding is not None:
            drawn[padding] = False
        if table.times is None or table.had_gradient is None:
            table.times = torch.zeros(num_rows, device=index.device)
            table.had_gradient = torch.zeros(num_rows, dtype=torch.bool, device=index.device)
        table.times += drawn
        table.had_gradient |= norms > 0
        table.num_samples += 1
        often = table.times >= self.MIN_TIMES
        silent = often & ~table.had_gradient
        context.record(table.name, "unseen_row_fraction", (table.times == 0).float().mean())
        context.record(table.name, "silent_row_fraction", silent.sum() / often.sum().clamp_min(1))
        ratio = rare_row_gradient(norms, counts, table.times, drawn)
        context.record(table.name, "rare_row_gradient", ratio)
        rows = index[:: max(1, len(index) // 256)]
        table.before = (rows, table.module.weight.detach()[rows].clone())
        if table.num_samples == 10 or (table.num_samples > 10 and table.num_samples % 5 == 0):
            yield from self._silent(context, table, silent, often)
        yield from self._fields(context, table)

    def _silent(self, context: AuditContext, table: _Table, silent: Tensor, often: Tensor) -> Iterable[AuditFinding]:
        rows = silent.nonzero()[:, 0]
        num, num_often = len(rows), int(often.sum())
        if num < self.MIN_SILENT or num < self.SILENT_SHARE * num_often or num == num_often:
            return
        # One block: no row with a gradient lies between the first and the last silent one.
        between = often[int(rows[0]) : int(rows[-1]) + 1]
        is_block = int(between.sum()) == num
        yield finding(
            context,
            "embedding_rows_masked" if is_block else "embedding_rows_silent",
            f"{num} of the {num_often} rows of {table.name} that were looked up in at least {self.MIN_TIMES} sampled "
            f"steps never received a gradient.",
            layer=table.name,
            severity=Severity.INFO if is_block else Severity.WARNING,
            measures=[Measure(name="silent_row_fraction", value=num / num_often, threshold=self.SILENT_SHARE)],
        )

    def _fields(self, context: AuditContext, table: _Table) -> Iterable[AuditFinding]:
        lookup = table.lookups[0]
        if context.step > 100 or lookup.dim() != 2 or not 2 <= lookup.shape[1] <= _MAX_FIELDS:
            return
        largest = lookup.amax(dim=0)
        if table.largest_by_field is not None and table.largest_by_field.shape == largest.shape:
            largest = torch.maximum(largest, table.largest_by_field)
        table.largest_by_field = largest
        if table.num_samples not in (5, 10, 15, 20):
            return
        num_rows = table.module.num_embeddings
        total, used = int(largest.sum()) + lookup.shape[1], int(largest.max()) + 1
        if abs(total - num_rows) <= self.FIELD_TOLERANCE * num_rows and used < 0.9 * num_rows:
            yield finding(
                context,
                "embedding_fields_overlap",
                f"The {lookup.shape[1]} columns looked up in {table.name} all begin at row 0: they need {total} rows "
                f"together, which is the table's size of {num_rows}, and rows from {used} on are never reached.",
                layer=table.name,
                measures=[Measure(name="unseen_row_fraction", value=1.0 - used / num_rows)],
            )


def row_norms(gradient: Tensor) -> Tensor:
    """Norm of each row's gradient, dense or sparse, ``[rows]``."""
    if not gradient.is_sparse:
        return gradient.detach().float().norm(dim=1)
    gradient = gradient.coalesce()
    norms = torch.zeros(gradient.shape[0], device=gradient.device)
    norms[gradient.indices()[0]] = gradient.values().float().norm(dim=1)
    return norms


def rare_row_gradient(norms: Tensor, counts: Tensor, times: Tensor, drawn: Tensor) -> Tensor:
    """Mean gradient a look-up of rare rows over that of frequent ones, scalar; 1 where none is ten times rarer.

    Args:
        norms: Gradient norm by row, ``[rows]``.
        counts: Look-ups in this batch, likewise.
        times: Steps with a look-up so far, likewise.
        drawn: Rows of this batch, likewise.
    """
    each = norms / counts.clamp_min(1)
    seen = torch.where(drawn, times, torch.nan)
    low, high = torch.nanquantile(seen[:_MAX_ROWS], torch.tensor([0.5, 0.9], device=seen.device))
    rare, frequent = drawn & (times <= low), drawn & (times >= high)
    ratio = (
        (each * rare).sum()
        / rare.sum().clamp_min(1)
        / ((each * frequent).sum() / frequent.sum().clamp_min(1)).clamp_min(torch.finfo(torch.float32).tiny)
    )
    return torch.where(high >= 10 * low, ratio, torch.ones_like(ratio))
