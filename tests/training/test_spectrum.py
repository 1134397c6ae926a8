"""The edge of a random matrix's spectrum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradtracer.training.spectrum import LEARNT_EDGE, edge_ratio, looks_learnt


def test_the_ratio_is_that_of_numpy_in_float64() -> None:
    weight = torch.randn(12, 3, 5, generator=torch.Generator().manual_seed(0))
    matrix = weight.numpy().astype(np.float64).reshape(12, 15)
    matrix -= matrix.mean()
    edge = matrix.std() * (math.sqrt(12) + math.sqrt(15))
    assert edge_ratio(weight) == pytest.approx(np.linalg.norm(matrix, 2) / edge, rel=1e-9)


@pytest.mark.parametrize("draw", [torch.nn.init.kaiming_uniform_, torch.nn.init.normal_, torch.nn.init.orthogonal_])
@pytest.mark.parametrize("shape", [(8, 64), (64, 64), (10, 300)])
def test_random_matrices_stay_below_the_edge(draw: object, shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    for _ in range(20):
        assert edge_ratio(draw(torch.empty(shape))) <= LEARNT_EDGE  # type: ignore[operator]


def test_one_learnt_direction_shows() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 32)
    assert not looks_learnt([weight])
    assert looks_learnt([weight, weight + 1.5 * torch.outer(torch.randn(32), torch.randn(32)) / 2])


def test_what_is_too_small_to_tell_is_not_said_to_be_learnt() -> None:
    assert math.isnan(edge_ratio(torch.randn(4, 100)))
    assert math.isnan(edge_ratio(torch.ones(16, 16)))
    assert not looks_learnt([torch.randn(4, 100), torch.zeros(16, 16)])
