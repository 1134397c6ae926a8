"""Whoever asks, together or one after the other, to the end or not: what became of it is defined and on record."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gradtracer import FlowTracker
from gradtracer.control import (
    Candidate,
    ControlClient,
    Envelope,
    FixRequest,
    InterventionReply,
    LiveStatus,
    PolicyRequest,
    Refusal,
    Reply,
    Request,
    RevertRequest,
    StatusRequest,
    TrainingRequest,
)
from gradtracer.fixes.clip_grad_norm import ClipGradNorm
from gradtracer.home import read_manifest
from gradtracer.records import AuditTrail, AutofixPolicy, Intervention, InterventionState, PolicyMode, UnixAddress
from gradtracer.training.watch import MAX_STEPS
from gradtracer.workspace import Workspace
from tests.deadline import wait_until
from tests.training.models import Training, mlp
from tests.training.steering import ask, fix, revert, train


@pytest.fixture
def training() -> Training:
    return mlp()


def client(tracker: FlowTracker) -> ControlClient:
    return ControlClient(read_manifest(tracker.directory))


def clip(requester: str = "one", **more: Any) -> FixRequest:
    values = {"fix": "clip_grad_norm", "mode": "apply", "parameters": {"max_norm": 1.0}, "requester": requester}
    return FixRequest.model_validate(values | more)


def trail(tracker: FlowTracker) -> AuditTrail:
    found = Workspace().get_audit(tracker.run_id)
    assert found.intact, found
    return found


def course(tracker: FlowTracker) -> list[tuple[str, str, str]]:
    return [(e.intervention.id, e.intervention.fix, e.intervention.state.value) for e in trail(tracker).entries]


def newest(tracker: FlowTracker, intervention_id: str) -> Intervention:
    return Workspace().get_intervention(tracker.run_id, intervention_id)


def status(tracker: FlowTracker) -> LiveStatus:
    found = client(tracker).ask(StatusRequest())
    assert isinstance(found, LiveStatus)
    return found


def done(reply: Reply) -> Intervention:
    assert isinstance(reply, InterventionReply), reply
    return reply.intervention


def refusal(reply: Reply) -> str:
    assert isinstance(reply, Refusal), reply
    return reply.message


# The audit trail


def test_all_that_is_asked_and_done_is_an_entry_in_order(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 3)
        fix(training, tracker, "clip_grad_norm", "dry_run", max_norm=1.0)
        applied = fix(training, tracker, "clip_grad_norm", max_norm=1.0)
        revert(training, tracker, applied)
        ask(training, tracker, TrainingRequest(action="checkpoint", requester="one"))
        refusal(ask(training, tracker, TrainingRequest(action="resume", requester="one")))
    assert course(tracker) == [
        ("i1", "clip_grad_norm", "pending"),
        ("i1", "clip_grad_norm", "previewed"),
        ("i2", "clip_grad_norm", "pending"),
        ("i2", "clip_grad_norm", "applied"),
        ("i3", "revert", "pending"),
        ("i2", "clip_grad_norm", "reverted"),
        ("i3", "revert", "kept"),
        ("i4", "training:checkpoint", "pending"),
        ("i4", "training:checkpoint", "kept"),
        ("i5", "training:resume", "pending"),
        ("i5", "training:resume", "refused"),
    ]
    entries = trail(tracker).entries
    head = read_manifest(tracker.directory).audit_head
    assert head is not None
    assert (head.num_entries, head.hash) == (len(entries), entries[-1].hash)
    assert [e.time_s for e in entries] == sorted(e.time_s for e in entries)


@pytest.mark.slow
def test_what_is_refused_before_it_could_wait_is_an_entry_too(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 3)
        asks: list[Request] = [
            clip(parameters={"max_norm": -1.0}),
            clip(fix="no_such_fix"),
            clip(mode="trial", alternatives=(Candidate(fix="no_such_fix"),)),
            clip(mode="trial", alternatives=(Candidate(fix="clip_grad_norm", parameters={"max_norm": -2.0}),)),
            RevertRequest(intervention_id="i99", requester="one"),
        ]
        messages = [refusal(client(tracker).ask(request)) for request in asks]
    refused = [e.intervention for e in trail(tracker).entries]
    assert [i.state for i in refused] == [InterventionState.REFUSED] * 5
    assert [i.outcome for i in refused] == messages
    assert [(i.id, i.fix) for i in refused] == [
        ("i1", "clip_grad_norm"),
        ("i2", "no_such_fix"),
        ("i3", "clip_grad_norm"),
        ("i4", "clip_grad_norm"),
        ("i5", "revert"),
    ]
    assert [(p.name, p.value) for p in refused[0].parameters] == [("max_norm", -1.0)]


@pytest.mark.slow
def test_what_the_watch_takes_back_by_itself_is_an_entry() -> None:
    training = mlp(lr=0.05)
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 300)
        fix(training, tracker, "set_learning_rate", learning_rate=9.0)
        train(training, tracker, MAX_STEPS + 1)
    assert course(tracker) == [("i1", "set_learning_rate", s) for s in ("pending", "applied", "reverted")]


# Agents that get lost


def half_a_conversation(tracker: FlowTracker, request: FixRequest) -> socket.socket:
    """A client that has asked and does not wait for the answer."""
    manifest = read_manifest(tracker.directory)
    assert isinstance(manifest.address, UnixAddress)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(manifest.address.path)
    connection.sendall(Envelope(token=manifest.token, request=request).model_dump_json().encode() + b"\n")
    return connection


unix = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets here")


@unix
@pytest.mark.parametrize(("max_norm", "ends"), [(1.0, InterventionState.APPLIED), (-1.0, InterventionState.REFUSED)])
def test_what_a_client_asked_before_it_went_away_is_done_or_refused(
    training: Training, max_norm: float, ends: InterventionState
) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 3)
        with half_a_conversation(tracker, clip(parameters={"max_norm": max_norm})):
            wait_until(lambda: status(tracker).pending == (ends is InterventionState.APPLIED))
            wait_until(lambda: course(tracker))
        train(training, tracker, 1)
        assert newest(tracker, "i1").state is ends


ASK_AND_WAIT = """
import sys
from pathlib import Path
from gradtracer.control import ControlClient, FixRequest
from gradtracer.home import read_manifest
request = FixRequest(fix="clip_grad_norm", mode="apply", parameters={"max_norm": 1.0}, requester="lost", wait_s=50)
ControlClient(read_manifest(Path(sys.argv[1]))).ask(request, 60)
"""


@pytest.mark.slow
def test_what_a_killed_agent_asked_is_done(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 3)
        agent = subprocess.Popen([sys.executable, "-c", ASK_AND_WAIT, tracker.directory], env=dict(os.environ))
        try:
            wait_until(lambda: status(tracker).pending == 1)
        finally:
            agent.kill()
            agent.wait()
        train(training, tracker, 1)
        found = newest(tracker, "i1")
        assert (found.state, found.requester) == (InterventionState.APPLIED, "lost")
        assert status(tracker).pending == 0


@pytest.mark.slow
def test_what_waits_when_the_run_ends_is_refused(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 1)
        assert done(client(tracker).ask(clip(wait_s=0))).state is InterventionState.PENDING
    assert course(tracker)[-1] == ("i1", "clip_grad_norm", "refused")
    assert "the training ended" in newest(tracker, "i1").outcome


@pytest.mark.slow
def test_what_waits_when_the_tracker_breaks_is_refused_and_so_is_what_comes_after(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 2)

        def broken(*_: object) -> None:
            raise RuntimeError("a bug of ours")

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client(tracker).ask, clip(), 30.0)
            wait_until(lambda: status(tracker).pending == 1)
            monkeypatch.setattr(tracker._capture, "mark_step", broken)
            train(training, tracker, 2)
            assert "error of its own" in refusal(waiting.result())
        assert (status(tracker).pending, status(tracker).stall) == (0, None)
        assert "error of its own" in refusal(client(tracker).ask(clip()))
        assert [s for _, _, s in course(tracker)] == ["pending", "refused", "refused"]
    caplog.clear()


def test_a_fix_that_is_cut_short_from_the_keyboard_has_failed(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ClipGradNorm, "apply", interrupted)
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 2)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client(tracker).ask, clip(), 30.0)
            wait_until(lambda: status(tracker).pending == 1)
            with pytest.raises(KeyboardInterrupt):
                train(training, tracker, 1)
            assert "KeyboardInterrupt" in refusal(waiting.result())
    assert course(tracker)[-1] == ("i1", "clip_grad_norm", "failed")


# Two agents


def test_the_second_of_two_whose_view_is_old_is_refused_until_it_has_looked(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 3)
        assert status(tracker).num_changes == 0
        first = done(ask(training, tracker, clip("one", seen=0)))
        message = refusal(ask(training, tracker, clip("two", seen=0)))
        step = first.applied_step
        assert f"i1 clip_grad_norm(max_norm=1.0) by one, at step {step}" in message
        assert "get_run_status" in message
        assert course(tracker)[-1][2] == "refused"
        assert status(tracker).num_changes == 1
        assert done(ask(training, tracker, clip("two", seen=1))).state is InterventionState.APPLIED
        assert status(tracker).num_changes == 2


@pytest.mark.slow
def test_of_two_that_wait_for_the_same_boundary_only_the_first_is_done(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 3)
        for requester in ("one", "two"):
            assert done(client(tracker).ask(clip(requester, seen=0, wait_s=0))).state is InterventionState.PENDING
        train(training, tracker, 1)
        assert newest(tracker, "i1").state is InterventionState.APPLIED
        second = newest(tracker, "i2")
        assert second.state is InterventionState.REFUSED
        assert "by one, at step" in second.outcome


@pytest.mark.slow
def test_who_made_the_changes_or_never_looked_or_does_not_act_on_a_view_is_not_refused(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 3)
        mine = done(ask(training, tracker, clip("one", seen=0)))
        done(ask(training, tracker, clip("one", seen=0)))
        done(ask(training, tracker, clip("two", seen=0, mode="dry_run")))
        done(ask(training, tracker, TrainingRequest(action="checkpoint", requester="two", seen=0)))
        stale: list[Request] = [
            RevertRequest(intervention_id=mine.id, requester="two", seen=0),
            TrainingRequest(action="rollback", requester="two", seen=0),
            TrainingRequest(action="stop", requester="two", seen=1),
            PolicyRequest(policy=AutofixPolicy(), requester="two", seen=1),
        ]
        for request in stale:
            assert "has changed since you last looked" in refusal(ask(training, tracker, request))
        done(ask(training, tracker, RevertRequest(intervention_id=mine.id, requester="two")))
        message = refusal(ask(training, tracker, clip("one", seen=2)))
        assert "revert(intervention_id=i1) by two" in message
        assert "clip_grad_norm" not in message


@pytest.mark.slow
def test_what_the_run_took_back_by_itself_must_be_seen_by_the_one_who_asked_for_it() -> None:
    training = mlp(lr=0.05)
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 300)
        applied = fix(training, tracker, "set_learning_rate", learning_rate=9.0)
        seen = status(tracker).num_changes
        train(training, tracker, MAX_STEPS + 1)
        message = refusal(ask(training, tracker, clip(applied.requester, seen=seen)))
        assert f"{applied.id} set_learning_rate was taken back by itself at step" in message


@pytest.mark.slow
def test_a_long_list_of_changes_is_cut_to_the_newest(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 3)
        for _ in range(7):
            done(ask(training, tracker, clip("one")))
        message = refusal(client(tracker).ask(clip("two", seen=0)))
        assert "and 2 more before" in message
        assert message.count("clip_grad_norm") == 5


@pytest.mark.slow
def test_two_workspaces_see_what_they_read(training: Training) -> None:
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 3)
        one, two = Workspace(requester="one"), Workspace(requester="two")
        outcome: list[object] = []

        def agents() -> None:
            for workspace in (one, two):
                workspace.get_run_status()
            outcome.append(one.apply_autofix(fix="clip_grad_norm", parameters={"max_norm": 1.0}, mode="apply"))
            try:
                two.apply_autofix(fix="clip_grad_norm", parameters={"max_norm": 2.0}, mode="apply")
            except Exception as error:
                outcome.append(error)
            two.explain_failure()
            outcome.append(two.apply_autofix(fix="clip_grad_norm", parameters={"max_norm": 2.0}, mode="apply"))

        thread = threading.Thread(target=agents)
        thread.start()
        while thread.is_alive():
            train(training, tracker, 1)
        first, refused, second = outcome
        assert isinstance(first, Intervention)
        assert isinstance(second, Intervention)
        assert (first.requester, second.requester) == ("one", "two")
        assert "i1 clip_grad_norm(max_norm=1.0) by one" in str(refused)


# The policy


@pytest.mark.slow
def test_a_policy_takes_effect_at_the_boundary_and_says_what_it_changed(training: Training) -> None:
    wanted = AutofixPolicy(mode=PolicyMode.GUARDED, cooldown_steps=7)
    with FlowTracker(training.model, training.optimizer) as tracker:
        train(training, tracker, 2)
        assert status(tracker).policy == AutofixPolicy()
        found = done(ask(training, tracker, PolicyRequest(policy=wanted, requester="one", reason="overnight")))
        assert (found.fix, found.state) == ("policy", InterventionState.KEPT)
        assert [(c.target, c.old, c.new) for c in found.changes] == [
            ("policy.mode", "off", "guarded"),
            ("policy.cooldown_steps", 20, 7),
        ]
        assert status(tracker).policy == wanted
        assert status(tracker).num_changes >= 1  # what it then does by itself counts too
        assert tracker._controller.policy == wanted
        assert Workspace().get_run_status(tracker.run_id).policy == wanted
    assert Workspace().get_run_status(tracker.run_id).policy is None
