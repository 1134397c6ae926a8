"""``python -m benchmarks.faults.calibrate RESULT``: one temperature for all probabilities, checked on left-out causes.

Evidence that hangs together is counted several times by a naive product, so its posterior is too sure. One number
mends that: ``p_i ~ w_i^(1/T)`` (temperature scaling; Guo et al. 2017, "On calibration of modern neural networks",
section 4.2). T is fitted on all runs but those of one cause, and scored on these, for each cause in turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

TEMPERATURES = np.geomspace(0.5, 8.0, 57)


def heated(posterior: dict[str, float], temperature: float) -> dict[str, float]:
    """The posterior at a temperature, relative to the one that it has."""
    logs = np.log(np.maximum(list(posterior.values()), 1e-300)) / temperature
    weights = np.exp(logs - logs.max())
    return dict(zip(posterior, (weights / weights.sum()).tolist(), strict=True))


def brier(runs: Sequence[tuple[str, dict[str, float]]], temperature: float) -> float:
    """Mean squared error of the top hypothesis' probability against whether it is right."""
    errors = []
    for truth, posterior in runs:
        code, probability = max(heated(posterior, temperature).items(), key=lambda item: item[1])
        errors.append((probability - (code in truth.split("|"))) ** 2)
    return float(np.mean(errors))


def fit(runs: Sequence[tuple[str, dict[str, float]]]) -> float:
    """The temperature of least Brier score."""
    return float(min(TEMPERATURES, key=lambda t: brier(runs, t)))


def main(
    result: Annotated[Path, typer.Argument(help="JSON of `python -m benchmarks.faults`.")],
    healthy: Annotated[bool, typer.Option(help="Count the healthy runs too.")] = False,
) -> None:
    """Fit the temperature, and say what it does on causes that it was not fitted on."""
    document: dict[str, Any] = json.loads(result.read_text())
    runs = [(c["truth"]["category"], c["posterior"]) for c in document["cases"] if c["posterior"]]
    if healthy:
        runs += [("healthy", h["posterior"]) for h in document["healthy"] if h["posterior"]]
    left_out = []
    for cause in sorted({truth for truth, _ in runs}):
        temperature = fit([r for r in runs if r[0] != cause])
        left_out += [(brier([r], temperature), temperature) for r in runs if r[0] == cause]
    errors, temperatures = zip(*left_out, strict=True)
    best = fit(runs)
    Console().print(
        f"{len(runs)} runs. Brier score as it is {brier(runs, 1.0):.4f}; at the best temperature {best:.2f} "
        f"{brier(runs, best):.4f}; each cause at a temperature fitted without it "
        f"({min(temperatures):.2f} to {max(temperatures):.2f}) {np.mean(errors):.4f}"
    )


if __name__ == "__main__":
    typer.run(main)
