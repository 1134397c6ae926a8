"""What to paste where, so that an agent's client starts the server."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Snippet:
    """A configuration for one client."""

    client: str
    where: str
    """The file to put it in, or where to type it."""
    text: str


def snippets(python: str = sys.executable) -> tuple[Snippet, ...]:
    """Configurations for Claude Code, VS Code and Cursor.

    Args:
        python: The interpreter that has gradtracer-mcp installed; clients start servers without your shell's PATH, so
            it should be absolute.
    """
    arguments = ["-m", "mcp_server"]
    command = {"command": python, "args": arguments}
    line = shlex.join(["claude", "mcp", "add", "--transport", "stdio", "gradtracer", "--", python, *arguments])
    return (
        Snippet("Claude Code", "in a shell", line),
        Snippet("VS Code", ".vscode/mcp.json", _json({"servers": {"gradtracer": {"type": "stdio", **command}}})),
        Snippet("Cursor", ".cursor/mcp.json", _json({"mcpServers": {"gradtracer": command}})),
    )


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
