"""The command line on runs that no training made: what it prints, as JSON too, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from mcp import Client, StdioServerParameters
from typer.testing import CliRunner, Result

from gradtracer.cli import app
from gradtracer.curves import sparkline
from gradtracer.home import MANIFEST_NAME, run_directory
from gradtracer.journal import JOURNAL_NAME
from gradtracer.records import Diagnosis, DiagnosticReport, RunState, RunStatus
from tests.cli.fabricated import LAYERS, SPIKE_STEP, make_run


def gradtracer(*arguments: object, home: Path | None = None, stdin: str | None = None) -> Result:
    at = [] if home is None else ["--home", str(home)]
    return CliRunner().invoke(app, [*map(str, arguments), *at], input=stdin)


def only_error_line(result: Result) -> str:
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("gradtracer: ")
    return result.stderr


def test_runs_are_listed_newest_first_with_state_and_warnings(tmp_path: Path) -> None:
    older = make_run(tmp_path, "older")
    newer = make_run(tmp_path, "newer", state="crashed", error="ValueError: nan in batch (train.py:12)")
    os.utime(run_directory(tmp_path, older) / MANIFEST_NAME, (0, 0))
    result = gradtracer("runs", home=tmp_path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[1].startswith(newer)
    assert "crashed" in lines[1]
    assert "nan in batch" in lines[1]
    assert lines[2].startswith(older)
    assert "finished" in lines[2]
    listed = json.loads(gradtracer("runs", "--json", home=tmp_path).stdout)
    assert [run["run_id"] for run in listed["runs"]] == [newer, older]
    assert [run["num_warnings"] for run in listed["runs"]] == [1, 1]


def test_a_home_without_runs_is_said_to_be_empty(tmp_path: Path) -> None:
    result = gradtracer("runs", home=tmp_path)
    assert result.exit_code == 0
    assert str(tmp_path) in result.stdout.replace("\n", "")
    assert json.loads(gradtracer("runs", "--json", home=tmp_path).stdout)["runs"] == []


def test_a_run_that_cannot_be_trusted_is_named_beside_the_others(tmp_path: Path) -> None:
    good, open_to_all = make_run(tmp_path, "good"), make_run(tmp_path, "open")
    run_directory(tmp_path, open_to_all).chmod(0o755)
    result = gradtracer("runs", home=tmp_path)
    assert result.exit_code == 0
    assert good in result.stdout
    assert f"{open_to_all}: not read." in result.stdout


def test_older_runs_than_the_limit_are_counted(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        make_run(tmp_path, name)
    assert "2 older runs are not shown" in gradtracer("runs", "--limit", 1, home=tmp_path).stdout


def test_status_shows_loss_layers_by_health_and_events(tmp_path: Path) -> None:
    run_id = make_run(tmp_path)
    result = gradtracer("status", home=tmp_path)
    assert result.exit_code == 0
    assert run_id in result.stdout
    assert "step 99" in result.stdout
    assert "loss 40" in result.stdout
    assert "vanishing" in result.stdout
    assert LAYERS[0] in result.stdout
    assert f"{SPIKE_STEP}-99" in result.stdout
    assert "loss_spike" in result.stdout
    status = RunStatus.model_validate_json(gradtracer("status", run_id, "--json", home=tmp_path).stdout)
    assert (status.run_id, status.state, status.step) == (run_id, RunState.FINISHED, 99)


def test_home_is_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = make_run(tmp_path)
    monkeypatch.setenv("GRADTRACER_HOME", str(tmp_path))
    assert run_id in gradtracer("status").stdout


def test_watch_once_prints_one_frame_of_a_live_run(tmp_path: Path) -> None:
    make_run(tmp_path, state="running")
    result = gradtracer("watch", "--once", home=tmp_path)
    assert result.exit_code == 0
    assert "running" in result.stdout
    assert "▁" in result.stdout
    assert "█" in result.stdout
    assert "log scale" in result.stdout
    assert "loss_spike" in result.stdout


def test_watch_ends_by_itself_when_the_run_has_ended(tmp_path: Path) -> None:
    make_run(tmp_path)
    result = gradtracer("watch", home=tmp_path)
    assert result.exit_code == 0
    assert "finished" in result.stdout


def test_watch_as_json_prints_each_event_once(tmp_path: Path) -> None:
    make_run(tmp_path)
    result = gradtracer("watch", "--json", home=tmp_path)
    (frame,) = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["id"] for event in frame["events"]] == ["e1"]
    assert frame["status"]["state"] == "finished"


def test_explain_ranks_causes(tmp_path: Path) -> None:
    run_id = make_run(tmp_path)
    result = gradtracer("explain", home=tmp_path)
    assert result.exit_code == 0
    diagnosis = Diagnosis.model_validate_json(gradtracer("explain", "--json", home=tmp_path).stdout)
    assert diagnosis.run_id == run_id
    assert len(diagnosis.hypotheses) > 0
    for hypothesis in diagnosis.hypotheses:
        assert hypothesis.code in result.stdout


@pytest.mark.parametrize("form", ["json", "xml"])
def test_a_written_report_validates(tmp_path: Path, form: str) -> None:
    run_id = make_run(tmp_path)
    file = tmp_path / f"report.{form}"
    assert gradtracer("report", run_id, "--format", form, "-o", file, home=tmp_path).exit_code == 0
    result = gradtracer("validate", file)
    assert result.exit_code == 0, result.stderr
    assert "diagnostic_report" in result.stdout
    assert gradtracer("validate", "-", "--json", stdin=file.read_text()).stdout == result_json("diagnostic_report")


def result_json(kind: str) -> str:
    return json.dumps({"valid": True, "kind": kind, "schema_version": "1"}) + "\n"


def test_report_is_markdown_by_default_and_json_on_request(tmp_path: Path) -> None:
    run_id = make_run(tmp_path)
    markdown = gradtracer("report", home=tmp_path).stdout
    assert markdown.startswith("# ")
    assert run_id in markdown
    report = DiagnosticReport.model_validate_json(gradtracer("report", "--json", home=tmp_path).stdout)
    assert (report.run_id, report.num_steps) == (run_id, 100)


def test_names_from_the_run_are_never_markup(tmp_path: Path) -> None:
    layers = ("[bold red]block[/bold red]", "[link=http://example.org]head[/link]", "last]")
    make_run(tmp_path, "[blink]name[/blink]", layers=layers, state="crashed", error="KeyError: [/nothing]")
    for command in (["runs"], ["status"], ["watch", "--once"], ["explain"]):
        result = gradtracer(*command, home=tmp_path)
        assert result.exit_code == 0, (command, result.stderr)
    shown = gradtracer("status", home=tmp_path).stdout
    for text in (*layers, "[blink]name[/blink]", "KeyError: [/nothing]"):
        assert text in shown


def test_an_unknown_run_is_exit_code_3(tmp_path: Path) -> None:
    run_id = make_run(tmp_path)
    result = gradtracer("status", "nosuch", home=tmp_path)
    assert result.exit_code == 3
    line = only_error_line(result)
    assert "nosuch" in line
    assert run_id in line
    assert "gradtracer runs" in line


def test_an_ambiguous_run_is_exit_code_3_and_the_candidates_are_named(tmp_path: Path) -> None:
    run_ids = [make_run(tmp_path, name) for name in ("one", "two")]
    result = gradtracer("explain", home=tmp_path)
    assert result.exit_code == 3
    line = only_error_line(result)
    assert all(run_id in line for run_id in run_ids)


def test_a_run_open_to_others_is_exit_code_4(tmp_path: Path) -> None:
    run_id = make_run(tmp_path)
    run_directory(tmp_path, run_id).chmod(0o755)
    result = gradtracer("status", run_id, home=tmp_path)
    assert result.exit_code == 4
    assert "chmod go-rwx" in only_error_line(result)


def test_a_damaged_journal_is_exit_code_4(tmp_path: Path) -> None:
    run_id = make_run(tmp_path)
    (run_directory(tmp_path, run_id) / JOURNAL_NAME).write_bytes(b"no database " * 1000)
    result = gradtracer("status", run_id, home=tmp_path)
    assert result.exit_code == 4
    only_error_line(result)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "{", "<report/>", '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>', "prose"],
)
def test_an_invalid_document_is_exit_code_5(text: str) -> None:
    result = gradtracer("validate", "-", stdin=text)
    assert result.exit_code == 5
    only_error_line(result)


def test_a_document_that_is_not_text_is_exit_code_5(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    assert gradtracer("validate", tmp_path / "x.json").exit_code == 5


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "../escape"],
        ["validate", "no/such/file.json"],
        ["report", "--json", "--format", "xml"],
        ["report", "--format", "pdf"],
        ["runs", "--limit", "0"],
        ["nosuchcommand"],
    ],
)
def test_a_wrong_command_line_is_exit_code_2(tmp_path: Path, arguments: list[str]) -> None:
    at = ["--home", str(tmp_path)] if arguments[0] in ("status", "report", "runs") else []
    result = gradtracer(*arguments, *at)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr != ""


def test_a_report_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    make_run(tmp_path)
    result = gradtracer("report", "-o", tmp_path / "no" / "such" / "folder.md", home=tmp_path)
    assert result.exit_code == 2
    assert "folder.md" in only_error_line(result)


def test_help_lists_commands_and_exit_codes() -> None:
    text = gradtracer("--help").stdout
    commands = ("runs", "status", "watch", "explain", "report", "fixes", "fix", "revert", "policy", "audit", "validate")
    for command in (*commands, "mcp", "demo"):
        assert f"\n  {command} " in text
    assert "5  `validate`: the document is not valid" in text


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 7.0], "▁█"),
        ([0.0, None, 8.0], "▁×█"),
        ([None, None], "××"),
        ([1.0, 10.0, 10_000.0], "▁▃█"),
        ([1.0, 3.0, 2.0, 2.0, 3.0, 1.0], "▅▅▅"),
    ],
)
def test_sparkline(values: list[float | None], line: str) -> None:
    assert sparkline(values, width=3) == line


def test_curves_drawn_among_the_same_values_share_a_scale() -> None:
    low, high = [0.0, 1.0], [7.0, None]
    assert [sparkline(curve, among=[*low, *high]) for curve in (low, high)] == ["▁▂", "█×"]


@pytest.mark.slow
def test_ctrl_c_ends_watch_without_a_traceback(tmp_path: Path) -> None:
    make_run(tmp_path, state="running")
    command = [sys.executable, "-m", "gradtracer", "watch", "--json", "--interval", "0.1", "--home", str(tmp_path)]

    def listen() -> None:
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # a test runner in the background has it ignored, and we inherit it

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert first["status"]["state"] == "running"


@pytest.mark.slow
def test_the_command_line_needs_no_torch(tmp_path: Path) -> None:
    make_run(tmp_path)
    program = "import sys; sys.modules['torch'] = None; from gradtracer.cli import main; main()"
    for command in (["runs"], ["status"], ["watch", "--once"], ["explain"], ["report", "--format", "xml"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *command, "--home", str(tmp_path)], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_mcp_serves_the_home_that_was_named(tmp_path: Path) -> None:
    run_id = make_run(tmp_path)

    async def ask(*options: str) -> tuple[str, set[str]]:
        arguments = ["-m", "gradtracer", "mcp", "--home", str(tmp_path), *options]
        async with Client(StdioServerParameters(command=sys.executable, args=arguments, cwd=Path.cwd())) as client:
            runs = (await client.call_tool("list_runs", {})).structured_content
            assert runs is not None
            return runs["runs"][0]["run_id"], {tool.name for tool in (await client.list_tools()).tools}

    found, every = anyio.run(ask)
    assert found == run_id
    _, reading = anyio.run(ask, "--read-only")
    assert every - reading == {"apply_autofix", "revert_intervention", "control_training", "set_autofix_policy"}
