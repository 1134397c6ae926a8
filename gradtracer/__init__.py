"""An AI agent reaches a live PyTorch training run over MCP, finds what is wrong, and mends it."""

from __future__ import annotations

__version__ = "0.1.0"
