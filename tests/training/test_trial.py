"""A fix tried on a fork: what each branch came to, and a live run that is as if nothing had been tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradtracer import FlowTracker
from gradtracer.control import Candidate, FixRequest, InterventionReply, Refusal
from gradtracer.records import Intervention, InterventionState
from tests.families import family
from tests.training.models import MODELS, Training, mlp
from tests.training.steering import ask, train


def _try(training: Training, tracker: FlowTracker, fix: str, *others: Candidate, **more: Any) -> Intervention:
    steps = more.pop("trial_steps", 20)
    request = FixRequest(
        fix=fix, mode="trial", parameters=more, alternatives=others, trial_steps=steps, requester="test"
    )
    reply = ask(training, tracker, request)
    assert isinstance(reply, InterventionReply), reply
    return reply.intervention


@pytest.mark.parametrize("name", family(MODELS, "mlp"))
def test_a_run_goes_on_bit_for_bit_as_if_nothing_had_been_tried(name: str) -> None:
    twin = MODELS[name]()
    plain = twin.run(60)
    training = MODELS[name]()
    with FlowTracker(training.model, training.optimizer) as tracker:
        losses = train(training, tracker, 20)
        steps_before = tracker._capture.last_step
        tried = _try(training, tracker, "set_learning_rate", learning_rate=5.0)
        assert tried.state is InterventionState.TRIED, tried
        passed = tracker._capture.last_step - steps_before
        losses += [float("nan")] * passed + train(training, tracker, 60 - 20 - passed)
    assert [b for a, b in zip(losses, plain, strict=True) if a == a] == [a for a in losses if a == a]
    assert all(
        torch.equal(a, b)
        for a, b in zip(training.model.state_dict().values(), twin.model.state_dict().values(), strict=True)
    )


def test_candidates_are_ranked_and_the_control_is_what_the_run_does_by_itself() -> None:
    training = mlp(lr=1e-4)
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 10)
        tried = _try(
            training,
            tracker,
            "set_learning_rate",
            Candidate(fix="set_learning_rate", parameters={"learning_rate": 0.01}),
            Candidate(fix="clip_grad_norm", parameters={"max_norm": 1e3}),
            learning_rate=10.0,
        )
    result = tried.trial
    assert result is not None
    assert result.branches[0].fix == "control"
    assert [(b.fix, b.parameters[-1].value, b.verdict) for b in result.branches[1:]] == [
        ("set_learning_rate", 0.01, "better"),
        ("clip_grad_norm", 1e3, "no_difference"),
        ("set_learning_rate", 10.0, "worse"),
    ]
    for branch in result.branches:
        assert len(branch.losses) == len(branch.grad_norms) == result.num_steps == 20
    # A bound far above the norm changes nothing: the branch is the control.
    assert result.branches[2].losses == result.branches[0].losses
    assert result.branches[2].difference == 0.0
    assert "set_learning_rate helps" in result.conclusion


def test_the_control_of_a_replayed_trial_is_an_untracked_twin_on_the_same_batches() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        x = torch.randn(8, 32, 6)
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), x, (x[..., 0] > 0).long()

    twin, optimizer, x, y = build()
    for i in range(5):
        optimizer.zero_grad()
        F.cross_entropy(twin(x[i]), y[i]).backward()
        optimizer.step()
    expected = []
    for i in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(twin(x[i % 8]), y[i % 8])
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    model, live, x, y = build()
    with FlowTracker(model, live, replay=lambda i: F.cross_entropy(model(x[i % 8]), y[i % 8])) as tracker:
        batch = iter(range(1000))
        training = Training(model, live, lambda: F.cross_entropy(model(x[(i := next(batch)) % 8]), y[i % 8]))
        train(training, tracker, 4)
        # The boundary of the step that takes the request is the fifth.
        submission = tracker._controller.submit(
            FixRequest(fix="set_learning_rate", mode="trial", parameters={"learning_rate": 0.5}, trial_steps=12,
                       requester="test")
        )  # fmt: skip
        train(training, tracker, 1)
        reply = submission.future.result(0)
        assert isinstance(reply, InterventionReply)
        assert reply.intervention.trial is not None
        assert list(reply.intervention.trial.branches[0].losses) == pytest.approx(expected, rel=1e-6)


def test_without_batches_that_can_be_run_again_a_trial_says_what_to_pass() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x = torch.randn(16, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with FlowTracker(model, optimizer) as tracker:
        submission = tracker._controller.submit(
            FixRequest(fix="set_learning_rate", mode="trial", parameters={"learning_rate": 0.5}, requester="test")
        )
        for _ in range(4):
            optimizer.step(closure)
            tracker.step()
        with pytest.raises(ValueError, match=r"closure.*replay="):
            submission.future.result(0)


def test_a_trial_that_would_hold_the_training_too_long_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtracer.training.trial.MAX_TRIAL_S", 0.0)
    training = mlp()
    with FlowTracker(training.model, training.optimizer) as tracker:
        reply = ask(
            training,
            tracker,
            FixRequest(fix="set_learning_rate", mode="trial", parameters={"learning_rate": 0.5}, requester="test"),
        )
    assert isinstance(reply, Refusal)
    assert "Ask for at most 1 steps" in reply.message


@pytest.mark.slow
def test_a_trial_too_large_for_memory_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import psutil

    class _Full:
        available = 1024

    monkeypatch.setattr(psutil, "virtual_memory", _Full)
    training = mlp()
    with FlowTracker(training.model, training.optimizer) as tracker:
        reply = ask(
            training,
            tracker,
            FixRequest(fix="set_learning_rate", mode="trial", parameters={"learning_rate": 0.5}, requester="test"),
        )
    assert isinstance(reply, Refusal)
    assert "GiB" in reply.message


def test_a_fix_that_breaks_costs_its_branch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradtracer.fixes.clip_grad_norm import ClipGradNorm

    def breaks(*args: object) -> object:
        raise RuntimeError("this fix is broken")

    monkeypatch.setattr(ClipGradNorm, "apply", breaks)
    training = mlp(lr=1e-4)
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 10)
        better = Candidate(fix="set_learning_rate", parameters={"learning_rate": 0.01})
        tried = _try(training, tracker, "clip_grad_norm", better, max_norm=1.0)
    assert tried.trial is not None
    assert [(b.fix, b.verdict) for b in tried.trial.branches] == [
        ("control", "control"),
        ("set_learning_rate", "better"),
        ("clip_grad_norm", "failed"),
    ]
    assert "this fix is broken" in tried.trial.branches[2].note
