"""Every example checks its own claim; here each is run as a user would, with warnings as errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*/main.py"))


def test_there_are_examples() -> None:
    assert [program.parent.name for program in PROGRAMS] == ["context_manager", "explicit_step", "neuraldbg"]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.parent.name)
def test_example_shows_what_it_claims(program: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        env={
            **os.environ,
            "GRADTRACER_HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(EXAMPLES.parent),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
