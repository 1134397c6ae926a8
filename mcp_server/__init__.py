"""The stdio MCP server: one method of `gradtracer.workspace.Workspace` a tool, no torch."""
