"""Asks the peers about the same runs, each in a process of the peers' environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.faults.corpus import Run
from benchmarks.faults.score import Answer, Guess

NAMES = ("gradtracer", "neuraldbg")


def ask(peer: str, runs: Sequence[Run], options: dict[str, Any]) -> list[Answer]:
    """The peer's answers, in the order of the runs.

    Args:
        peer: One of `NAMES`.
        runs: The runs, as `load_runs` gave them for the options.
        options: Arguments of `load_runs`, paths as strings.
    """
    root = Path(__file__).resolve().parents[2]
    # Only the benchmarks are on their path: the folder of this checkout holds a package that has a peer's name.
    staged = root / "benchmarks"
    program = (
        "import sys, importlib.machinery, types; m = types.ModuleType('benchmarks'); "
        f"m.__path__ = [{str(staged)!r}]; sys.modules['benchmarks'] = m; "
        "from benchmarks.faults.peer_worker import main; main()"
    )
    done = subprocess.run(
        [peers.environment(), "-c", program, peer, json.dumps(options)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=staged,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    found = {a["id"]: a for a in map(json.loads, done.stdout.splitlines())}
    return [
        Answer(
            alarms=tuple(a["alarms"]),
            guesses=tuple(Guess(**g) for g in a["guesses"]),
            seconds=a["seconds"],
            error=a["error"],
        )
        for a in (found[r.id] for r in runs)
    ]
