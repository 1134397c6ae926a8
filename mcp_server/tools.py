"""The table of tools, in the order in which clients see them. A new tool is one line here and its function."""

from __future__ import annotations

from typing import Any

from mcp_types import Tool, ToolAnnotations

from gradtracer.workspace import Workspace
from mcp_server import reading, steering, waiting
from mcp_server.answering import ToolSpec, make_tool


def _hints(*, reads: bool, destroys: bool, idempotent: bool) -> ToolAnnotations:
    return ToolAnnotations(
        read_only_hint=reads, destructive_hint=destroys, idempotent_hint=idempotent, open_world_hint=False
    )


READS = _hints(reads=True, destroys=False, idempotent=True)
ACTS = _hints(reads=False, destroys=True, idempotent=False)
ACTS_ONCE = _hints(reads=False, destroys=True, idempotent=True)

TOOLS: tuple[ToolSpec, ...] = (
    ToolSpec("list_runs", reading.list_runs, "List runs", READS, writes=False),
    ToolSpec("get_run_status", reading.get_run_status, "Get run status", READS, writes=False),
    ToolSpec("get_health_events", reading.get_health_events, "Get health events", READS, writes=False),
    ToolSpec("get_metrics", reading.get_metrics, "Get metrics", READS, writes=False),
    ToolSpec("get_layer_stats", reading.get_layer_stats, "Get layer statistics", READS, writes=False),
    ToolSpec("explain_failure", reading.explain_failure, "Explain failure", READS, writes=False),
    ToolSpec("wait_for_event", waiting.wait_for_event, "Wait for event", READS, writes=False),
    ToolSpec("list_fixes", reading.list_fixes, "List fixes", READS, writes=False),
    ToolSpec("apply_autofix", steering.apply_autofix, "Preview, try or apply a fix", ACTS, writes=True),
    ToolSpec("get_intervention", reading.get_intervention, "Get intervention", READS, writes=False),
    ToolSpec("revert_intervention", steering.revert_intervention, "Revert intervention", ACTS_ONCE, writes=True),
    ToolSpec("control_training", steering.control_training, "Control training", ACTS, writes=True),
    ToolSpec("set_autofix_policy", steering.set_autofix_policy, "Set autofix policy", ACTS_ONCE, writes=True),
    ToolSpec("get_report", reading.get_report, "Get report", READS, writes=False),
)


def describe_tools() -> list[dict[str, Any]]:
    """Every tool as a client sees it, for ``schemas/mcp_tools.json``."""
    made = [make_tool(spec, Workspace()) for spec in TOOLS]
    return [
        Tool(
            name=tool.name,
            title=tool.title,
            description=tool.description,
            input_schema=tool.parameters,
            output_schema=tool.output_schema,
            annotations=tool.annotations,
        ).model_dump(mode="json", by_alias=True, exclude_none=True)
        for tool in made
    ]
