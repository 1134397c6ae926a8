"""Rows with small updates move as far as the usual one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradtracer.errors import BadParameter
from tests.fixes.training import Program, assert_harmless, assert_undone_exactly, healthy, live, program


def _starved(seed: int, weight: float = 0.01) -> Program:
    """Two of ten rows have a hundredth of the say in the loss."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(10, 4))
    targets = torch.randn(10, 4)
    weights = torch.ones(10, 1)
    weights[:2] = weight

    def loss() -> torch.Tensor:
        rows = torch.randint(0, 10, (40,))
        return (weights[rows] * (model(rows) - targets[rows]).square()).mean()

    model.targets = targets
    return program(model, torch.optim.SGD(model.parameters(), 2.0), loss)


def _even(seed: int) -> Program:
    return _starved(seed, weight=1.0)


def _error(made: Program) -> float:
    return float((made.model[0].weight.detach() - made.model.targets)[:2].square().mean())  # type: ignore[index,operator]


@pytest.mark.parametrize("seed", range(3))
def test_starved_rows_learn(seed: int) -> None:
    errors = []
    for treated in (False, True):
        made = _starved(seed)
        with live(made) as run:
            run.train(5)
            if treated:
                run.apply("equalize_row_updates", max_factor=100.0)
            run.train(150)
        errors.append(_error(made))
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.slow
def test_even_rows_are_not_hurt() -> None:
    assert_harmless(_even, "equalize_row_updates", max_factor=2.0)


def test_undo_leaves_nothing() -> None:
    assert_undone_exactly(_starved, "equalize_row_updates")


def test_moves_are_raised_by_the_ratio_of_gradients_up_to_the_factor() -> None:
    moves, gradient = [], torch.empty(0)
    for treated in (False, True):
        made = _starved(0)
        with live(made) as run:
            run.train(3)
            before = made.model[0].weight.detach().clone()  # type: ignore[index]
            if treated:
                run.apply("equalize_row_updates", max_factor=5.0)
            run.train(1)
            moves.append((made.model[0].weight.detach() - before).double())  # type: ignore[index]
            gradient = made.model[0].weight.grad.double()  # type: ignore[index]
    sizes = gradient.norm(dim=1)
    usual = sizes[sizes > 0].median()
    factor = torch.stack([(usual / s).clamp(1, 5) if s > 0 else torch.ones(()).double() for s in sizes])
    torch.testing.assert_close(moves[1], factor[:, None] * moves[0], rtol=1e-4, atol=1e-6)


def test_a_model_without_tables_is_refused() -> None:
    with live(healthy(0)) as run, pytest.raises(BadParameter, match="no embedding"):
        run.preview("equalize_row_updates")
    with live(_even(0)) as run, pytest.raises(BadParameter, match="max_factor"):
        run.preview("equalize_row_updates", max_factor=1.0)
