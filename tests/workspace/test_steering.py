from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradtracer.control import (
    Candidate,
    Done,
    FixRequest,
    InterventionReply,
    LiveStatus,
    PolicyRequest,
    Refusal,
    TrainingRequest,
)
from gradtracer.errors import (
    BadParameter,
    GradtracerError,
    RunNotLive,
    RunRefused,
    UnknownFix,
    UnknownIntervention,
    UnknownLayer,
)
from gradtracer.records import AutofixPolicy, InterventionState, PolicyMode, RunState, Stall
from gradtracer.workspace import Workspace
from tests.recorded_run import RecordedRun
from tests.scripted_process import RUNNING, ScriptedProcess, intervention


def live(home: Path, process: ScriptedProcess) -> Workspace:
    RecordedRun(home, state="running", address=process.address).write()
    return Workspace(home)


def test_a_live_run_is_flushed_before_it_is_read(tmp_path: Path) -> None:
    with ScriptedProcess() as process:
        status = live(tmp_path, process).get_run_status()
    assert (status.state, status.live, status.step) == (RunState.RUNNING, True, 120)
    assert [r.kind for r in process.requests] == ["status", "flush"]


def test_polling_for_events_does_not_disturb_the_training(tmp_path: Path) -> None:
    with ScriptedProcess() as process:
        page = live(tmp_path, process).events_after(None, 1, limit=1)
    assert ([e.id for e in page.events], page.cursor, page.more) == (["e2"], 2, True)
    assert process.requests == []


def test_a_paused_run_says_how_to_go_on(tmp_path: Path) -> None:
    with ScriptedProcess(status=RUNNING.model_copy(update={"paused": True})) as process:
        status = live(tmp_path, process).get_run_status()
    assert status.state is RunState.PAUSED
    assert "resume" in status.next_steps[0]


def test_a_hung_run_says_where_it_stands(tmp_path: Path) -> None:
    stall = Stall(seconds=60, usual_s=0.1, stack="train.py:12 all_reduce")
    hung = LiveStatus(step=3, paused=False, seconds_since_step=60, usual_step_s=0.1, stall=stall, pending=1)
    with ScriptedProcess(status=hung) as process:
        workspace = live(tmp_path, process)
        assert workspace.get_run_status().stall == stall
        assert workspace.list_runs().runs[0].state is RunState.HUNG


@pytest.mark.slow
def test_a_silent_process_is_hung_and_what_it_recorded_is_read(tmp_path: Path) -> None:
    with ScriptedProcess(status=None, flush=None) as process:
        status = live(tmp_path, process).get_run_status()
    assert (status.state, status.live, status.step) == (RunState.HUNG, False, 99)


def test_a_process_that_no_longer_listens_is_read_and_cannot_be_changed(tmp_path: Path) -> None:
    with ScriptedProcess() as process:
        workspace = live(tmp_path, process)
    assert workspace.get_run_status().step == 99
    with pytest.raises(RunNotLive, match="nobody listens"):
        workspace.control_training(action="pause")


def test_an_action_carries_who_asked_and_why(tmp_path: Path) -> None:
    with ScriptedProcess() as process:
        live(tmp_path, process)
        workspace = Workspace(tmp_path, requester="cli")
        done = workspace.control_training(action="rollback", snapshot="s3", reason="diverged")
    assert done == intervention()
    (request,) = process.requests
    assert request == TrainingRequest(action="rollback", snapshot="s3", requester="cli", reason="diverged")


def test_an_action_that_waits_for_the_step_boundary_is_pending(tmp_path: Path) -> None:
    pending = intervention(InterventionState.PENDING)
    with ScriptedProcess(revert=InterventionReply(intervention=pending)) as process:
        assert live(tmp_path, process).revert_intervention(None, "i1").state is InterventionState.PENDING


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("unknown_fix", UnknownFix),
        ("bad_parameter", BadParameter),
        ("unknown_intervention", UnknownIntervention),
        ("not_now", RunRefused),
        ("bad_token", RunRefused),
        ("bad_message", RunRefused),
    ],
)
def test_a_refusal_becomes_the_error_that_it_means(tmp_path: Path, code: str, error: type[GradtracerError]) -> None:
    refusal = Refusal.model_validate({"code": code, "message": "because of this"})
    with ScriptedProcess(training=refusal) as process, pytest.raises(error, match="because of this") as caught:
        live(tmp_path, process).control_training(action="checkpoint")
    assert type(caught.value) is error


