"""Recorder and control server need no torch, so that tools and tests can use them without it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("module", ["recorder", "control_server", "stack"])
def test_the_module_is_imported_with_torch_blocked(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import gradtracer.training.{module}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
