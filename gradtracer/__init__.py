"""An AI agent reaches a live PyTorch training run over MCP, finds what is wrong, and mends it.

The torch side is loaded when one of its names is first used, so that a server without torch can import the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradtracer.training.controller import TrainingStopped
    from gradtracer.training.tracker import FlowTracker, NeuralDbg

__version__ = "0.1.0"
__all__ = ["FlowTracker", "NeuralDbg", "TrainingStopped", "__version__"]

_LAZY = {
    "FlowTracker": "gradtracer.training.tracker",
    "NeuralDbg": "gradtracer.training.tracker",
    "TrainingStopped": "gradtracer.training.controller",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ImportError(
                f"gradtracer.{name} needs PyTorch, which is not installed here: pip install 'gradtracer-mcp[torch]'"
            ) from error
        raise
