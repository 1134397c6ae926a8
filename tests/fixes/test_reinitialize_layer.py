"""Weights are drawn anew by what follows them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradtracer.errors import BadParameter
from tests.fixes.training import (
    Program,
    assert_harmless,
    assert_undone_exactly,
    classification,
    final_losses,
    healthy,
    healthy_adam,
    live,
    network,
    program,
)


def _equal_units(seed: int) -> Program:
    model = network(seed)
    nn.init.constant_(model[2].weight, 0.05)
    return program(model, torch.optim.SGD(model.parameters(), 0.05), classification(model, seed))


def test_units_that_began_equal_learn_apart() -> None:
    without = final_losses(_equal_units, range(3), num_steps=100)
    treated = final_losses(_equal_units, range(3), num_steps=100, code="reinitialize_layer", at=5, layers="2")
    assert max(treated) < min(without)


def test_one_small_layer_drawn_anew_is_made_up_for() -> None:
    assert_harmless(healthy_adam, "reinitialize_layer", num_steps=250, at=20, layers="4")


@pytest.mark.parametrize("make", [healthy, healthy_adam])
def test_undo_puts_weights_and_moments_back(make: object) -> None:
    assert_undone_exactly(make, "reinitialize_layer")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("activation", "deviation"),
    [
        (nn.ReLU, math.sqrt(2 / 400)),
        (nn.Tanh, 5 / 3 * math.sqrt(2 / 700)),
        (nn.Sigmoid, 4 * math.sqrt(2 / 700)),
        (nn.Identity, math.sqrt(1 / 400)),
    ],
)
def test_the_scale_is_that_of_the_activation_that_follows(activation: type[nn.Module], deviation: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 300), activation(), nn.Linear(300, 4))
    made = program(model, torch.optim.SGD(model.parameters(), 0.01), lambda: model(torch.randn(8, 400)).square().mean())
    with live(made) as run:
        run.train(2)
        run.apply("reinitialize_layer", layers="0")
        assert float(model[0].weight.detach().std()) == pytest.approx(deviation, rel=0.02)
        assert not model[0].bias.detach().any()


def test_recurrent_weights_are_orthogonal_gate_by_gate() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(5, 8)
    made = program(model, torch.optim.Adam(model.parameters()), lambda: model(torch.randn(3, 4, 5))[0].square().mean())
    with live(made) as run:
        run.train(2)
        run.apply("reinitialize_layer")
        for gate in model.weight_hh_l0.detach().double().chunk(4):
            torch.testing.assert_close(gate @ gate.T, torch.eye(8, dtype=torch.float64), atol=1e-5, rtol=0)
        assert model.bias_ih_l0.detach()[8:16].eq(1).all()


def test_the_same_seed_draws_the_same_weights_and_leaves_the_random_state_alone() -> None:
    drawn = []
    for _ in range(2):
        with live(healthy(0)) as run:
            run.train(3)
            state = torch.get_rng_state()
            run.apply("reinitialize_layer", seed=7)
            assert torch.equal(torch.get_rng_state(), state)
            drawn.append(run.program.model[0].weight.detach().clone())  # type: ignore[index]
    assert torch.equal(*drawn)


def test_frozen_layers_stay() -> None:
    made = healthy(0)
    made.model[0].requires_grad_(False)  # type: ignore[index]
    before = made.model[0].weight.clone()  # type: ignore[index]
    with live(made) as run:
        run.train(2)
        run.apply("reinitialize_layer")
        assert torch.equal(made.model[0].weight, before)  # type: ignore[index]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"layers": "9"}, "no layer '9'"), ({"layers": "1"}, "is a ReLU"), ({"scheme": "lsuv"}, "scheme")],
)
def test_what_cannot_be_drawn_is_refused(parameters: dict[str, str], message: str) -> None:
    with live(healthy(0)) as run:
        run.train(1)
        with pytest.raises(BadParameter, match=message):
            run.preview("reinitialize_layer", **parameters)
