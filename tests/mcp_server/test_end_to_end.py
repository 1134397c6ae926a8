"""A real training in a process of its own, steered by a client over stdio."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from typer.testing import CliRunner

from gradtracer import schemas
from gradtracer.cli import app
from gradtracer.workspace import Workspace
from tests.mcp_server.conversation import Conversation, Era, over_stdio
from tests.mcp_server.training_program import BAD_RATE, BITES_AT, GOOD_RATE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ERAS: list[Era] = ["auto", "legacy"]
DEADLINE_S = 60


@contextmanager
def training(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    root = Path(__file__).parents[2]
    program = Path(__file__).with_name("training_program.py")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen([sys.executable, str(program), str(home)], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def until(
    ask: Callable[[], Awaitable[dict[str, Any]]], holds: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Ask again and again until the answer is as wanted; that answer."""
    with anyio.fail_after(DEADLINE_S):
        while not holds(answer := await ask()):
            await anyio.sleep(0.1)
    return answer


async def rate_now(talk: Conversation) -> dict[str, Any]:
    """The run's learning rate at its newest step, from its own metrics."""
    answer = await talk.ask("get_metrics", signals=["learning_rate"], max_points=10)
    points = answer["series"][0]["points"] if answer["series"] else []
    return points[-1] if points else {"step": -1, "value": None}


async def run_of(talk: Conversation) -> str:
    runs = await until(lambda: talk.ask("list_runs"), lambda a: a["runs"])
    return runs["runs"][0]["run_id"]


async def first_event(talk: Conversation, run_id: str) -> dict[str, Any]:
    """The first event of severity warning or above, waited for as an agent does."""
    with anyio.fail_after(DEADLINE_S):
        while not (answer := await talk.ask("wait_for_event", run_id=run_id, timeout_s=20))["events"]:
            assert answer["timed_out"]
            assert answer["state"] == "running"
    return answer["events"][0]


@pytest.mark.parametrize("era", ERAS)
async def test_an_agent_finds_a_run_mends_it_and_takes_the_fix_back(tmp_path: Path, era: Era) -> None:
    with training(tmp_path) as process:
        async with over_stdio(tmp_path, era) as talk:
            run_id = await run_of(talk)
            event = await first_event(talk, run_id)
            assert event["step"] >= BITES_AT - 20
            diagnosis = await talk.ask("explain_failure")
            assert diagnosis["hypotheses"][0]["code"] == "learning_rate_too_high"
            # So many bad steps that the median loss before the fix is a bad one.
            await until(lambda: talk.ask("get_run_status"), lambda a: a["step"] >= BITES_AT + 100)

            assert (await talk.ask("control_training", action="pause", reason="look at it"))["state"] == "applied"
            status = await talk.ask("get_run_status")
            assert (status["state"], status["live"]) == ("paused", True)
            paused_at = status["step"]
            assert "paused already" in await talk.error("control_training", action="pause")

            fix = {"fix": "set_learning_rate", "parameters": {"learning_rate": GOOD_RATE}}
            preview = await talk.ask("apply_autofix", **fix)
            assert (preview["state"], preview["mode"]) == ("previewed", "dry_run")
            assert [(c["old"], c["new"]) for c in preview["changes"]] == [(BAD_RATE, GOOD_RATE)]
            assert (await rate_now(talk))["value"] == BAD_RATE
            applied = await talk.ask("apply_autofix", **fix, mode="apply", reason="the rate is ten times too high")
            assert applied["state"] == "applied"
            assert re.fullmatch(r"agent-[0-9a-f]{6}", applied["requester"])
            assert (await talk.ask("get_run_status"))["step"] == paused_at

            await talk.ask("control_training", action="resume")
            now = await until(lambda: rate_now(talk), lambda p: p["step"] >= paused_at + 100)
            assert now["value"] == pytest.approx(GOOD_RATE)
            outcome = await talk.ask("get_intervention", intervention_id=applied["id"])
            assert outcome["state"] == "kept"
            assert outcome["loss_after"] < outcome["loss_before"]
            assert applied["id"] in (await talk.ask("get_run_status"))["active_fixes"]

            await talk.ask("revert_intervention", intervention_id=applied["id"], reason="to see that it can be")
            assert (await talk.ask("get_intervention", intervention_id=applied["id"]))["state"] == "reverted"
            await until(lambda: rate_now(talk), lambda p: p["value"] == BAD_RATE)

            saved = await talk.ask("control_training", action="checkpoint")
            assert saved["snapshot"]
            assert "snapshot" in await talk.error("control_training", action="rollback", snapshot="nonsense")
            back = await talk.ask("control_training", action="rollback", snapshot=saved["snapshot"])
            assert back["state"] == "applied"
            report = await talk.ask("get_report", format="xml")
            assert schemas.validate(report["text"]).run_id == run_id  # type: ignore[attr-defined]

            # The watch may take the rollback back by itself; while it is paused, nothing is unseen after a look.
            await talk.ask("control_training", action="pause")
            await talk.ask("get_run_status")
            await talk.ask("control_training", action="stop")
            with anyio.fail_after(DEADLINE_S):
                assert await anyio.to_thread.run_sync(process.wait) == 0
            assert (await talk.ask("get_run_status"))["state"] == "finished"
            assert "is finished" in await talk.error("apply_autofix", **fix)


