"""Layers are rescaled to unit variance."""

from __future__ import annotations

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


def _too_large(seed: int) -> Program:
    model = network(seed)
    for layer in (model[0], model[2], model[4]):
        nn.init.normal_(layer.weight, std=1.0)
    return program(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), classification(model, seed))


def _deep_sigmoid(seed: int) -> Program:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i in range(8):
        layers += [nn.Linear(12 if i == 0 else 24, 24), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(24, 4))
    return program(model, torch.optim.SGD(model.parameters(), 0.1), classification(model, seed))


def test_a_start_with_huge_weights_is_mended() -> None:
    without = final_losses(_too_large, range(3), num_steps=60)
    treated = final_losses(_too_large, range(3), num_steps=60, code="layer_scale_init", at=1)
    assert sum(treated) < 0.3 * sum(without)


@pytest.mark.parametrize("orthonormal", [False, True])
def test_a_deep_sigmoid_network_learns_once_it_is_centred(orthonormal: bool) -> None:
    without = final_losses(_deep_sigmoid, range(2), num_steps=120)
    treated = final_losses(
        _deep_sigmoid, range(2), num_steps=120, code="layer_scale_init", at=3, centre=True, orthonormal=orthonormal
    )
    assert max(treated) < 0.7 * min(without)


def test_a_healthy_run_makes_up_for_it() -> None:
    assert_harmless(healthy, "layer_scale_init", num_steps=200, at=5)


@pytest.mark.parametrize("make", [healthy, healthy_adam])
def test_undo_puts_weights_and_moments_back(make: object) -> None:
    assert_undone_exactly(make, "layer_scale_init", centre=True, orthonormal=True)  # type: ignore[arg-type]


def test_every_layer_puts_out_the_deviation_that_was_asked_for() -> None:
    made = _too_large(0)
    with live(made) as run:
        run.train(1)
        run.apply("layer_scale_init", deviation=2.0, centre=True)
        assert made.replay is not None
        seen: dict[int, list[torch.Tensor]] = {}
        for number in (0, 2, 4):
            layer = made.model[number]  # type: ignore[index]
            layer.register_forward_hook(lambda m, i, o, n=number: seen.setdefault(n, []).append(o.detach().double()))
        with torch.no_grad():
            for i in range(30):
                made.replay(i)
    for outputs in seen.values():
        values = torch.cat(outputs)
        assert float((values - values.mean(dim=0)).square().mean().sqrt()) == pytest.approx(2.0, rel=0.25)
        assert float(values.mean(dim=0).abs().max()) < 1.0


def test_a_constant_layer_is_refused_and_nothing_changed() -> None:
    made = healthy(0)
    nn.init.zeros_(made.model[2].weight)  # type: ignore[index]
    before = {n: t.clone() for n, t in made.model.state_dict().items()}
    with live(made) as run:
        with pytest.raises(BadParameter, match="output of 2 is constant"):
            run.apply("layer_scale_init")
        assert all(torch.equal(before[n], t) for n, t in made.model.state_dict().items())
        with pytest.raises(BadParameter, match="deviation"):
            run.preview("layer_scale_init", deviation=0.0)
