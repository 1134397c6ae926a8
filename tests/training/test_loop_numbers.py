"""Slow twins, in float64, of what the audits of the loop compute."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradtracer.training.audits._loss_expression import loss_end
from gradtracer.training.audits._sampling import spread, thin
from gradtracer.training.audits.half_overflow import _largest_of_product
from gradtracer.training.audits.initialisation import _weights
from gradtracer.training.graph import LossGraph


@pytest.mark.parametrize("shape", [(7,), (64, 64), (33, 129), (16, 3, 5, 5)])
def test_a_thin_sample_leaves_out_no_column(shape: tuple[int, ...]) -> None:
    columns = torch.arange(shape[-1]).expand(shape)
    sample = thin(columns, 256)
    assert len(sample) <= 256
    if len(shape) > 1 and shape[-1] <= 64:
        assert set(sample.tolist()) == set(range(shape[-1]))


def test_spread_takes_the_first_and_the_last() -> None:
    assert spread(list(range(100)), 5) == [0, 25, 50, 74, 99]
    assert spread([1, 2], 5) == [1, 2]


def test_the_gain_of_a_weight_is_its_rms_over_that_of_he() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(50, 20))
    for found, module in zip(_weights(model), model, strict=True):
        w = module.weight.detach().double().numpy()
        fan_in = np.prod(w.shape[1:])
        assert found.gain == pytest.approx(math.sqrt((w**2).mean()) / math.sqrt(2.0 / fan_in), rel=1e-5)


@pytest.mark.parametrize(
    ("build", "factor", "reduction", "num_terms"),
    [
        (lambda x, y: F.cross_entropy(x, y), 1.0, "mean", 6),
        (lambda x, y: F.cross_entropy(x, y, reduction="sum") * 3, 3.0, "sum", 6),
        (lambda x, y: -(x.square().mean() / 12) * 0.5, 0.5 / 12, "mean", 24),
        (lambda x, y: 4 * x.square().sum() / torch.tensor(8.0), 0.5, "sum", 24),
        (lambda x, y: x.square().mean() + x.abs().mean(), 1.0, "", 0),
    ],
)
def test_the_end_of_a_loss_is_read_from_its_graph(build, factor: float, reduction: str, num_terms: int) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(6, 4, requires_grad=True)
    end = loss_end(LossGraph(build(x, torch.randint(0, 4, (6,))), {}))
    assert (end.reduction, end.num_terms) == (reduction, num_terms)
    assert end.factor == pytest.approx(factor)


def test_the_largest_element_of_a_half_precision_product_is_that_of_float64() -> None:
    torch.manual_seed(0)
    a = (torch.randn(2, 5, 7) * 200).half().requires_grad_()
    b = (torch.randn(2, 7, 4) * 200).half().requires_grad_()
    largest = _largest_of_product(torch.bmm(a, b).grad_fn)
    assert largest is not None
    expected = (a.detach().double() @ b.detach().double()).abs().max()
    assert float(largest) == pytest.approx(float(expected), rel=1e-5)
