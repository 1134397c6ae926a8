"""The operation that made a NaN is named, with its step, and the healthy twin of each training is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer import FlowTracker
from tests.families import family

torch.set_num_threads(1)

BAD_STEP = 13
Loss = Callable[[nn.Module, Tensor, bool], Tensor]


class Attention(nn.Module):
    """Attention by hand, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(5, 3)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / math.sqrt(8)
        weights = scores.masked_fill(padded[:, None, :], -math.inf).softmax(-1)
        return (weights @ self.value(x)).mean(1)


class SafeRoot(nn.Module):
    """A root that is 0 at 0, by a selection."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x))


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.root = nn.Linear(5, 3), SafeRoot()

    def forward(self, x: Tensor, bad: bool) -> Tensor:
        z = self.body(x)
        return self.root((z - (z.detach() if bad else 0)).square().sum(1))


def masked_mean(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    mask = torch.ones(16, 3)
    if bad:
        mask[4] = 0
    return ((model(x) * mask).sum(1) / mask.sum(1)).square().mean()


def selected_mean(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    return model(x)[torch.full((16,), not bad)].square().mean()


def ignored_labels(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    labels = torch.full((16,), -100) if bad else torch.arange(16) % 3
    return F.cross_entropy(model(x), labels)


def percentage_error(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    target = torch.rand(16, 3) + 0.5
    if bad:
        target[0, 0] = 0
    return ((model(x) - target).abs() / target).mean()


def dice(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    share, target = torch.sigmoid(model(x)), torch.ones(16, 3)
    if bad:
        share, target = share * 0, target * 0
    return 1 - 2 * (share * target).sum() / (share.sum() + target.sum())


def entropy(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    share = torch.softmax(model(x) * (1e4 if bad else 1), 1)
    return (share * torch.log(share)).sum(1).mean()


def power(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    size = model(x).abs()
    return ((size * torch.tensor([0.0, 1.0, 1.0]) if bad else size) ** 0.7).mean()


def root(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    z = model(x)
    return torch.sqrt((z - (z.detach() if bad else 0)).square().sum(1)).mean()


def clamped_exponential(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    return torch.clamp(torch.exp(model(x) * (1e4 if bad else 1)), max=10).mean()


def hidden_root(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    return model(x, bad).mean()


def attention(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    padded = torch.zeros(4, 4, dtype=torch.bool)
    if bad:
        padded[2] = True
    return model(x[:, :1].reshape(4, 4, 1).expand(4, 4, 5), padded).square().mean()


def variance(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    mean, log_variance = model(x)[:, :2].unbind(1)
    log_variance = log_variance - 100 if bad else log_variance
    return (0.5 * log_variance + 0.5 * torch.exp(-log_variance) * (mean - x[:, 0]) ** 2).mean()


def ctc(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    scores = model(x).reshape(8, 2, 3).log_softmax(2)
    lengths = torch.tensor([8, 1 if bad else 8])
    return F.ctc_loss(scores, torch.tensor([[1, 2], [2, 1]]), lengths, torch.tensor([2, 2]))


def target(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    wanted = torch.rand(16, 3)
    if bad:
        wanted[1, 1] = math.nan
    return (model(x) - wanted).abs().mean()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))


CASES: dict[str, tuple[str, str | None, Callable[[], nn.Module], Loss]] = {
    case[3].__name__: case
    for case in (
        ("empty_mean", None, mlp, masked_mean),
        ("empty_mean", None, mlp, selected_mean),
        ("empty_mean", None, mlp, ignored_labels),
        ("division_by_zero", None, mlp, percentage_error),
        ("division_by_zero", None, mlp, dice),
        ("log_of_zero", None, mlp, entropy),
        ("nan_gradient_pow", None, mlp, power),
        ("nan_gradient_sqrt", None, mlp, root),
        ("nan_gradient_where", None, mlp, clamped_exponential),
        ("nan_gradient_where", "root", Distances, hidden_root),
        ("attention_fully_masked", "query", Attention, attention),
        ("unbounded_variance", None, mlp, variance),
        ("ctc_infinite", None, mlp, ctc),
        ("nan_in_data", "0", mlp, target),
    )
}


def _train(
    build: Callable[[], nn.Module], loss_of: Loss, bad_step: int, *, as_on_a_device: bool = False
) -> FlowTracker:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with FlowTracker(model, optimizer, serve=False) as tracker:
        if as_on_a_device:  # no accelerator here: the same path with tensors of the CPU
            tracker._capture._on_device = tracker._capture._held_inputs.everything = True
        for step in range(24):
            optimizer.zero_grad()
            loss = loss_of(model, torch.randn(16, 5), step == bad_step)
            loss.backward()
            optimizer.step()
            tracker.step(loss=loss.item())
    assert not tracker.broken_reason
    return tracker


@pytest.mark.parametrize("name", family(CASES, "masked_mean", "power", "target"))
def test_the_operation_that_made_the_first_nan_is_named(name: str) -> None:
    code, layer, build, loss_of = CASES[name]
    first = _train(build, loss_of, BAD_STEP).explain_failure()[0]
    assert (first.code, first.layer, first.onset_step) == (code, layer, BAD_STEP)
    assert first.probability > 0.6
    assert first.advice


@pytest.mark.parametrize("name", family(CASES, "power"))
def test_on_a_device_it_is_named_once_the_user_has_read_the_loss(name: str) -> None:
    code, layer, build, loss_of = CASES[name]
    first = _train(build, loss_of, BAD_STEP, as_on_a_device=True).explain_failure()[0]
    assert (first.code, first.layer, first.onset_step) == (code, layer, BAD_STEP)
    assert first.advice


@pytest.mark.parametrize("name", family(CASES, "masked_mean", "power"))
def test_the_same_training_without_the_bad_step_is_left_alone(name: str) -> None:
    *_, build, loss_of = CASES[name]
    tracker = _train(build, loss_of, -1)
    assert [e for e in tracker.events if e.severity.value != "info"] == []
    assert tracker.explain_failure()[0].code == "healthy"


def test_a_safe_use_of_the_same_operations_makes_no_nan_and_no_noise() -> None:
    def safe(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
        z = model(x)
        distance = (z - z.detach()).square().sum(1)
        positive = torch.where(distance > 0, distance, torch.ones_like(distance))
        return torch.where(distance > 0, torch.sqrt(positive), torch.zeros_like(distance)).mean() + z.square().mean()

    assert _train(mlp, safe, BAD_STEP).events == []


def test_the_users_line_that_computes_the_loss_is_given() -> None:
    source = _train(mlp, entropy, BAD_STEP).explain_failure()[0].source
    assert source is not None
    assert source.file == __file__
    assert source.what == "loss = loss_of(model, torch.randn(16, 5), step == bad_step)"
