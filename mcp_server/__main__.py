"""``gradtracer-mcp`` and ``python -m mcp_server``: serve over stdio."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from mcp_server.server import build_server


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until the client closes the pipe.

    Args:
        argv: Arguments instead of those of the command line.
    """
    parser = argparse.ArgumentParser(
        prog="gradtracer-mcp",
        description="MCP server (stdio) through which an AI agent watches, diagnoses and mends PyTorch training runs.",
    )
    parser.add_argument(
        "--home", metavar="DIR", help="home of all runs (default: $GRADTRACER_HOME, else the state folder)"
    )
    parser.add_argument("--read-only", action="store_true", help="leave out every tool that changes a run")
    arguments = parser.parse_args(argv)
    # Errors of arguments go to the agent: without pydantic's link to a page that says nothing about this tool.
    os.environ["PYDANTIC_ERRORS_INCLUDE_URL"] = "0"
    server = build_server(arguments.home, read_only=arguments.read_only)
    if sys.stdin.isatty():
        print(
            "gradtracer-mcp speaks MCP over stdin and stdout: start it from an MCP client. Ctrl-C ends it.",
            file=sys.stderr,
        )
    with suppress(KeyboardInterrupt):
        server.run()


if __name__ == "__main__":
    main()
