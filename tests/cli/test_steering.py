"""The commands that change a live run, and the audit of what was done."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gradtracer.cli import app
from gradtracer.control import Candidate, FixRequest, InterventionReply, PolicyRequest, Refusal, RevertRequest
from gradtracer.journal import JOURNAL_NAME
from gradtracer.records import (
    AuditTrail,
    AutofixPolicy,
    FixList,
    Intervention,
    InterventionState,
    PolicyMode,
    TrialBranch,
    TrialResult,
)
from tests.recorded_run import RecordedRun
from tests.scripted_process import RUNNING, ScriptedProcess, intervention

TRIED = intervention().model_copy(
    update={
        "mode": "trial",
        "state": InterventionState.TRIED,
        "outcome": "clip_grad_norm is better. The run itself was not changed.",
        "trial": TrialResult(
            num_steps=3,
            num_batches=3,
            seconds=0.5,
            branches=(
                TrialBranch(fix="control", losses=(1.0, 2.0, 4.0), final_loss=8.0, verdict="control"),
                TrialBranch(
                    fix="clip_grad_norm",
                    losses=(1.0, 0.5, 0.1),
                    final_loss=0.1,
                    difference=-7.9,
                    standard_error=0.1,
                    verdict="better",
                ),
            ),
            conclusion="clip_grad_norm is better.",
        ),
    }
)


def gradtracer(home: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments), "--home", str(home)])


def live(home: Path, process: ScriptedProcess) -> str:
    return RecordedRun(home, state="running", address=process.address).write()[0]


def test_fixes_are_listed_with_their_parameters(tmp_path: Path) -> None:
    result = gradtracer(tmp_path, "fixes")
    assert result.exit_code == 0
    assert "learning_rate, [group]" in result.stdout
    assert FixList.model_validate_json(gradtracer(tmp_path, "fixes", "--json").stdout).fixes


def test_a_fix_is_a_dry_run_by_default_and_its_parameters_are_typed(tmp_path: Path) -> None:
    settings = ["a=1", "b=0.5", "c=true", "d=null", "e=step-12", "f=1e999", "g=[1]", "h=x=y", "i=NaN"]
    with ScriptedProcess() as process:
        run_id = live(tmp_path, process)
        result = gradtracer(tmp_path, "fix", run_id, "clip_grad_norm", *(x for s in settings for x in ("--set", s)))
    assert result.exit_code == 0, result.output
    assert "i7  clip_grad_norm()" in result.stdout
    assert "previewed" in result.stdout
    expected = {
        "a": 1,
        "b": 0.5,
        "c": True,
        "d": None,
        "e": "step-12",
        "f": "1e999",
        "g": "[1]",
        "h": "x=y",
        "i": "NaN",
    }
    assert process.requests == [
        FixRequest(fix="clip_grad_norm", mode="dry_run", parameters=expected, requester="cli")  # type: ignore[arg-type]
    ]


def test_a_trial_shows_its_branches_on_one_scale(tmp_path: Path) -> None:
    with ScriptedProcess(fix=InterventionReply(intervention=TRIED)) as process:
        run_id = live(tmp_path, process)
        arguments = ["--mode", "trial", "--trial-steps", 3, "--or", "set_learning_rate learning_rate=0.1 group=0"]
        result = gradtracer(tmp_path, "fix", run_id, "clip_grad_norm", *arguments, "--rollback-first")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["control", "control", "8", "–", "▂▄█"] in lines
    assert ["clip_grad_norm()", "better", "0.1", "-7.9", "±", "0.1", "▂▁▁"] in lines
    assert "clip_grad_norm is better." in result.stdout
    (request,) = process.requests
    assert isinstance(request, FixRequest)
    other = Candidate(fix="set_learning_rate", parameters={"learning_rate": 0.1, "group": 0})
    assert (request.alternatives, request.trial_steps, request.rollback_first) == ((other,), 3, True)


def test_what_is_pending_is_waited_for(tmp_path: Path) -> None:
    pending = intervention(InterventionState.PENDING).model_copy(update={"id": "i1"})
    with ScriptedProcess() as process:
        run_id = live(tmp_path, process)
        process.script["fix"] = InterventionReply(intervention=pending.model_copy(update={"run_id": run_id}))
        result = gradtracer(tmp_path, "fix", run_id, "clip_grad_norm", "--mode", "apply", "--json")
    assert "i1 waits for the run" in result.stderr
    assert Intervention.model_validate_json(result.stdout).state is InterventionState.KEPT


def test_a_refusal_is_a_line_and_exit_code_1(tmp_path: Path) -> None:
    refusal = Refusal(code="not_now", message="the run has changed since you last looked: call get_run_status")
    with ScriptedProcess(revert=refusal) as process:
        result = gradtracer(tmp_path, "revert", live(tmp_path, process), "i3", "--reason", "no use")
    assert result.exit_code == 1
    assert result.stderr.startswith("gradtracer: run ")
    assert "call gradtracer status" in result.stderr
    assert process.requests == [RevertRequest(intervention_id="i3", requester="cli", reason="no use")]


def test_a_policy_is_set_and_status_shows_it(tmp_path: Path) -> None:
    now = AutofixPolicy(mode=PolicyMode.SAFE, max_per_fix=9)
    with ScriptedProcess(status=RUNNING.model_copy(update={"policy": now})) as process:
        run_id = live(tmp_path, process)
        shown = gradtracer(tmp_path, "status", run_id).stdout
        result = gradtracer(tmp_path, "policy", run_id, "guarded", "--cooldown-steps", 50)
    assert "autofix safe: at most 5 interventions in 1000 steps, 20 steps apart, 9 of one fix" in shown
    assert result.exit_code == 0
    wanted = AutofixPolicy(mode=PolicyMode.GUARDED, cooldown_steps=50, max_per_fix=9)
    assert process.requests[-1] == PolicyRequest(policy=wanted, requester="cli")


@pytest.mark.parametrize(
    "arguments",
    [
        ["fix", "RUN"],
        ["fix", "RUN", "rollback", "--set", "snapshot"],
        ["fix", "RUN", "rollback", "--set", "=1"],
        ["fix", "RUN", "rollback", "--mode", "now"],
        ["fix", "RUN", "rollback", "--mode", "apply", "--trial-steps", 5],
        ["fix", "RUN", "rollback", "--mode", "trial", "--trial-steps", 1000],
        ["fix", "RUN", "rollback", "--mode", "trial", *["--or", "rollback"] * 6],
        ["policy", "RUN", "often"],
        ["policy", "RUN", "safe", "--within-steps", 0],
    ],
)
def test_a_wrong_command_is_exit_code_2_and_asks_nothing(tmp_path: Path, arguments: list[object]) -> None:
    with ScriptedProcess() as process:
        run_id = live(tmp_path, process)
        result = gradtracer(tmp_path, *(run_id if a == "RUN" else a for a in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert process.requests == []


def test_the_audit_is_printed_and_holds(tmp_path: Path) -> None:
    run_id, _ = RecordedRun(tmp_path).write()
    result = gradtracer(tmp_path, "audit", run_id)
    assert result.exit_code == 0
    (entry,) = [line for line in result.stdout.splitlines() if "set_learning_rate()" in line]
    assert entry.split()[0] == "1"
    assert "kept" in entry
    assert "agent" in entry
    assert "The chain holds: 1 entry." in result.stdout
    trail = AuditTrail.model_validate_json(gradtracer(tmp_path, "audit", "--json").stdout)
    assert (trail.run_id, trail.intact, len(trail.entries)) == (run_id, True, 1)


def test_an_audit_that_does_not_hold_names_the_entry_and_is_exit_code_1(tmp_path: Path) -> None:
    run_id, directory = RecordedRun(tmp_path).write()
    db = sqlite3.connect(directory / JOURNAL_NAME, isolation_level=None)
    db.execute("UPDATE audit SET document = replace(document, 'agent', 'nobody')")
    db.close()
    result = gradtracer(tmp_path, "audit", run_id)
    assert result.exit_code == 1
    assert "The chain breaks at entry 1: it is not as it was written" in result.stdout
    as_json = gradtracer(tmp_path, "audit", run_id, "--json")
    assert as_json.exit_code == 1
    found = json.loads(as_json.stdout)
    assert (found["intact"], found["broken_at"]) == (False, 1)