@pytest.mark.parametrize("era", ERAS)
async def test_a_run_that_was_killed_is_explained_from_what_is_left(tmp_path: Path, era: Era) -> None:
    with training(tmp_path) as process:
        async with over_stdio(tmp_path, era) as talk:
            run_id = await run_of(talk)
            event = await first_event(talk, run_id)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            status = await talk.ask("get_run_status")
            assert (status["state"], status["live"]) == ("crashed", False)
            assert status["step"] >= event["step"]
            diagnosis = await talk.ask("explain_failure")
            assert diagnosis["hypotheses"][0]["code"] == "learning_rate_too_high"
            assert "killed" in diagnosis["summary"]
            assert "Nothing was changed" in await talk.error("control_training", action="pause")
            assert (await talk.ask("wait_for_event", cursor=10_000))["state"] == "crashed"


async def test_of_two_agents_on_one_run_the_second_has_to_look_again(tmp_path: Path) -> None:
    fix = {"fix": "clip_grad_norm", "parameters": {"max_norm": 1.0}}
    with training(tmp_path):
        async with over_stdio(tmp_path, "auto") as one, over_stdio(tmp_path, "legacy") as two:
            run_id = await run_of(one)
            await until(lambda: one.ask("get_run_status"), lambda a: a["live"] and (a["step"] or 0) >= 20)
            # Paused, so that no watch and no step comes in between.
            await one.ask("control_training", action="pause")
            await two.ask("get_run_status")
            mine = await one.ask("apply_autofix", **fix, mode="apply")
            assert mine["state"] == "applied"

            refusal = await two.error("apply_autofix", **fix, mode="apply")
            assert f"{mine['id']} clip_grad_norm(max_norm=1.0) by {mine['requester']}" in refusal
            assert "get_run_status" in refusal
            assert "has changed" in await two.error("set_autofix_policy", mode="safe")
            assert "has changed" in await two.error("control_training", action="resume")
            assert "has changed" in await two.error("revert_intervention", intervention_id=mine["id"])
            assert "has changed" in await two.error("apply_autofix", **fix, mode="trial")

            await two.ask("get_run_status")
            yours = await two.ask("apply_autofix", **fix, mode="apply")
            assert (yours["state"], yours["requester"] != mine["requester"]) == ("applied", True)

            # Looking through a dry run counts, too; the first has not looked since the second acted.
            assert yours["requester"] in await one.error("set_autofix_policy", mode="safe")
            assert (await one.ask("apply_autofix", **fix))["state"] == "previewed"
            policy = await one.ask("set_autofix_policy", mode="safe", cooldown_steps=50, reason="overnight")
            assert [(c["target"], c["old"], c["new"]) for c in policy["changes"]] == [
                ("policy.mode", "off", "safe"),
                ("policy.cooldown_steps", 20, 50),
            ]
            shown = (await two.ask("get_run_status"))["policy"]
            assert (shown["mode"], shown["cooldown_steps"], shown["max_per_fix"]) == ("safe", 50, 3)

            bounds = await one.error("apply_autofix", fix="clip_grad_norm", parameters={"max_norm": -1})
            assert "> 0" in bounds
            assert "list_fixes" in await one.error("apply_autofix", fix="nonsense")
            trail = await anyio.to_thread.run_sync(Workspace(tmp_path).get_audit, run_id)
            assert trail.intact
            ends = [(e.intervention.fix, e.intervention.state.value) for e in trail.entries][-2:]
            assert ends == [("clip_grad_norm", "refused"), ("nonsense", "refused")]
            assert {e.intervention.requester for e in trail.entries} == {mine["requester"], yours["requester"]}


async def test_a_trial_proves_the_fix_that_is_then_applied(tmp_path: Path) -> None:
    with training(tmp_path):
        async with over_stdio(tmp_path, "auto") as talk:
            run_id = await run_of(talk)
            await first_event(talk, run_id)
            await until(lambda: talk.ask("get_run_status"), lambda a: a["step"] >= BITES_AT + 100)
            tried = await talk.ask(
                "apply_autofix",
                fix="set_learning_rate",
                parameters={"learning_rate": GOOD_RATE},
                mode="trial",
                trial_steps=20,
                alternatives=[{"fix": "set_learning_rate", "parameters": {"learning_rate": 2 * BAD_RATE}}],
            )
            tried = await until(
                lambda: talk.ask("get_intervention", intervention_id=tried["id"]), lambda a: a["state"] != "pending"
            )
            assert tried["state"] == "tried", tried["outcome"]
            control, best, *_ = tried["trial"]["branches"]
            assert (control["verdict"], best["verdict"]) == ("control", "better")
            assert {p["name"]: p["value"] for p in best["parameters"]}["learning_rate"] == GOOD_RATE
            assert (await rate_now(talk))["value"] == BAD_RATE
            report = (await talk.ask("get_report"))["text"]
            assert "control, final loss" in report
            arguments = {p["name"]: p["value"] for p in best["parameters"]}
            applied = await talk.ask("apply_autofix", fix=best["fix"], parameters=arguments, mode="apply")
            assert applied["state"] == "applied"
            shown = CliRunner().invoke(app, ["audit", run_id, "--home", str(tmp_path)])
            assert shown.exit_code == 0
            assert "tried" in shown.stdout
            assert "The chain holds: 4 entries." in shown.stdout
