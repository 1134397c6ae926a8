"""Damp the updates of embedding rows that move much and get nowhere."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._rows import choose_tables, scale_row_updates
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety

_MEMORY = 0.9
_MIN_GRADIENTS = 10


class DampRowsParameters(FixParameters):
    """Parameters of `damp_rows`."""

    layers: str | None = Field(
        default=None, max_length=2000, description="Embeddings, with commas; all of the model by default."
    )
    factor: float = Field(default=0.1, ge=0, le=1, description="What is left of the update of a damped row.")
    rows: str | None = Field(
        default=None,
        max_length=20_000,
        pattern=r"^\s*\d+(\s*,\s*\d+)*\s*$",
        description="Rows to damp, with commas; by default those with a low signal-to-noise ratio.",
    )
    threshold: float = Field(default=0.2, gt=0, le=1, description="Signal share below which a row is damped.")


@FIXES.register
class DampRows(Fix[DampRowsParameters]):
    """Multiply what the optimizer does to noisy rows of an embedding by a factor, row by row, until reverted.

    What:
        Rows whose gradients point another way each time, or rows that are named. Other rows are updated in full.

    Why:
        A row that jumps back and forth around its optimum stays noise, and so does what is computed from it; smaller
        steps let it settle, while the others keep their rate.

    Definition:
        Over the last gradients g of a row, with weights ``0.9^age``: signal share ``s = ||mean g||^2 / mean ||g||^2``,
        1 for equal gradients and 0.05 for pure noise. From 10 gradients on a row with ``s < threshold`` is damped:
        ``w <- w_old + factor (w_new - w_old)`` after the optimizer step, so that adaptive optimizers are damped too.

    Safety:
        Guarded: a row that only looks noisy learns more slowly.

    Undo:
        From the next update on rows are updated in full.

    References:
        Robbins & Monro 1951 (smaller steps average noise). Schaul, Zhang, LeCun 2013, arXiv:1206.1106, equation 6
        (rate by signal share).
    """

    code = "damp_rows"
    title = "Damp noisy embedding rows"
    safety = Safety.GUARDED
    standing = True
    mends = ("zombie_embeddings",)
    Parameters = DampRowsParameters

    def preview(self, run: LiveRun, parameters: DampRowsParameters) -> list[Change]:
        """The tables, and which of their rows."""
        which = (
            f"rows {parameters.rows[:60]}" if parameters.rows else f"rows with a signal below {parameters.threshold}"
        )
        for name, module in choose_tables(run, parameters.layers).items():
            beyond = [r for r in _rows(parameters) if r >= module.num_embeddings]
            if beyond:
                raise BadParameter(f"{name} has {module.num_embeddings} rows, so there is no row {beyond[0]}")
        return [
            Change(target=f"{name}.weight: {which}", old=1.0, new=parameters.factor)
            for name in choose_tables(run, parameters.layers)
        ]

    def apply(self, run: LiveRun, parameters: DampRowsParameters) -> Undo:
        """Damp from the next update on."""
        import torch

        self.preview(run, parameters)
        tables = [m.weight for m in choose_tables(run, parameters.layers).values()]
        named = torch.tensor(_rows(parameters), dtype=torch.int64)
        signals: dict[int, _Signal] = {}

        def factors(table: Any, rows: Any, gradients: Any, change: Any) -> Any:
            if len(named):
                damped = torch.isin(rows, named.to(rows.device))
            else:
                if id(table) not in signals:
                    signals[id(table)] = _Signal(table)
                share, count = signals[id(table)].update(rows, gradients.float())
                damped = (count >= _MIN_GRADIENTS) & (share < parameters.threshold)
            return torch.where(damped, parameters.factor, 1.0)

        return scale_row_updates(run, tables, factors)


class _Signal:
    """Running mean and mean square of each row's gradients."""

    def __init__(self, table: Any) -> None:
        import torch

        self.mean = torch.zeros_like(table, dtype=torch.float32)
        self.square = torch.zeros(len(table), device=table.device)
        self.count = torch.zeros(len(table), dtype=torch.int64, device=table.device)

    def update(self, rows: Any, gradients: Any) -> tuple[Any, Any]:
        """Add gradients; returns signal shares and counts of these rows."""
        self.mean[rows] = _MEMORY * self.mean[rows] + (1 - _MEMORY) * gradients
        self.square[rows] = _MEMORY * self.square[rows] + (1 - _MEMORY) * gradients.square().sum(dim=1)
        self.count[rows] += 1
        weight = 1 - _MEMORY ** self.count[rows].float()
        mean, square = self.mean[rows] / weight[:, None], self.square[rows] / weight
        return mean.square().sum(dim=1) / square.clamp_min(1e-30), self.count[rows]


def _rows(parameters: DampRowsParameters) -> list[int]:
    return [int(r) for r in parameters.rows.split(",")] if parameters.rows else []