def test_a_trial_carries_its_alternatives_and_its_length(tmp_path: Path) -> None:
    other = Candidate(fix="clip_grad_norm", parameters={"max_norm": 1.0}, rollback_first=True)
    with ScriptedProcess() as process:
        live(tmp_path, process).apply_autofix(
            fix="set_learning_rate",
            parameters={"learning_rate": 0.1},
            mode="trial",
            rollback_first=True,
            alternatives=[other],
            trial_steps=7,
            reason="which is better?",
        )
    assert process.requests == [
        FixRequest(
            fix="set_learning_rate",
            parameters={"learning_rate": 0.1},
            mode="trial",
            rollback_first=True,
            alternatives=(other,),
            trial_steps=7,
            requester="agent",
            reason="which is better?",
        )
    ]


@pytest.mark.parametrize("more", [{"alternatives": [Candidate(fix="clip_grad_norm")]}, {"trial_steps": 5}])
def test_what_only_a_trial_takes_is_refused_elsewhere(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(BadParameter, match="mode=trial only, not with apply"):
        Workspace(tmp_path).apply_autofix(fix="set_learning_rate", mode="apply", **more)


def test_a_fix_is_checked_by_the_run_so_that_its_refusal_is_in_the_record(tmp_path: Path) -> None:
    refusal = Refusal(code="unknown_fix", message="no fix 'set_learning_rat'; list_fixes shows them")
    with ScriptedProcess(fix=refusal) as process, pytest.raises(UnknownFix, match=r"set_learning_rat.*list_fixes"):
        live(tmp_path, process).apply_autofix(fix="set_learning_rat")
    assert [r.kind for r in process.requests] == ["fix"]


def test_a_policy_keeps_what_is_left_out(tmp_path: Path) -> None:
    now = AutofixPolicy(mode=PolicyMode.GUARDED, max_interventions=7, cooldown_steps=3)
    with ScriptedProcess(status=RUNNING.model_copy(update={"policy": now})) as process:
        workspace = live(tmp_path, process)
        assert workspace.get_run_status().policy == now
        workspace.set_autofix_policy(mode="safe", cooldown_steps=50, reason="carefully")
    wanted = AutofixPolicy(mode=PolicyMode.SAFE, max_interventions=7, cooldown_steps=50)
    assert process.requests[-1] == PolicyRequest(policy=wanted, seen=0, requester="agent", reason="carefully")


QUESTIONS: dict[str, Callable[[Workspace], object]] = {
    "get_run_status": lambda w: w.get_run_status(),
    "get_health_events": lambda w: w.get_health_events(),
    "get_metrics": lambda w: w.get_metrics(),
    "get_layer_stats": lambda w: w.get_layer_stats(),
    "explain_failure": lambda w: w.explain_failure(),
    "get_intervention": lambda w: w.get_intervention(None, "i1"),
    "get_report": lambda w: w.get_report(),
    "get_audit": lambda w: w.get_audit(),
    "dry_run": lambda w: w.apply_autofix(fix="rollback"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_was_last_read_of_a_run_is_sent_as_seen(tmp_path: Path, question: str) -> None:
    script = {
        "status": RUNNING.model_copy(update={"num_changes": 3}),
        "flush": Done(num_changes=3),
        "fix": InterventionReply(intervention=intervention(), num_changes=3),
    }
    with ScriptedProcess(**script) as process:
        workspace = live(tmp_path, process)
        workspace.control_training(action="pause")
        QUESTIONS[question](workspace)
        workspace.control_training(action="stop")
    acting = [r for r in process.requests if isinstance(r, TrainingRequest)]
    assert [r.seen for r in acting] == [None, 3]


def test_a_question_that_ends_in_an_error_has_shown_nothing(tmp_path: Path) -> None:
    with ScriptedProcess(flush=Done(num_changes=3)) as process:
        workspace = live(tmp_path, process)
        with pytest.raises(UnknownLayer):
            workspace.get_layer_stats(layers=["nonsense"])
        workspace.events_after(None, 0)
        workspace.list_runs()
        workspace.control_training(action="stop")
    assert isinstance(process.requests[-1], TrainingRequest)
    assert process.requests[-1].seen is None


def test_a_snapshot_goes_with_a_rollback_only(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="rollback only"):
        Workspace(tmp_path).control_training(action="pause", snapshot="s1")
