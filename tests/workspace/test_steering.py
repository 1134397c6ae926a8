from __future__ import annotations

from pathlib import Path

import pytest

from gradtracer.control import InterventionReply, LiveStatus, Refusal, TrainingRequest
from gradtracer.errors import (
    BadParameter,
    GradtracerError,
    RunNotLive,
    RunRefused,
    UnknownFix,
    UnknownIntervention,
)
from gradtracer.records import InterventionState, RunState, Stall
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
        done = live(tmp_path, process).control_training(
            action="rollback", snapshot="s3", reason="diverged", requester="cli"
        )
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


def test_a_trial_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match=r"later version; use dry_run, then apply"):
        Workspace(tmp_path).apply_autofix(fix="set_learning_rate", mode="trial")


def test_an_unknown_fix_is_an_error_that_names_list_fixes(tmp_path: Path) -> None:
    with pytest.raises(UnknownFix, match=r"no fix 'set_learning_rat'.*list_fixes"):
        Workspace(tmp_path).apply_autofix(fix="set_learning_rat")


def test_a_snapshot_goes_with_a_rollback_only(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="rollback only"):
        Workspace(tmp_path).control_training(action="pause", snapshot="s1")
