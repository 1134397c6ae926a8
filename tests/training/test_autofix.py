"""A run with a policy mends itself, tells why, and leaves healthy training as it is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradtracer import FlowTracker
from gradtracer.journal import Journal
from gradtracer.records import AutofixPolicy, Intervention, InterventionState, PolicyMode
from tests.families import family
from tests.training.models import MODELS, Training


def _interventions(tracker: FlowTracker) -> list[Intervention]:
    tracker.close()
    with Journal(tracker.directory) as journal:
        return journal.interventions()


def _regression(lr: float, seed: int = 0) -> Training:
    """Learnable, with momentum; a rate of 0.05 suits it and one of 3 makes it diverge."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr)
    weights = torch.randn(16, 1)

    def loss() -> torch.Tensor:
        x = torch.randn(64, 16)
        return F.mse_loss(model(x), torch.tanh(x @ weights))

    return Training(model, optimizer, loss)


def _train(training: Training, steps: int, policy: str | AutofixPolicy) -> tuple[list[float], list[Intervention]]:
    tracker = FlowTracker(training.model, training.optimizer, autofix=policy)  # type: ignore[arg-type]
    losses = training.run(steps, lambda loss: tracker.step(loss.item()))
    return losses, _interventions(tracker)


@pytest.mark.slow
def test_a_run_that_diverges_is_brought_back_by_its_policy() -> None:
    alone = _regression(3.0).run(300)
    losses, done = _train(_regression(3.0), 300, "guarded")
    healthy = _regression(0.05).run(300)
    assert not sum(alone[-20:]) / 20 < 10 * sum(healthy[-20:]) / 20
    assert sum(losses[-20:]) / 20 < 3 * sum(healthy[-20:]) / 20
    applied = [i for i in done if i.mode == "apply" and i.fix != "skip_nonfinite_step"]
    assert applied
    assert all(i.requester == "policy" and i.reason for i in done)


@pytest.mark.parametrize("name", family(MODELS, "mlp"))
@pytest.mark.parametrize("policy", family(["off", "safe", "guarded"], "guarded"))
def test_a_healthy_run_is_bit_for_bit_what_it_is_without_a_policy(name: str, policy: str) -> None:
    plain = MODELS[name]().run(40)
    losses, done = _train(MODELS[name](), 40, policy)
    assert losses == plain
    assert [i.fix for i in done] == ([] if policy == "off" else ["skip_nonfinite_step"])


def test_a_bad_batch_does_not_reach_the_weights_of_a_run_with_the_safe_policy() -> None:
    training = _regression(0.05)
    clean, count = training.loss, iter(range(1000))
    training.loss = lambda: clean() * (math.nan if next(count) == 30 else 1.0)
    losses, done = _train(training, 60, "safe")
    assert math.isnan(losses[30])
    assert math.isfinite(losses[-1])
    assert losses[-1] < losses[0]
    assert {i.fix for i in done} == {"skip_nonfinite_step"}


@pytest.mark.slow
def test_a_policy_keeps_to_its_budget() -> None:
    policy = AutofixPolicy(mode=PolicyMode.GUARDED, max_interventions=0)
    _, done = _train(_regression(3.0), 150, policy)
    assert {i.fix for i in done if i.state is not InterventionState.REFUSED} == {"skip_nonfinite_step"}


@pytest.mark.slow
def test_the_safe_policy_does_nothing_that_needs_to_be_watched() -> None:
    _, done = _train(_regression(3.0), 150, "safe")
    assert {i.fix for i in done} == {"skip_nonfinite_step"}


def test_an_unknown_policy_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="off, safe, guarded"):
        FlowTracker(nn.Linear(2, 1), autofix="bold", home=tmp_path)  # type: ignore[arg-type]
