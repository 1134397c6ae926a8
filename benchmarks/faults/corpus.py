"""Runs with a known fault, their healthy twins, and healthy runs that look odd, from any folder in the interface.

A case file defines ``build()`` (the faulty run) and ``build_fixed()`` (its twin); a file of the healthy folder defines
``build()`` alone. Both return a dict: `model`, `optimizer`, `steps`, `step(i)` (the loss of a step) or, with
`owns_loop`, `run_step(i)` (the whole step), `metric()`, and `truth`, which only `benchmarks.faults.score` reads.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
CASES, HEALTHY, SCENARIOS = HERE / "cases", HERE / "healthy", HERE / "scenarios.py"

# The scenario file has words of its own; each stands for one code of the taxonomy, or for either of two.
_SCENARIO_CODES: dict[str, tuple[str, ...]] = {
    "vanishing_activation_depth": ("vanishing_gradient",),
    "lr_too_high": ("learning_rate_too_high",),
    "lr_spike": ("learning_rate_too_high",),
    "lr_too_low": ("learning_rate_too_low",),
    "bad_recurrent_init": ("exploding_gradient", "bad_initialisation"),
    "dead_relu": ("dead_relu",),
    "unsafe_log_in_loss": ("log_of_zero",),
    "nan_in_data": ("nan_in_data",),
    "missing_zero_grad": ("zero_grad_missing",),
    "params_not_in_optimizer": ("missing_optimizer_params",),
    "wrong_layer_frozen": ("frozen_layers",),
    "labels_unrelated_to_input": ("label_misalignment",),
    "labels_constant": ("constant_labels",),
    "double_softmax": ("loss_activation_mismatch",),
    "attention_logit_overflow_fp16": ("fp16_overflow", "attention_entropy_collapse"),
}


@dataclass(frozen=True)
class Truth:
    """What is wrong with a run; read by scoring alone."""

    codes: tuple[str, ...]
    layers: tuple[str, ...]
    step: int | None
    step_tol: int = 0


@dataclass(frozen=True)
class Program:
    """A training program, as its user would have written it."""

    model: Any
    optimizer: Any
    steps: int
    run_step: Callable[[int], float]
    """Does the whole step and returns its loss."""
    metric: Callable[[], float] | None


@dataclass(frozen=True)
class Run:
    """A run that can be built, and what is known about it."""

    id: str
    build: Callable[[], Program]
    truth: Truth | None
    """None for a healthy run."""


def load_runs(
    cases: Path | None, healthy: Path | None, scenarios: Path | None, seeds: Sequence[int], ids: Sequence[str] = ()
) -> list[Run]:
    """All runs of the folders; a case gives two, itself and its twin.

    Args:
        cases: Folder of case files.
        healthy: Folder of healthy files.
        scenarios: Scenario file.
        seeds: Seeds for the scenarios.
        ids: Only runs whose id begins with one of these; all where empty.
    """
    found: list[Run] = []
    if cases is not None:
        for path in _files(cases):
            found += _case(path)
    if healthy is not None:
        found += [Run(f"healthy/{p.stem}", _builder(p, "build"), None) for p in _files(healthy)]
    if scenarios is not None:
        found += _scenarios(scenarios, seeds)
    return [
        r
        for r in found
        if not ids or any(r.id == i or r.id.startswith(f"{i}@") or r.id.startswith(f"{i}/") for i in ids)
    ]


def _files(folder: Path) -> Iterator[Path]:
    return (p for p in sorted(folder.glob("*.py")) if not p.name.startswith("_"))


def _load(path: Path) -> ModuleType:
    # The files import their neighbours by bare name.
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"fault_corpus_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _builder(path: Path, function: str) -> Callable[[], Program]:
    return lambda: _program(getattr(_load(path), function)())


def _program(case: dict[str, Any]) -> Program:
    model, optimizer = case["model"], case["optimizer"]

    def plain(i: int) -> float:
        optimizer.zero_grad()
        loss = case["step"](i)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def own(i: int) -> float:
        return float(case["run_step"](i))

    return Program(model, optimizer, case["steps"], own if case.get("owns_loop") else plain, case.get("metric"))


def _case(path: Path) -> list[Run]:
    truth = _load(path).TRUTH if hasattr(_load(path), "TRUTH") else _load(path).build()["truth"]
    layers = (truth["layer"],) if truth.get("layer") else ()
    known = Truth((truth["category"],), layers, truth.get("step"), truth.get("step_tol", 0))
    twin = Run(f"{path.stem}/twin", _builder(path, "build_fixed"), None)
    return [Run(path.stem, _builder(path, "build"), known), twin]


def _scenarios(path: Path, seeds: Sequence[int]) -> list[Run]:
    module = _load(path)
    found: list[Run] = []

    def builder(scenario: Any, seed: int, faulty: bool) -> Callable[[], Program]:
        def build() -> Program:
            run = scenario.make(seed, faulty)

            def step(i: int) -> float:
                run.step(i)
                return float(run.last_loss)

            return Program(run.model, run.optimizer, scenario.steps, step, run.metric)

        return build

    for scenario in module.FAULTS:
        truth = Truth(_SCENARIO_CODES[scenario.cause], tuple(x for x in scenario.layers if x), scenario.onset)
        for seed in seeds:
            found.append(Run(f"{scenario.name}@{seed}", builder(scenario, seed, True), truth))
            found.append(Run(f"{scenario.name}@{seed}/twin", builder(scenario, seed, False), None))
    for scenario in module.HEALTHY:
        found += [Run(f"healthy/{scenario.name}@{seed}", builder(scenario, seed, False), None) for seed in seeds]
    return found
