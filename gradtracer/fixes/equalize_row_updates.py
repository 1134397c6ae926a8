"""Raise the updates of embedding rows that get next to none."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.fixes._rows import choose_tables, scale_row_updates
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class EqualizeRowUpdatesParameters(FixParameters):
    """Parameters of `equalize_row_updates`."""

    layers: str | None = Field(
        default=None, max_length=2000, description="Embeddings, with commas; all of the model by default."
    )
    max_factor: float = Field(default=10.0, gt=1, le=1000, description="Most by which an update is multiplied.")


@FIXES.register
class EqualizeRowUpdates(Fix[EqualizeRowUpdatesParameters]):
    """Multiply updates of embedding rows whose gradients are small, by how much smaller they are than the usual row's.

    What:
        Rows whose gradients have been smaller than those of the median row are moved further along the same way, as an
        optimizer with a rate by row does it. Rows without a gradient in a step stay where they are.

    Why:
        Where frequent rows take the gradient, rare ones hardly move when they are looked up.

    Definition:
        With ``s_r`` the root mean square of a row's gradients since the fix, over the steps in which it had one:
        ``d_r <- d_r * clamp(median s / s_r, 1, max_factor)`` for what an optimizer step does to the row.

    Safety:
        Guarded: gradients may be small because the row is where it should be.

    Undo:
        From the next update on rows are updated as the optimizer does.

    References:
        Duchi, Hazan, Singer 2011, JMLR 12, section 1.1 (rates by coordinate for rare features).
    """

    code = "equalize_row_updates"
    title = "Raise small updates of embedding rows"
    safety = Safety.GUARDED
    standing = True
    shows_in_loss = False
    mends = ("gradient_starvation",)
    Parameters = EqualizeRowUpdatesParameters

    def preview(self, run: LiveRun, parameters: EqualizeRowUpdatesParameters) -> list[Change]:
        """The tables."""
        new = f"up to {parameters.max_factor:g} times"
        return [
            Change(target=f"{name}.weight: small updates", old="1 time", new=new)
            for name in choose_tables(run, parameters.layers)
        ]

    def apply(self, run: LiveRun, parameters: EqualizeRowUpdatesParameters) -> Undo:
        """Equalise from the next update on."""
        import torch

        sums: dict[int, tuple[Any, Any]] = {}

        def factors(table: Any, rows: Any, gradients: Any, change: Any) -> Any:
            squares, counts = sums.get(id(table), (torch.zeros(len(table), device=table.device),) * 2)
            squares = squares.index_add(0, rows, gradients.float().square().sum(dim=1))
            counts = counts.index_add(0, rows, torch.ones_like(rows, dtype=counts.dtype))
            sums[id(table)] = squares, counts
            sizes = (squares / counts.clamp_min(1)).sqrt()
            usual = sizes[counts > 0].median()
            return (usual / sizes[rows].clamp_min(1e-30)).clamp(1.0, parameters.max_factor)

        tables = [m.weight for m in choose_tables(run, parameters.layers).values()]
        return scale_row_updates(run, tables, factors)
