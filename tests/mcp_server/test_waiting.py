from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from gradtracer.home import read_manifest, write_manifest
from gradtracer.journal import JournalWriter
from tests.mcp_server.conversation import in_memory
from tests.recorded_run import RecordedRun, event

pytestmark = pytest.mark.anyio


async def test_events_that_are_there_come_at_once(tmp_path: Path) -> None:
    RecordedRun(tmp_path, state="running").write()
    async with in_memory(tmp_path) as talk:
        with anyio.fail_after(10):
            first = await talk.ask("wait_for_event", limit=1, timeout_s=50)
            assert ([e["id"] for e in first["events"]], first["more"]) == (["e2"], True)
            second = await talk.ask("wait_for_event", cursor=first["cursor"], timeout_s=50)
            assert [e["id"] for e in second["events"]] == ["e3"]


async def test_a_timeout_is_a_heartbeat(tmp_path: Path) -> None:
    RecordedRun(tmp_path, state="running").write()
    async with in_memory(tmp_path) as talk:
        answer = await talk.ask("wait_for_event", cursor=3, timeout_s=0.1)
        assert (answer["timed_out"], answer["events"], answer["cursor"]) == (True, [], 3)
        assert (answer["state"], answer["step"]) == ("running", 99)
        assert "cursor=3" in answer["next_steps"][0]


async def test_a_finished_run_is_not_waited_for(tmp_path: Path) -> None:
    RecordedRun(tmp_path).write()
    async with in_memory(tmp_path) as talk:
        with anyio.fail_after(10):
            answer = await talk.ask("wait_for_event", cursor=3, timeout_s=50)
        assert (answer["timed_out"], answer["state"], answer["events"]) == (False, "finished", [])


@pytest.mark.slow
async def test_an_event_that_comes_while_waiting_ends_the_wait(tmp_path: Path) -> None:
    _, directory = RecordedRun(tmp_path, state="running").write()
    heard: list[str | None] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        if not heard:
            writer = JournalWriter(directory)
            writer.put_event(event(4, 80))
            writer.close()
        heard.append(message)

    async with in_memory(tmp_path) as talk:
        with anyio.fail_after(20):
            result = await talk.client.call_tool(
                "wait_for_event", {"cursor": 3, "timeout_s": 50}, progress_callback=on_progress
            )
    assert result.structured_content is not None
    assert [e["id"] for e in result.structured_content["events"]] == ["e4"]
    assert heard[0] is not None
    assert heard[0].startswith("step 99, loss 0.31")


@pytest.mark.slow
async def test_the_end_of_a_run_ends_the_wait(tmp_path: Path) -> None:
    _, directory = RecordedRun(tmp_path, state="running").write()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        write_manifest(directory, read_manifest(directory).model_copy(update={"state": "finished"}))

    async with in_memory(tmp_path) as talk:
        with anyio.fail_after(20):
            result = await talk.client.call_tool(
                "wait_for_event", {"cursor": 3, "timeout_s": 50}, progress_callback=on_progress
            )
    assert result.structured_content is not None
    assert result.structured_content["state"] == "finished"


@pytest.mark.slow
async def test_a_cancelled_wait_leaves_the_server_at_work(tmp_path: Path) -> None:
    RecordedRun(tmp_path, state="running").write()
    async with in_memory(tmp_path) as talk:
        with anyio.CancelScope() as waiting:

            async def on_progress(progress: float, total: float | None, message: str | None) -> None:
                waiting.cancel()

            await talk.client.call_tool("wait_for_event", {"cursor": 3, "timeout_s": 50}, progress_callback=on_progress)
        assert waiting.cancelled_caught
        with anyio.fail_after(10):
            assert (await talk.ask("get_run_status"))["step"] == 99
