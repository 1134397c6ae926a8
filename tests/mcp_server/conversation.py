"""Talks to the server as a client does: over stdio, or in memory where the wire does not matter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import jsonschema
from mcp import Client, StdioServerParameters
from mcp_types import CallToolResult, TextContent

from mcp_server.server import build_server

Era = Literal["auto", "legacy"]
VERSIONS: dict[Era, str] = {"auto": "2026-07-28", "legacy": "2025-11-25"}


class Conversation:
    """A connected client that checks what holds for every answer."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._schemas: dict[str, dict[str, Any]] = {}

    async def ask(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """A call that must succeed; its structured answer, which is valid and equal to the text."""
        result = await self.client.call_tool(tool, arguments)
        assert not result.is_error, text_of(result)
        if not self._schemas:
            tools = (await self.client.list_tools()).tools
            self._schemas = {t.name: t.output_schema for t in tools if t.output_schema}
        answer = result.structured_content
        assert isinstance(answer, dict)
        jsonschema.validate(answer, self._schemas[tool], cls=jsonschema.Draft202012Validator)
        text = text_of(result)
        assert json.loads(text) == answer
        assert len(text) <= 20_000
        return answer

    async def error(self, tool: str, **arguments: Any) -> str:
        """A call that must fail; its text."""
        result = await self.client.call_tool(tool, arguments)
        assert result.is_error
        assert result.structured_content is None
        return text_of(result)


def text_of(result: CallToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text


@asynccontextmanager
async def over_stdio(
    home: Path, era: Era, *options: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[Conversation]:
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "mcp_server", "--home", str(home), *options],
        cwd=str(Path(__file__).parents[2]),
        env={**os.environ, **(env or {})},
    )
    async with Client(parameters, mode=era) as client:
        assert client.protocol_version == VERSIONS[era]
        yield Conversation(client)


@asynccontextmanager
async def in_memory(home: Path, *, read_only: bool = False) -> AsyncIterator[Conversation]:
    async with Client(build_server(home, read_only=read_only)) as client:
        yield Conversation(client)
