from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of a test go to a folder of its own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("GRADTRACER_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_error_of_our_own(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A tracker that turned itself off would pass many a test; those that want it clear the log."""
    yield
    assert "error of its own" not in caplog.text, caplog.text
