"""What fixes of embedding rows share: the rows that an update is about to move, and putting a part of it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradtracer.fixes._modules import choose
from gradtracer.fixes.base import LiveRun, Undo

RowFactors = Callable[[Any, Any, Any, Any], Any]
"""Given a table, rows ``[n]``, their gradients ``[n, width]`` and their moves ``[n, width]``: factors ``[n]``."""


def choose_tables(run: LiveRun, names: str | None) -> dict[str, Any]:
    """Embedding tables by name.

    Raises:
        BadParameter: If there is none.
    """
    return choose(run, names, _is_table, "embedding")


def scale_row_updates(run: LiveRun, tables: list[Any], factors: RowFactors) -> Undo:
    """From now on multiply what each optimizer step does to the rows of tables that have a gradient.

    It acts on the update and not on the gradient, which an adaptive optimizer would scale back.
    """
    import torch

    moved: list[tuple[Any, Any, Any, Any]] = []

    def before(optimizer: Any) -> None:
        moved.clear()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for table in tables:
            if id(table) in held and table.grad is not None:
                rows, gradients = rows_with_gradient(table.grad)
                moved.append((table, rows, gradients.clone(), table.detach()[rows].clone()))

    def after(optimizer: Any) -> None:
        with torch.no_grad():
            for table, rows, gradients, old in moved:
                change = table[rows] - old
                table[rows] = old + factors(table, rows, gradients, change)[:, None].to(old.dtype) * change
        moved.clear()

    return run.around_update(before, after)


def rows_with_gradient(gradient: Any) -> tuple[Any, Any]:
    """Numbers of the rows that have a gradient, ``[n]``, and these gradients, ``[n, width]``."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return gradient.indices()[0], gradient.values()
    rows = (gradient != 0).any(dim=1).nonzero().flatten()
    return rows, gradient[rows]


def _is_table(module: Any) -> bool:
    import torch

    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.weight.requires_grad
