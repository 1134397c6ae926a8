"""The tool that waits: polls the journal in a worker thread, so that other calls go on and a cancellation ends it."""

from __future__ import annotations

from typing import Annotated, Any

import anyio
import anyio.to_thread
from mcp.server.mcpserver import Context
from pydantic import Field

from gradtracer.records import RunState, RunSummary, WaitAnswer
from gradtracer.workspace import Workspace
from mcp_server.arguments import Cursor, Limit, MinSeverity, RunId

_POLL_S = 0.2
_HEARTBEAT_S = 1.0
_ENDED = (RunState.FINISHED, RunState.CRASHED)


async def wait_for_event(
    workspace: Workspace,
    ctx: Context[Any, Any],
    run_id: RunId = None,
    cursor: Cursor = 0,
    timeout_s: Annotated[float, Field(gt=0, le=50, description="Come back after so many seconds at the latest.")] = 30,
    min_severity: MinSeverity = "warning",
    limit: Limit = 20,
) -> WaitAnswer:
    """Wait until something happens to a run: returns at the next event, when the run ends, or after timeout_s.

    Use it to watch a run instead of asking again and again. It returns at once where events newer than `cursor` are
    already there. Every answer carries step, loss and state, so a timeout is a heartbeat: call again with `cursor`.
    Next: explain_failure after an event; get_run_status when state is hung.
    """
    summary = await anyio.to_thread.run_sync(workspace.summary, run_id)
    begin = beat = anyio.current_time()
    while True:
        page = await anyio.to_thread.run_sync(workspace.events_after, summary.run_id, cursor, limit, min_severity)
        now = anyio.current_time()
        timed_out = now - begin >= timeout_s
        if page.events or timed_out or summary.state in _ENDED:
            break
        if now - beat >= _HEARTBEAT_S:
            beat = now
            summary = await anyio.to_thread.run_sync(workspace.summary, summary.run_id)
            await ctx.report_progress(now - begin, timeout_s, _heartbeat(summary))
            continue  # a run that ended may have left a last event
        await anyio.sleep(min(_POLL_S, max(0.0, begin + timeout_s - now)))
    summary = await anyio.to_thread.run_sync(workspace.summary, summary.run_id)
    return WaitAnswer(
        run_id=summary.run_id,
        events=page.events,
        cursor=page.cursor,
        more=page.more,
        timed_out=timed_out and not page.events and summary.state not in _ENDED,
        state=summary.state,
        step=summary.step,
        loss=summary.loss,
        next_steps=_next_steps(summary, page.cursor, bool(page.events)),
    )


def _heartbeat(summary: RunSummary) -> str:
    step = "no step yet" if summary.step is None else f"step {summary.step}"
    return step if summary.loss is None else f"{step}, loss {summary.loss:g}"


def _next_steps(summary: RunSummary, cursor: int, found: bool) -> tuple[str, ...]:
    if found:
        return ("Call explain_failure for the cause.", f"Call wait_for_event with cursor={cursor} to go on watching.")
    if summary.state is RunState.CRASHED:
        return ("The run crashed: call explain_failure.",)
    if summary.state is RunState.FINISHED:
        return ("The run is finished: call get_report.",)
    if summary.state is RunState.HUNG:
        return ("Call get_run_status to see where it hangs.",)
    if summary.state is RunState.PAUSED:
        return ("The run is paused: control_training with action=resume lets it go on.",)
    return (f"Call wait_for_event with cursor={cursor} to go on watching.",)
