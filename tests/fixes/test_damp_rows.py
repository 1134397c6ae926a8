"""Noisy rows are damped, whatever the optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradtracer.errors import BadParameter
from tests.fixes.training import Program, assert_harmless, assert_undone_exactly, final_losses, healthy, live, program


def _table(seed: int, *, noise: float, rate: float, sparse: bool = False, adam: bool = True) -> Program:
    """Rows learn targets; each look-up sees the target with noise, and the loss is that without."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(12, 4, sparse=sparse))
    targets = torch.randn(12, 4)

    def loss() -> torch.Tensor:
        rows = torch.randint(0, 12, (32,))
        out = model(rows)
        seen = targets[rows] + noise * torch.randn(32, 4)
        shown = (out - seen).square().mean()
        clean = (out - targets[rows]).square().mean()
        return shown + (clean - shown).detach()

    kind = torch.optim.Adam if adam else torch.optim.SGD
    return program(model, kind(model.parameters(), rate), loss)


def _jumpy(seed: int) -> Program:
    return _table(seed, noise=3.0, rate=0.3)


def _calm(seed: int) -> Program:
    return _table(seed, noise=0.1, rate=0.03)


def _sparse(seed: int) -> Program:
    return _table(seed, noise=0.5, rate=2.0, sparse=True, adam=False)


@pytest.mark.slow
def test_rows_that_jumped_settle() -> None:
    without = final_losses(_jumpy, range(3), num_steps=150)
    treated = final_losses(_jumpy, range(3), num_steps=150, code="damp_rows", at=30)
    assert max(treated) < 0.5 * min(without)


@pytest.mark.slow
def test_rows_that_learn_are_not_hurt() -> None:
    assert_harmless(_calm, "damp_rows")


@pytest.mark.parametrize("make", [_jumpy, _sparse])
def test_undo_leaves_nothing(make: object) -> None:
    assert_undone_exactly(make, "damp_rows", rows="0, 3, 5")  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [_jumpy, _sparse])
def test_the_update_of_named_rows_is_multiplied(make: object) -> None:
    moves = []
    for parameters in ({}, {"rows": "2, 7", "factor": 0.25}):
        made = make(0)  # type: ignore[operator]
        with live(made) as run:
            run.train(3)
            before = made.model[0].weight.detach().clone()
            if parameters:
                run.apply("damp_rows", **parameters)
            run.train(1)
            moves.append((made.model[0].weight.detach() - before).double())
    expected = moves[0].clone()
    expected[[2, 7]] *= 0.25
    torch.testing.assert_close(moves[1], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rows": "12"}, "has 12 rows"),
        ({"rows": "a"}, "rows"),
        ({"factor": 2.0}, "factor"),
        ({"layers": "5"}, "no layer"),
    ],
)
def test_what_cannot_be_damped_is_refused(parameters: dict[str, object], message: str) -> None:
    with live(_calm(0)) as run, pytest.raises(BadParameter, match=message):
        run.preview("damp_rows", **parameters)  # type: ignore[arg-type]
    with live(healthy(0)) as run, pytest.raises(BadParameter, match="no embedding"):
        run.preview("damp_rows")
