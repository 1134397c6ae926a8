"""A module leaves half precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gradtracer.errors import BadParameter
from tests.fixes.training import Program, assert_harmless, assert_undone_exactly, final_losses, live, program


class Squares(nn.Module):
    """Squares its input, which leaves the range of float16 above 255, and takes the logarithm."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x.half() if x.dtype is torch.float16 else x).square() + 1.0).log()


def _training(seed: int, size: float) -> Program:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), Squares(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.mul_(size)

    def loss() -> Tensor:
        x = torch.randn(32, 6)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        return (out.float() - x.sum(dim=1, keepdim=True).abs()).square().mean()

    return program(model, torch.optim.Adam(model.parameters(), 3e-3), loss)


def _overflowing(seed: int) -> Program:
    return _training(seed, 3e3)


def _usual(seed: int) -> Program:
    return _training(seed, 1.0)


def test_what_overflows_in_half_precision_is_finite_in_full() -> None:
    def broken_from_the_start(seed: int) -> Program:
        made = _overflowing(seed)
        return made

    assert math.isinf(final_losses(broken_from_the_start, [0], num_steps=20)[0])
    treated = final_losses(broken_from_the_start, range(2), num_steps=60, code="keep_in_fp32", layer="1")
    assert all(map(math.isfinite, treated))


@pytest.mark.slow
def test_full_precision_does_not_hurt() -> None:
    assert_harmless(_usual, "keep_in_fp32", layer="0")


def test_undo_leaves_no_hook() -> None:
    assert_undone_exactly(_usual, "keep_in_fp32", layer="0")


def test_the_module_alone_runs_outside_of_autocast() -> None:
    made = _usual(0)
    types: dict[str, torch.dtype] = {}
    for number in (0, 2):
        made.model[number].register_forward_hook(  # type: ignore[index]
            lambda m, i, o, n=str(number): types.__setitem__(n, o.dtype)
        )
    with live(made) as run:
        run.train(1)
        assert types == {"0": torch.float16, "2": torch.float16}
        run.apply("keep_in_fp32", layer="0")
        run.train(1)
        assert types == {"0": torch.float32, "2": torch.float16}
        with pytest.raises(RuntimeError):
            made.model(torch.randn(3, 5))
        assert not torch.is_autocast_enabled("cpu")


def test_half_precision_weights_and_unknown_layers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1).half())
    made = program(model, torch.optim.SGD(model[0].parameters(), 0.1), lambda: model[0](torch.randn(8, 4)).sum())
    with live(made) as run:
        with pytest.raises(BadParameter, match="half precision itself"):
            run.preview("keep_in_fp32", layer="1")
        with pytest.raises(BadParameter, match="no layer"):
            run.preview("keep_in_fp32", layer="2")
        run.apply("keep_in_fp32", layer="0")
        with pytest.raises(BadParameter, match="already"):
            run.apply("keep_in_fp32", layer="0")
