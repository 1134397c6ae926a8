"""The demo: a real training run goes wrong, and an agent mends it over MCP.

`train` is the training, a process of its own that knows nothing of the agent. `agent` is the agent: the official SDK
client over stdio to the same server that Claude Code or VS Code would start. It is the one place outside `mcp_server`
that imports mcp.
"""
