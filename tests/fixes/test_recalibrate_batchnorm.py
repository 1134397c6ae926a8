"""Running statistics are those of the batches again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradtracer.errors import BadParameter
from tests.fixes.training import Program, assert_harmless, assert_undone_exactly, classification, healthy, live, program


def _network(seed: int, momentum: float = 0.1) -> Program:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24, momentum=momentum), nn.ReLU(), nn.Linear(24, 4))
    with torch.no_grad():
        model[0].weight.mul_(5)
        model[0].bias.add_(3)
    return program(model, torch.optim.SGD(model.parameters(), 0.05), classification(model, seed))


def _lagging(seed: int) -> Program:
    return _network(seed, momentum=1e-4)


def _gap(made: Program) -> float:
    """Between the outputs of training and of evaluation, relative to their size."""
    x = torch.randn(1000, 12, generator=torch.Generator().manual_seed(5))
    norm = made.model[1]  # type: ignore[index]
    buffers = {n: b.clone() for n, b in norm.named_buffers()}
    with torch.no_grad():
        trained = made.model(x)
        for name, buffer in norm.named_buffers():
            buffer.copy_(buffers[name])
        made.model.eval()
        evaluated = made.model(x)
        made.model.train()
    return float((trained - evaluated).norm() / trained.norm())


@pytest.mark.parametrize("seed", range(3))
def test_evaluation_agrees_with_training_again(seed: int) -> None:
    made = _lagging(seed)
    with live(made) as run:
        run.train(60)
        lagging = _gap(made)
        run.apply("recalibrate_batchnorm", momentum=0.1)
        assert _gap(made) < 0.3 * lagging
        run.train(60)
        assert _gap(made) < 0.3 * lagging


def test_statistics_are_the_means_over_batches_in_float64() -> None:
    made = _lagging(0)
    norm = made.model[1]  # type: ignore[index]
    with live(made) as run:
        run.train(3)
        state = torch.get_rng_state()
        inputs: list[torch.Tensor] = []
        handle = norm.register_forward_pre_hook(lambda m, i: inputs.append(i[0].detach().double()))
        assert made.replay is not None
        with torch.no_grad():
            kept = {n: b.clone() for n, b in norm.named_buffers()}
            for i in range(16):
                made.replay(i)
            for name, buffer in norm.named_buffers():
                buffer.copy_(kept[name])
        handle.remove()
        torch.set_rng_state(state)
        run.apply("recalibrate_batchnorm")
    torch.testing.assert_close(
        norm.running_mean.double(), torch.stack([x.mean(dim=0) for x in inputs]).mean(dim=0), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        norm.running_var.double(), torch.stack([x.var(dim=0) for x in inputs]).mean(dim=0), rtol=1e-5, atol=1e-5
    )
    assert norm.momentum == 1e-4


def test_training_goes_on_bit_for_bit() -> None:
    losses = []
    for treated in (False, True):
        with live(_network(0)) as run:
            run.train(5)
            if treated:
                run.apply("recalibrate_batchnorm", momentum=0.3)
            losses.append(run.train(10))
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_healthy_run_is_not_hurt() -> None:
    assert_harmless(_network, "recalibrate_batchnorm", momentum=0.1)


def test_undo_puts_statistics_and_momentum_back() -> None:
    assert_undone_exactly(_lagging, "recalibrate_batchnorm", momentum=0.2)


def test_a_model_without_running_statistics_is_refused() -> None:
    with live(healthy(0)) as run, pytest.raises(BadParameter, match="no batch normalisation"):
        run.preview("recalibrate_batchnorm")
    with live(_network(0)) as run, pytest.raises(BadParameter, match="momentum"):
        run.preview("recalibrate_batchnorm", momentum=0.9)
