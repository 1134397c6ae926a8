"""Inputs are standardised in front of the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradtracer.errors import BadParameter
from tests.fixes.training import Program, assert_harmless, assert_undone_exactly, final_losses, healthy, live, program

_SCALES, _OFFSETS = torch.tensor([1.0, 300.0, 0.01, 50.0]), torch.tensor([0.0, 900.0, 3.0, -20.0])


def _regression(seed: int, *, raw: bool) -> Program:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss() -> torch.Tensor:
        x = torch.randn(32, 4)
        target = torch.sin(x.sum(dim=1, keepdim=True))
        return F.mse_loss(model(x * _SCALES + _OFFSETS if raw else x), target)

    return program(model, torch.optim.SGD(model.parameters(), 0.1), loss)


def _raw(seed: int) -> Program:
    return _regression(seed, raw=True)


def _scaled(seed: int) -> Program:
    return _regression(seed, raw=False)


@pytest.mark.slow
@pytest.mark.parametrize("reinitialize", [False, True])
def test_raw_columns_are_learned_from_once_they_are_standardised(reinitialize: bool) -> None:
    without = final_losses(_raw, range(3), num_steps=250)
    treated = final_losses(_raw, range(3), num_steps=250, code="standardize_inputs", at=10, reinitialize=reinitialize)
    assert max(treated) < 0.8 * min(without)


@pytest.mark.slow
def test_inputs_of_unit_scale_stay_about_as_they_are() -> None:
    assert_harmless(_scaled, "standardize_inputs")


@pytest.mark.parametrize("reinitialize", [False, True])
def test_undo_leaves_no_hook_and_the_old_weights(reinitialize: bool) -> None:
    assert_undone_exactly(_raw, "standardize_inputs", reinitialize=reinitialize)


def test_columns_have_mean_zero_and_deviation_one_and_are_clipped() -> None:
    made = _raw(0)
    received: list[torch.Tensor] = []
    with live(made) as run:
        run.train(1)
        run.apply("standardize_inputs", clip=2.0)
        made.model[0].register_forward_hook(lambda m, i, o: received.append(i[0].double()))  # type: ignore[index]
        made.model(torch.randn(20_000, 4) * _SCALES + _OFFSETS)
    (x,) = received
    standard = torch.randn(200_000, dtype=torch.float64).clamp(-2, 2).std()
    torch.testing.assert_close(x.mean(dim=0), torch.zeros(4, dtype=torch.float64), atol=0.3, rtol=0)
    torch.testing.assert_close(x.std(dim=0), standard.expand(4), atol=0.15, rtol=0)
    assert float(x.abs().max()) == 2.0


def test_a_layer_that_gets_no_numbers_or_has_the_hook_already_is_refused() -> None:
    with live(healthy(0)) as run:
        run.train(1)
        with pytest.raises(BadParameter, match="no layer 'x'"):
            run.preview("standardize_inputs", layer="x")
        run.apply("standardize_inputs")
        with pytest.raises(BadParameter, match="standardised already"):
            run.apply("standardize_inputs")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    made = program(
        model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(torch.randint(0, 5, (8,))).square().mean()
    )
    with live(made) as run, pytest.raises(BadParameter, match="no floating-point input"):
        run.apply("standardize_inputs")
