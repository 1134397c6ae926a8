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
    """Multiply small updates of embedding rows, up to the length of the usual one of the step.

    What:
        In each update, of the rows that have a gradient, those that would move less than the median row are moved
        further along the same way. Rows without a gradient, and longer moves, stay as they are.

    Why:
        Where frequent rows take the gradient, rare ones that appear in a batch hardly move: they need the rate that an
        optimizer with a rate by row would give them.

    Definition:
        For the moves d_r of rows with a gradient in one step: ``d_r <- d_r * clamp(median ||d|| / ||d_r||, 1,
        max_factor)``, after the optimizer step.

    Safety:
        Guarded: short moves may be short because the row is where it should be.

    Undo:
        From the next update on rows are updated as the optimizer does.

    References:
        Duchi, Hazan, Singer 2011, JMLR 12 (rates by coordinate for rare features). You et al. 2020, arXiv:1904.00962
        (updates of equal length).
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

        def factors(table: Any, rows: Any, gradients: Any, change: Any) -> Any:
            lengths = change.float().norm(dim=1)
            moving = lengths[lengths > 0]
            if not len(moving):
                return lengths
            return (moving.median() / lengths.clamp_min(1e-30)).clamp(1.0, parameters.max_factor)

        tables = [m.weight for m in choose_tables(run, parameters.layers).values()]
        return scale_row_updates(run, tables, factors)
