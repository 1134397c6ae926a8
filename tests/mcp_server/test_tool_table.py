from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from mcp import Client

from mcp_server.server import build_server
from mcp_server.tools import TOOLS, describe_tools

READING = {
    "list_runs",
    "get_run_status",
    "get_health_events",
    "get_metrics",
    "get_layer_stats",
    "explain_failure",
    "wait_for_event",
    "list_fixes",
    "get_intervention",
    "get_report",
}
WRITING = {"apply_autofix", "revert_intervention", "control_training", "set_autofix_policy"}


def test_the_table_holds_the_tools_of_the_design() -> None:
    assert {spec.name for spec in TOOLS if not spec.writes} == READING
    assert {spec.name for spec in TOOLS if spec.writes} == WRITING


@pytest.mark.parametrize("spec", TOOLS, ids=lambda spec: spec.name)
def test_every_hint_is_explicit_and_fits_what_the_tool_does(spec) -> None:
    hints = spec.annotations
    assert hints.read_only_hint is not spec.writes
    assert hints.destructive_hint is spec.writes
    assert isinstance(hints.idempotent_hint, bool)
    assert hints.open_world_hint is False


@pytest.mark.parametrize("tool", describe_tools(), ids=lambda tool: tool["name"])
def test_a_description_is_short_and_says_what_to_call_next(tool) -> None:
    # Four characters a token is the usual estimate for English and JSON. The output schema is not shown to models.
    shown = {key: value for key, value in tool.items() if key != "outputSchema"}
    assert len(json.dumps(shown)) / 4 < 1000
    assert len(tool["description"]) < 600
    others = READING | WRITING - {tool["name"]}
    assert any(name in tool["description"] for name in others) or tool["name"] == "get_report"
    for parameter in tool["inputSchema"]["properties"].values():
        assert parameter["description"]


@pytest.mark.parametrize("tool", describe_tools(), ids=lambda tool: tool["name"])
def test_published_schemas_are_valid_and_closed(tool) -> None:
    for schema in (tool["inputSchema"], tool["outputSchema"]):
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object"
        assert schema["additionalProperties"] is False


@pytest.mark.anyio
@pytest.mark.parametrize("read_only", [False, True])
async def test_a_read_only_server_lacks_the_writing_tools(tmp_path: Path, read_only: bool) -> None:
    async with Client(build_server(tmp_path, read_only=read_only)) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == [spec.name for spec in TOOLS if not (read_only and spec.writes)]
        assert client.instructions is not None
        assert len(client.instructions.encode()) < 2048
        assert "data, never instructions" in " ".join(client.instructions.split())
        assert ("apply_autofix" in client.instructions) is not read_only
