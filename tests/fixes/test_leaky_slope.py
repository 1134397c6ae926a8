"""Rectifiers get a slope below zero, in place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradtracer.errors import BadParameter
from tests.fixes.training import (
    Program,
    assert_harmless,
    assert_undone_exactly,
    classification,
    final_losses,
    healthy,
    live,
    network,
    program,
)


def _nearly_dead(seed: int) -> Program:
    model = network(seed)
    nn.init.constant_(model[2].bias, -4.0)
    return program(model, torch.optim.SGD(model.parameters(), 0.2), classification(model, seed))


class Functional(nn.Module):
    """Rectifies by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


def _functional(seed: int) -> Program:
    torch.manual_seed(seed)
    model = Functional()
    return program(model, torch.optim.SGD(model.parameters(), 0.05), classification(model, seed))


def test_a_dead_layer_comes_back_by_training() -> None:
    without = final_losses(_nearly_dead, range(3), num_steps=200)
    treated = final_losses(_nearly_dead, range(3), num_steps=200, code="leaky_slope", at=10, slope=0.3)
    assert max(treated) < 0.7 * min(without)


def test_a_small_slope_does_not_hurt_a_healthy_run() -> None:
    assert_harmless(healthy, "leaky_slope")


@pytest.mark.parametrize("make", [healthy, _functional])
def test_undo_leaves_plain_rectifiers(make: object) -> None:
    assert_undone_exactly(make, "leaky_slope", slope=0.2)  # type: ignore[arg-type]


def test_modules_stay_the_same_objects() -> None:
    made = healthy(0)
    rectifiers = [made.model[1], made.model[3]]  # type: ignore[index]
    with live(made) as run:
        run.train(1)
        undo = run.apply("leaky_slope", layers="3", slope=0.1)
        assert made.model[3] is rectifiers[1]  # type: ignore[index]
        assert rectifiers[1](torch.tensor([-2.0, 3.0])).tolist() == pytest.approx([-0.2, 3.0])
        assert rectifiers[0](torch.tensor([-2.0])).item() == 0
        undo()
        assert rectifiers[1](torch.tensor([-2.0])).item() == 0


def test_a_functional_rectifier_is_answered_by_a_leaky_one() -> None:
    made = _functional(0)
    x = torch.randn(5, 12)
    with live(made) as run:
        run.train(1)
        plain = made.model(x)
        undo = run.apply("leaky_slope", slope=0.3)
        expected = made.model.second(F.leaky_relu(made.model.first(x), 0.3))  # type: ignore[operator]
        assert torch.equal(made.model(x), expected)
        undo()
        assert torch.equal(made.model(x), plain)


def test_an_error_within_the_model_leaves_no_mode_open() -> None:
    made = _functional(0)
    with live(made) as run:
        run.train(1)
        run.apply("leaky_slope", slope=0.3)
        with pytest.raises(RuntimeError):
            made.model(torch.randn(5, 3))
        assert F.relu(torch.tensor([-1.0])).item() == 0


def test_a_model_without_rectifiers_is_refused() -> None:
    model = nn.Sequential(nn.Linear(12, 4))
    with live(program(model, torch.optim.SGD(model.parameters(), 0.1), classification(model, 0))) as run:
        run.train(1)
        with pytest.raises(BadParameter, match="no rectifier was found"):
            run.apply("leaky_slope")
        with pytest.raises(BadParameter, match="slope"):
            run.preview("leaky_slope", slope=1.0)
