"""What is asked over the control channel happens between two steps, and can be taken back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gradtracer import FlowTracker, TrainingStopped
from gradtracer.control import (
    ControlClient,
    FixRequest,
    FlushRequest,
    InterventionReply,
    LiveStatus,
    Refusal,
    StatusRequest,
    TrainingRequest,
)
from gradtracer.home import read_manifest
from gradtracer.journal import Journal
from gradtracer.records import Intervention, InterventionState
from gradtracer.training.watch import MAX_STEPS
from tests.deadline import wait_until
from tests.training.models import Training, mlp
from tests.training.steering import ask, fix, refused, revert, train


@pytest.fixture
def training() -> Training:
    return mlp()


def _journal(tracker: FlowTracker) -> dict[str, Intervention]:
    assert isinstance(ControlClient(read_manifest(tracker.directory)).ask(FlushRequest()).kind, str)
    with Journal(tracker.directory) as journal:
        return {i.id: i for i in journal.interventions()}


def _request(action: str, **more: object) -> TrainingRequest:
    return TrainingRequest(action=action, requester="test", **more)  # type: ignore[arg-type]


def test_a_dry_run_shows_old_and_new_values_and_changes_nothing(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 3)
        shown = fix(training, tracker, "set_learning_rate", "dry_run", learning_rate=0.5)
        assert shown.state is InterventionState.PREVIEWED
        assert [(c.target, c.old, c.new) for c in shown.changes] == [("optimizers[0].param_groups[0].lr", 0.01, 0.5)]
        train(training, tracker, 1)
        assert training.optimizer.param_groups[0]["lr"] == 0.01
        assert tracker._capture._open.learning_rate != 0.5


def test_a_set_learning_rate_rules_every_update_until_it_is_reverted_and_the_scheduler_is_not_thrown_off() -> None:
    twin, training = mlp(), mlp()
    used: list[float] = []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 2)
        applied = fix(training, tracker, "set_learning_rate", learning_rate=0.002)
        assert applied.state is InterventionState.APPLIED
        training.optimizer.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
        for _ in range(3):
            train(training, tracker, 1)
            scheduler.step()
        assert used == [0.002] * 3
        assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**3)
        reply = revert(training, tracker, applied)
        assert isinstance(reply, InterventionReply)
        used.clear()
        train(training, tracker, 1)
        assert used == [pytest.approx(0.01 * 0.9**3)]
        states = {i.id: i.state for i in _journal(tracker).values()}
        assert states[applied.id] is InterventionState.REVERTED
    assert twin.optimizer.param_groups[0]["lr"] == 0.01
    with Journal(tracker.directory) as journal:
        rates = journal.steps().column("learning_rate")
    assert 0.002 in [pytest.approx(r) for r in rates.tolist()]


def test_clipping_bounds_what_the_optimizer_sees_and_the_record_keeps_the_norm_before(training: Training) -> None:
    seen: list[float] = []
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 2)
        fix(training, tracker, "clip_grad_norm", max_norm=1e-3)
        training.optimizer.register_step_pre_hook(
            lambda o, *_: seen.append(
                math.sqrt(sum(float(p.grad.square().sum()) for g in o.param_groups for p in g["params"]))
            )
        )
        train(training, tracker, 3)
    assert seen == [pytest.approx(1e-3, rel=1e-3)] * 3
    with Journal(tracker.directory) as journal:
        assert min(journal.steps().column("grad_norm").tolist()) > 0.05


def test_a_non_finite_update_is_left_out_whole_and_the_users_gradient_comes_back(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 2)
        fix(training, tracker, "skip_nonfinite_step")
        before = [p.detach().clone() for p in training.model.parameters()]
        momenta = [s["momentum_buffer"].clone() for s in training.optimizer.state.values()]
        training.optimizer.zero_grad()
        (training.loss() * math.nan).backward()
        training.optimizer.step()
        tracker.step()
        assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
        after = [s["momentum_buffer"] for s in training.optimizer.state.values()]
        assert all(torch.equal(a, b) for a, b in zip(momenta, after, strict=True))
        assert all(p.grad is not None and p.grad.isnan().all() for p in training.model.parameters())
        train(training, tracker, 1)
        assert not torch.equal(before[0], next(training.model.parameters()))


def test_what_a_fix_in_force_has_done_is_on_record(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 2)
        applied = fix(training, tracker, "skip_batch", num_updates=3)
        first = applied.applied_step
        assert first is not None
        train(training, tracker, 12)
        steps = ", ".join(str(first + k) for k in (1, 2, 3))
        assert _journal(tracker)[applied.id].report == f"left out the updates of steps {steps}"


def test_rollback_restores_the_snapshot_and_its_undo_the_state_before_it(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 5)
        saved = ask(training, tracker, _request("checkpoint"))
        assert isinstance(saved, InterventionReply)
        name = saved.intervention.snapshot
        assert name is not None
        assert Path(saved.intervention.outcome.rpartition(": ")[2]).is_file()
        state = torch.load(tracker.directory / "snapshots" / f"{name}.pt", weights_only=True)
        train(training, tracker, 5)
        training.optimizer.param_groups[0]["lr"] = 0.0  # what follows a boundary stays as the boundary left it
        rolled = fix(training, tracker, "rollback", snapshot=name)
        assert rolled.changes[0].new == int(name.removeprefix("step-"))
        assert training.optimizer.param_groups[0]["lr"] == 0.01
        assert state["step"] == rolled.changes[0].new
        reply = revert(training, tracker, rolled)
        assert isinstance(reply, InterventionReply)
        assert training.optimizer.param_groups[0]["lr"] == 0.0


@pytest.mark.slow
def test_rollback_without_a_name_takes_the_newest_healthy_snapshot_from_before_the_trouble() -> None:
    training = mlp(lr=0.05)
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 20)
        saved = ask(training, tracker, _request("checkpoint"))
        assert isinstance(saved, InterventionReply)
        train(training, tracker, 5)
        training.optimizer.zero_grad()
        (training.loss() * math.nan).backward()
        training.optimizer.step()
        tracker.step()
        assert math.isnan(training.loss().item())
        wait_until(lambda: any(e.kind == "non_finite" for e in tracker.events))
        request = _request("rollback")
        reply = ask(training, tracker, request)
        assert isinstance(reply, InterventionReply), reply
        assert math.isfinite(training.loss().item())
        refusal = ask(training, tracker, FixRequest(fix="rollback", mode="apply", requester="test"))
        assert isinstance(refusal, (InterventionReply, Refusal))


def test_a_fix_that_makes_the_loss_worse_is_taken_back_by_itself_with_the_weights_it_damaged() -> None:
    training = mlp(lr=0.05)
    with FlowTracker(training.model, training.optimizer) as tracker:
        losses = train(training, tracker, 300)
        applied = fix(training, tracker, "set_learning_rate", learning_rate=9.0)
        train(training, tracker, MAX_STEPS + 1)
        found = _journal(tracker)[applied.id]
        assert found.state is InterventionState.REVERTED
        assert "taken back by itself" in found.outcome
        assert training.loss().item() < 2 * max(losses[-20:])


@pytest.mark.slow
def test_a_fix_that_does_no_harm_is_kept_and_says_what_the_loss_did(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 100)
        applied = fix(training, tracker, "clip_grad_norm", max_norm=1.0)
        train(training, tracker, MAX_STEPS + 1)
        found = _journal(tracker)[applied.id]
        assert found.state is InterventionState.KEPT
        assert found.loss_before is not None
        assert found.loss_after is not None


def test_paused_training_waits_acts_and_resumes(training: Training) -> None:
    import threading

    with FlowTracker(training.model, training.optimizer) as tracker:
        client = ControlClient(read_manifest(tracker.directory))
        train(training, tracker, 2)
        replies: list[object] = []

        def agent() -> None:
            replies.append(client.ask(_request("pause"), 30.0))
            status = client.ask(StatusRequest())
            assert isinstance(status, LiveStatus)
            replies.append((status.paused, status.stall))
            again = client.ask(_request("pause"), 30.0)
            replies.append(again.kind)
            replies.append(client.ask(_request("checkpoint"), 30.0))
            replies.append(client.ask(_request("resume"), 30.0))

        thread = threading.Thread(target=agent)
        thread.start()
        while thread.is_alive():
            train(training, tracker, 1)
        assert replies[1] == (True, None)
        assert replies[2] == "refusal"
        assert [r.intervention.state.value for r in replies if isinstance(r, InterventionReply)] == [
            "applied",
            "kept",
            "kept",
        ]


def test_stop_ends_a_block_cleanly_and_the_program_goes_on_behind_it(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 2)
        ask(training, tracker, _request("stop"))
        pytest.fail("the training went on")
    manifest = read_manifest(tracker.directory)
    assert (manifest.state, manifest.error, manifest.address, manifest.token) == ("finished", None, None, "")
    assert "stopped" in list(_interventions(tracker).values())[-1].outcome
    assert any((tracker.directory / "snapshots").iterdir())


def _interventions(tracker: FlowTracker) -> dict[str, Intervention]:
    with Journal(tracker.directory) as journal:
        return {i.id: i for i in journal.interventions()}


@pytest.mark.slow
def test_stop_raises_a_system_exit_of_code_0_where_there_is_no_block(training: Training) -> None:
    tracker = FlowTracker(training.model, training.optimizer)
    with pytest.raises(TrainingStopped) as stopped:
        ask(training, tracker, _request("stop"))
    assert stopped.value.code == 0
    tracker.close()


@pytest.mark.parametrize(
    ("code", "parameters", "says"),
    [
        ("no_such_fix", {}, "list_fixes"),
        pytest.param("set_learning_rate", {}, "required", marks=pytest.mark.slow),
        pytest.param("set_learning_rate", {"learning_rate": -1.0}, "greater than 0", marks=pytest.mark.slow),
        pytest.param(
            "set_learning_rate", {"learning_rate": 1001.0}, "less than or equal to 1000", marks=pytest.mark.slow
        ),
        pytest.param("set_learning_rate", {"learning_rate": "fast"}, "valid number", marks=pytest.mark.slow),
        ("set_learning_rate", {"learning_rate": 0.1, "group": 3}, "group 3 does not exist"),
        pytest.param("set_learning_rate", {"learning_rate": 0.1, "speed": 1}, "speed", marks=pytest.mark.slow),
        ("rollback", {"snapshot": "step-99"}, "no snapshot 'step-99'"),
        pytest.param("clip_grad_norm", {"max_norm": 0}, "greater than 0", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(
    training: Training, code: str, parameters: dict[str, float], says: str
) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 2)
        before = [p.detach().clone() for p in training.model.parameters()]
        assert says in refused(training, tracker, code, **parameters).message
        assert len(before) == 6


@pytest.mark.slow
def test_a_fix_with_no_update_seen_yet_and_a_second_revert_are_refused(training: Training) -> None:
    with FlowTracker(training.model) as tracker:
        client = ControlClient(read_manifest(tracker.directory))
        tracker.step(1.0)
        reply = client.ask(FixRequest(fix="clip_grad_norm", mode="apply", parameters={"max_norm": 1.0}, requester="t",
                                      wait_s=0))  # fmt: skip
        assert isinstance(reply, InterventionReply)
        assert reply.intervention.state is InterventionState.PENDING
        tracker.step(1.0)
        assert _journal(tracker)[reply.intervention.id].state is InterventionState.REFUSED
        train(training, tracker, 1)
        applied = fix(training, tracker, "clip_grad_norm", max_norm=1.0)
        assert isinstance(revert(training, tracker, applied), InterventionReply)
        second = revert(training, tracker, applied)
        assert isinstance(second, Refusal)
        assert "reverted" in second.message


def test_a_fix_that_raises_fails_alone_and_training_goes_on(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from gradtracer.fixes.clip_grad_norm import ClipGradNorm

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ClipGradNorm, "apply", broken)
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 2)
        assert fix(training, tracker, "clip_grad_norm", max_norm=1.0).state is InterventionState.FAILED
        assert math.isfinite(train(training, tracker, 3)[-1])
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.slow
def test_a_hanging_step_is_reported_with_its_duration_and_the_place_where_it_hangs(training: Training) -> None:
    import threading

    release, statuses = threading.Event(), []
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 5)
        client = ControlClient(read_manifest(tracker.directory))

        def watch() -> None:
            try:
                wait_until(lambda: statuses.append(client.ask(StatusRequest())) or statuses[-1].stall is not None)
            finally:
                release.set()

        thread = threading.Thread(target=watch)
        thread.start()

        def a_data_loader_that_hangs() -> None:
            release.wait(30)

        a_data_loader_that_hangs()
        thread.join()
        train(training, tracker, 1)
    stall = statuses[-1].stall
    assert stall is not None
    assert stall.seconds >= 2.0
    assert "a_data_loader_that_hangs" in stall.stack


def test_a_tracker_that_breaks_under_a_fix_leaves_the_users_rate_behind(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 2)
        fix(training, tracker, "set_learning_rate", learning_rate=0.5)

        def broken(*_: object) -> None:
            raise RuntimeError("a bug of ours")

        monkeypatch.setattr(tracker._capture, "_after_guards", broken)
        train(training, tracker, 2)
        assert training.optimizer.param_groups[0]["lr"] == 0.01
    caplog.clear()
