"""The environment of the peers: their import names clash with ours, so they live in a virtual environment."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import platformdirs

PEERS = ("gradtracer==0.9.0", "neuraldbg==1.3.2")
# What they import and do not declare, with the torch that ours is tested with.
_NEEDS = ("torch==2.13.0", "numpy", "scikit-learn", "scipy", "pandas", "matplotlib", "seaborn", "psutil")


def environment() -> Path:
    """The Python of the peers' environment; it is made on first use (some minutes)."""
    folder = platformdirs.user_cache_path("gradtracer-benchmarks", appauthor=False) / "peers"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    stamp = folder / "-".join(p.replace("==", "-") for p in PEERS)
    if not stamp.exists():
        print(f"Installing {', '.join(PEERS)} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        for packages in (_NEEDS, ("--no-deps", *PEERS)):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, stdout=sys.stderr)
        stamp.touch()
    return python
