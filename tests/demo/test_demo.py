"""The demo, whole, and the snippets that it prints."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from mcp import Client, StdioServerParameters

from gradtracer.demo.clients import snippets


def commands() -> dict[str, list[str]]:
    """The server's command line, as each client's snippet says it."""
    by_client = {snippet.client: snippet.text for snippet in snippets()}
    vs_code = json.loads(by_client["VS Code"])["servers"]["gradtracer"]
    cursor = json.loads(by_client["Cursor"])["mcpServers"]["gradtracer"]
    line = shlex.split(by_client["Claude Code"])
    return {
        "Claude Code": line[line.index("--") + 1 :],
        "VS Code": [vs_code["command"], *vs_code["args"]],
        "Cursor": [cursor["command"], *cursor["args"]],
    }


def test_every_client_starts_the_same_server() -> None:
    assert list(commands().values()) == [[sys.executable, "-m", "mcp_server"]] * 3


@pytest.mark.slow
def test_the_command_of_the_snippets_serves_tools(tmp_path: Path) -> None:
    command, *arguments = commands()["VS Code"]

    async def names() -> set[str]:
        server = StdioServerParameters(command=command, args=arguments, env={"GRADTRACER_HOME": str(tmp_path)})
        async with Client(server) as client:
            return {tool.name for tool in (await client.list_tools()).tools}

    assert {"list_runs", "explain_failure", "apply_autofix"} <= anyio.run(names)


@pytest.mark.slow
def test_the_agent_mends_the_run_and_its_twin_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradtracer", "demo", "--json", "--home", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["mended"] is True
    assert outcome["accuracy_with"] > 0.9
    assert outcome["accuracy_without"] < 0.5
    for tool in ("wait_for_event", "explain_failure", "apply_autofix", "get_intervention", "get_report"):
        assert tool in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["torch", "sklearn"])
def test_without_its_packages_the_demo_says_what_to_install(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from gradtracer.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "demo"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"gradtracer: the demo needs {missing}: pip install 'gradtracer-mcp[demo]'\n"
