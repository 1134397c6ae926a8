"""Gaps in the input are filled in, and nothing else changes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer import FlowTracker
from gradtracer.errors import BadParameter
from gradtracer.fixes import get_fix
from tests.fixes.training import Live, Program, assert_harmless, assert_undone_exactly, healthy, live, network, program


def with_gaps(seed: int) -> Program:
    """Every batch has rows with a missing number, in a column whose mean is 3."""
    model = network(seed)
    centres = 1.5 * torch.randn(4, 12, generator=torch.Generator().manual_seed(seed))

    def loss() -> Tensor:
        y = torch.randint(0, 4, (32,))
        x = centres[y] + torch.randn(32, 12)
        x[:, 5] += 3.0
        x[:4, 5] = math.nan
        x[5, 7] = math.inf
        return F.cross_entropy(model(x), y)

    return program(model, torch.optim.Adam(model.parameters(), 3e-3), loss)


def test_a_run_whose_batches_all_have_gaps_learns() -> None:
    made = with_gaps(0)
    with live(made) as run:
        run.apply("impute_inputs")
        losses = run.train(60)
    assert all(map(math.isfinite, losses))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


@pytest.mark.slow
def test_a_healthy_run_is_not_hurt() -> None:
    assert_harmless(healthy, "impute_inputs")


def test_undo_leaves_no_trace() -> None:
    assert_undone_exactly(healthy, "impute_inputs", layer="0")


def test_what_cannot_be_is_refused() -> None:
    with live(healthy(0)) as run:
        with pytest.raises(BadParameter, match="no layer 'stem'; there are: 0, 1"):
            run.preview("impute_inputs", layer="stem")
        run.apply("impute_inputs", layer="0")
        with pytest.raises(BadParameter, match="filled in already"):
            run.preview("impute_inputs", layer="0")


def test_the_filling_is_the_mean_of_what_is_finite_in_the_batches_that_can_run_again() -> None:
    model = network(0)
    data = torch.randn(8, 16, 12, generator=torch.Generator().manual_seed(3))
    data[0, :, 2] += 5.0
    data[:, 3, 4] = math.nan
    data[..., 9] = math.nan

    def replay(batch: int) -> Tensor:
        return model(data[batch % 8]).sum()

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with FlowTracker(model, optimizer, replay=replay, serve=False) as tracker:
        fix = get_fix("impute_inputs")
        undo = fix.apply(tracker._run, fix.parse({"layer": "0"}))
        seen: list[Tensor] = []
        handle = model[0].register_forward_pre_hook(lambda m, x: seen.append(x[0]))
        model(torch.full((1, 12), math.nan))
        handle.remove()
        undo()
    columns = [[x for x in data[..., c].flatten().tolist() if math.isfinite(x)] for c in range(12)]
    assert seen[0][0].tolist() == pytest.approx([sum(c) / len(c) if c else 0.0 for c in columns], rel=1e-5)


def test_finite_inputs_pass_as_they_are_and_other_arguments_too() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.out(x).masked_fill(mask.isinf(), 0.0) + mask.isinf()

    torch.manual_seed(0)
    model = Masked()
    made = program(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x, mask).square().mean())
    x, mask = torch.randn(4, 3), torch.tensor([0.0, -math.inf, 0.0])
    with live(made) as run:
        expected = model(x, mask)
        Live.apply(run, "impute_inputs")
        assert torch.equal(model(x, mask), expected)
