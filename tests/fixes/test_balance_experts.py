"""A router is pushed toward balance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradtracer.errors import BadParameter
from gradtracer.fixes.balance_experts import balance_term
from tests.fixes.training import Program, assert_harmless, assert_undone_exactly, healthy, live, program


class Mixture(nn.Module):
    """Each row goes to its best expert, times its probability."""

    def __init__(self, lean: float) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 1) for _ in range(4))
        with torch.no_grad():
            self.router.bias[0] += lean

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).softmax(dim=1)
        outputs = torch.stack([e(x)[:, 0] for e in self.experts], dim=1)
        top, chosen = probabilities.max(dim=1)
        return top * outputs.gather(1, chosen[:, None])[:, 0]


def _mixture(seed: int, lean: float) -> Program:
    torch.manual_seed(seed)
    model = Mixture(lean)
    ways = torch.randn(4, 6)

    def loss() -> Tensor:
        x = torch.randn(64, 6)
        which = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        return (model(x) - (ways[which] * x).sum(dim=1)).square().mean()

    return program(model, torch.optim.Adam(model.parameters(), 1e-2), loss)


def _collapsed(seed: int) -> Program:
    return _mixture(seed, 8.0)


def _even(seed: int) -> Program:
    return _mixture(seed, 0.0)


def _num_used(made: Program) -> int:
    return len(made.model.router(torch.randn(1000, 6)).argmax(dim=1).unique())  # type: ignore[operator]


@pytest.mark.parametrize("seed", range(3))
def test_experts_that_were_left_out_are_chosen(seed: int) -> None:
    used = []
    for treated in (False, True):
        made = _collapsed(seed)
        with live(made) as run:
            run.train(10)
            if treated:
                run.apply("balance_experts", layer="router")
            run.train(300 if treated else 100)
        used.append(_num_used(made))
    assert used[1] >= max(3, used[0])


@pytest.mark.slow
def test_an_even_router_is_not_hurt() -> None:
    assert_harmless(_even, "balance_experts", layer="router")


def test_undo_leaves_no_hook() -> None:
    assert_undone_exactly(_collapsed, "balance_experts", layer="router")


def test_the_term_and_its_gradient_are_those_of_autograd_in_float64() -> None:
    logits = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    shares = torch.stack([(logits.reshape(-1, 5).argmax(dim=1) == e).double().mean() for e in range(5)])
    expected = 5 * (shares * logits.softmax(dim=-1).reshape(-1, 5).mean(dim=0)).sum()
    expected.backward()
    found, gradient = balance_term(logits.detach())
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), logits.grad, rtol=1e-4, atol=1e-7)
    even = torch.eye(5).repeat(2, 1)
    assert float(balance_term(even)[0]) == pytest.approx(1.0)


def test_an_unknown_or_a_balanced_router_is_refused() -> None:
    with live(_even(0)) as run:
        run.apply("balance_experts", layer="router")
        with pytest.raises(BadParameter, match="balanced already"):
            run.preview("balance_experts", layer="router")
    with live(healthy(0)) as run, pytest.raises(BadParameter, match="no layer"):
        run.preview("balance_experts", layer="router")
