"""Latents may carry something before the divergence counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer.errors import BadParameter
from tests.fixes.training import Program, assert_undone_exactly, live, program


class Autoencoder(nn.Module):
    """Variational, with heads of their own or one that is split."""

    def __init__(self, *, split: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(20, 32), nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 20))
        self.split = split
        if split:
            self.heads = nn.Linear(32, 6)
        else:
            self.mean, self.log_variance = nn.Linear(32, 3), nn.Linear(32, 3)

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.encoder(x))
        if self.split:
            mean, log_variance = self.heads(h).chunk(2, dim=1)
            return mean, log_variance
        return self.mean(h), self.log_variance(h)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Reconstruction error by element, divergence by example and latent."""
        mean, log_variance = self.posterior(x)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
        return F.mse_loss(self.decoder(z), x, reduction="none"), divergence


def _training(seed: int, weight: float, *, split: bool = False) -> Program:
    torch.manual_seed(seed)
    model = Autoencoder(split=split)
    basis = torch.randn(3, 20)

    def loss() -> Tensor:
        error, divergence = model(torch.randn(64, 3) @ basis)
        return error.mean() + weight * divergence.sum(dim=1).mean()

    model.basis = basis
    return program(model, torch.optim.Adam(model.parameters(), 5e-3), loss)


def _collapsing(seed: int) -> Program:
    return _training(seed, 3.0)


def _split(seed: int) -> Program:
    return _training(seed, 3.0, split=True)


def _information(made: Program) -> float:
    with torch.no_grad():
        _, divergence = made.model(torch.randn(500, 3) @ made.model.basis)  # type: ignore[operator]
    return float(divergence.sum(dim=1).mean())


@pytest.mark.slow
@pytest.mark.parametrize("make", [_collapsing, _split])
def test_a_collapsed_latent_carries_about_what_is_free(make: object) -> None:
    for seed in range(2):
        made = make(seed)  # type: ignore[operator]
        with live(made) as run:
            run.train(100)
            assert _information(made) < 0.1
            run.apply("free_latent_bits", nats=0.5)
            run.train(250)
            assert 0.8 < _information(made) < 3.0


@pytest.mark.parametrize("split", [False, True])
def test_gradients_are_those_of_a_loss_without_the_divergence_of_free_latents(split: bool) -> None:
    made = _training(0, 2.0, split=split)
    with torch.no_grad():
        head = made.model.heads if split else made.model.mean  # type: ignore[union-attr]
        head.bias[0] += 3.0  # type: ignore[index,operator]
    x = torch.randn(32, 3) @ made.model.basis  # type: ignore[operator]

    def gradients(counts: Tensor) -> list[Tensor]:
        made.model.zero_grad()
        torch.manual_seed(5)
        error, divergence = made.model(x)
        (error.mean() + 2.0 * (counts * divergence).sum(dim=1).mean()).backward()
        return [p.grad.clone() for p in made.model.parameters() if p.grad is not None]

    expected = gradients(torch.tensor([1.0, 0.0, 0.0]))
    with live(made) as run:
        undo = run.apply("free_latent_bits", nats=2.0)
        found = gradients(torch.ones(3))
        undo()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_latent_that_carries_more_than_is_free_is_left_alone() -> None:
    losses = []
    for nats in (None, 1e-6):
        made = _training(0, 0.01)
        with live(made) as run:
            run.train(200)
            made.optimizer.state.clear()
            if nats:
                run.apply("free_latent_bits", nats=nats)
            losses.append(run.train(20))
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [_collapsing, _split])
def test_undo_leaves_no_hook(make: object) -> None:
    assert_undone_exactly(make, "free_latent_bits")  # type: ignore[arg-type]


def test_an_amount_out_of_bounds_is_refused() -> None:
    with live(_collapsing(0)) as run, pytest.raises(BadParameter, match="nats"):
        run.preview("free_latent_bits", nats=0.0)
