"""Dead units pass inputs again, and live ones are left alone."""

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


def _dead_layer(seed: int) -> Program:
    model = network(seed)
    nn.init.constant_(model[2].bias, -20.0)
    return program(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), classification(model, seed))


def _some_dead(seed: int) -> Program:
    model = network(seed)
    with torch.no_grad():
        model[2].bias[:10] = -20.0
    return program(model, torch.optim.Adam(model.parameters(), 3e-3), classification(model, seed))


@pytest.mark.parametrize("incoming", ["shift", "draw"])
def test_a_dead_layer_learns_again(incoming: str) -> None:
    without = final_losses(_dead_layer, range(3), num_steps=80)
    treated = final_losses(
        _dead_layer, range(3), num_steps=80, code="revive_dead_units", at=10, layers="2", incoming=incoming
    )
    assert max(treated) < 0.5 * min(without)


@pytest.mark.parametrize("incoming", ["shift", "draw"])
def test_half_dead_healthy_run_is_not_hurt(incoming: str) -> None:
    assert_harmless(_some_dead, "revive_dead_units", incoming=incoming)


@pytest.mark.parametrize("incoming", ["shift", "draw"])
def test_undo_puts_weights_and_moments_back(incoming: str) -> None:
    assert_undone_exactly(_some_dead, "revive_dead_units", incoming=incoming)


def test_units_that_live_keep_their_weights() -> None:
    made = _some_dead(0)
    with live(made) as run:
        run.train(3)
        before = made.model[2].weight.detach().clone()  # type: ignore[index]
        outgoing = made.model[4].weight.detach().clone()  # type: ignore[index]
        run.apply("revive_dead_units", layers="2", incoming="draw")
        same = (made.model[2].weight == before).all(dim=1)  # type: ignore[index]
        assert same.tolist() == [False] * 10 + [True] * 14
        assert not made.model[4].weight.detach()[:, :10].any()  # type: ignore[index]
        assert torch.equal(made.model[4].weight[:, 10:], outgoing[:, 10:])  # type: ignore[index]


def test_shifted_units_pass_half_of_the_inputs() -> None:
    made = _dead_layer(0)
    with live(made) as run:
        run.train(2)
        run.apply("revive_dead_units", layers="2")
        assert made.replay is not None
        with torch.no_grad():
            x = torch.randn(2000, 12)
            inputs = made.model[2](made.model[1](made.model[0](x)))  # type: ignore[index]
        assert 0.2 < float((inputs > 0).float().mean()) < 0.8


class _Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(6 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(F.relu(self.second(F.relu(self.first(x)))), 1))


def test_functional_rectifiers_behind_convolutions_are_seen() -> None:
    torch.manual_seed(0)
    model = _Convolutional()
    nn.init.constant_(model.second.bias, -50.0)

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(torch.randn(8, 1, 8, 8)), torch.randint(0, 3, (8,)))

    with live(program(model, torch.optim.SGD(model.parameters(), 0.01), loss)) as run:
        run.train(2)
        assert not model.second.weight.grad.any()  # type: ignore[union-attr]
        run.apply("revive_dead_units")
        run.train(1)
        assert model.second.weight.grad.abs().sum(dim=(1, 2, 3)).gt(0).all()  # type: ignore[union-attr]


def test_without_a_dead_unit_nothing_is_done() -> None:
    made = healthy(0)
    with live(made) as run:
        run.train(1)
        before = [p.detach().clone() for p in made.model.parameters()]
        with pytest.raises(BadParameter, match=r"no unit of .* is dead"):
            run.apply("revive_dead_units", layers="2")
        assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


@pytest.mark.parametrize(("parameters", "message"), [({"layers": "1"}, "is a ReLU"), ({"incoming": "x"}, "incoming")])
def test_what_has_no_units_is_refused(parameters: dict[str, str], message: str) -> None:
    with live(healthy(0)) as run:
        run.train(1)
        with pytest.raises(BadParameter, match=message):
            run.preview("revive_dead_units", **parameters)
