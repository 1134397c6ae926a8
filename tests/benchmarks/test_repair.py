"""Repairs are scored by the rules, and a corpus of two is trained, mended and scored from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.corpus import Run, Truth
from benchmarks.repair.__main__ import measure
from benchmarks.repair.pool import train_all
from benchmarks.repair.runs import Corpus, Outcome, Task, train
from benchmarks.repair.score import case_result, healthy_result, repairable_codes, summary

DIVERGES = """
import torch
import torch.nn.functional as F
from torch import nn

TRUTH = dict(category="learning_rate_too_high", layer=None, step=0)

def _make(rate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), rate)
    weights = torch.randn(16, 1, generator=torch.Generator().manual_seed(1))

    def batch(i, size=64):
        x = torch.randn(size, 16, generator=torch.Generator().manual_seed(i + 10))
        return x, torch.tanh(x @ weights)

    def step(i):
        x, y = batch(i)
        return F.mse_loss(model(x), y)

    def metric():
        x, y = batch(-1, 512)
        with torch.no_grad():
            return (1 - F.mse_loss(model(x), y) / y.var()).item()

    return dict(model=model, optimizer=optimizer, steps=300, step=step, metric=metric, truth=TRUTH)

def build():
    return _make(3.0)

def build_fixed():
    return _make(0.05)
"""
SHAPES = """
import torch
from torch import nn

TRUTH = dict(category="shape_broadcast", layer=None, step=0)

def _make(fixed):
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = x.sum(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i):
        out = model(x)
        return ((out.squeeze(1) if fixed else out) - y).square().mean()

    def metric():
        with torch.no_grad():
            return -(model(x).squeeze(1) - y).square().mean().item()

    return dict(model=model, optimizer=optimizer, steps=60, step=step, metric=metric, truth=TRUTH)

def build():
    return _make(False)

def build_fixed():
    return _make(True)
"""
DIES = "import os\nTRUTH = dict(category='dead_relu', layer=None, step=0)\n\ndef build():\n    os._exit(3)\n"


def _corpus(folder: Path, **files: str) -> Corpus:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return Corpus(folder, None, None, ())


def _run(code: str | None) -> Run:
    truth = Truth((code,), (), 0) if code else None
    return Run("run", lambda: pytest.fail("not built"), truth)


def _ended(metric: float | None, **more: Any) -> Outcome:
    return Outcome(metric, **{"ends_finite": metric is not None, "fingerprint": str(metric), **more})


def _scored(faulty: Outcome, repaired: Outcome, twin: Outcome) -> tuple[float | None, bool | None]:
    found = case_result(_run("exploding_gradient"), faulty, repaired, twin)
    return found["gap_closed"], found["recovered"]


def test_codes_that_only_the_source_can_mend_are_not_repairable() -> None:
    codes = repairable_codes()
    assert {"learning_rate_too_high", "nan_in_data", "embedding_collapse", "loss_scale"} <= codes
    assert codes.isdisjoint({"shape_broadcast", "log_of_zero", "target_leak", "detached_graph", "code", "repair"})


def test_four_fifths_of_the_gap_have_to_be_closed() -> None:
    faulty, twin = _ended(0.5), _ended(1.0)
    assert _scored(faulty, _ended(0.9), twin) == (pytest.approx(0.8), True)
    assert _scored(faulty, _ended(0.89), twin) == (pytest.approx(0.78), False)
    assert _scored(faulty, _ended(1.0, ends_finite=False), twin) == (pytest.approx(1.0), False)
    assert _scored(faulty, _ended(None), twin) == (None, False)


def test_where_the_faulty_run_diverged_the_gap_begins_at_the_untrained_model() -> None:
    twin = _ended(0.8)
    for faulty in (
        _ended(-1e6, untrained=0.0),
        _ended(None, untrained=0.0),
        _ended(-0.2, untrained=0.0, ends_finite=False),
    ):
        assert _scored(faulty, _ended(0.7), twin) == (pytest.approx(0.875), True)
        assert _scored(faulty, _ended(-100.0), twin)[1] is False
    assert _scored(_ended(None), _ended(0.7), twin) == (pytest.approx(0.875), True)
    assert _scored(_ended(None, untrained=-1e8), _ended(-1e3), twin)[1] is False
    assert _scored(_ended(0.1, untrained=0.7), _ended(0.7), twin) == (pytest.approx(6 / 7), True)


def test_a_fault_that_costs_nothing_is_not_counted() -> None:
    for metric in (0.8, 0.799, 0.9):
        assert _scored(_ended(metric, untrained=0.1), _ended(0.8), _ended(0.8)) == (None, None)


def test_a_fault_of_the_source_asks_for_the_right_first_hypothesis_with_advice() -> None:
    def advised(*top: tuple[str, float, str]) -> bool:
        found = case_result(_run("log_of_zero"), _ended(0.0), _ended(0.0, top=top), _ended(1.0))
        assert (found["repairable"], found["recovered"]) == (False, None)
        return found["advice_first"]

    assert advised(("log_of_zero", 0.9, "Clamp it."), ("healthy", 0.1, ""))
    assert not advised(("log_of_zero", 0.9, ""))
    assert not advised(("healthy", 0.6, ""), ("log_of_zero", 0.4, "Clamp it."))


def test_a_healthy_run_is_harmed_by_more_than_its_spread_only() -> None:
    seeds = [_ended(0.80 + 0.01 * k) for k in range(9)]
    alone = _ended(0.85)
    spread = healthy_result(_run(None), alone, _ended(0.0), seeds)["spread"]
    assert spread == pytest.approx(0.0264, abs=1e-3)
    for metric, harmed in ((0.85 - 1.01 * spread, True), (0.85 - 0.99 * spread, False), (0.95, False), (None, True)):
        assert healthy_result(_run(None), alone, _ended(metric), seeds)["harmed"] is harmed
    assert healthy_result(_run(None), alone, alone, ())["harmed"] is False
    assert healthy_result(_run(None), alone, _ended(0.85, fingerprint="b", error="stopped"), seeds)["harmed"] is True


def test_the_summary_counts_what_can_be_repaired_and_what_was_harmed() -> None:
    twin = _ended(1.0)
    cases = [
        case_result(_run("exploding_gradient"), _ended(0.0), _ended(1.0), twin),
        case_result(_run("exploding_gradient"), _ended(0.0), _ended(0.0), twin),
        case_result(_run("exploding_gradient"), twin, twin, twin),
        case_result(_run("log_of_zero"), _ended(0.0), _ended(0.0), twin),
    ]
    healthy = [healthy_result(_run(None), twin, _ended(m), [twin, twin] if m != 1.0 else ()) for m in (1.0, 0.5)]
    assert summary(cases, healthy) == {
        "repairable": 2, "recovered": 0.5, "without_gap": ["run"], "code_only": 1, "advice": 0.0, "healthy": 2,
        "changed": 1, "harmed": 1,
    }  # fmt: skip


@pytest.mark.slow
def test_another_seed_gives_other_weights_and_the_same_seed_the_same_bits(tmp_path: Path) -> None:
    chosen = _corpus(tmp_path, shapes=SHAPES)
    first, again, other = (train(Task(chosen, "shapes/twin", None, offset)) for offset in (0, 0, 1))
    assert first.error == ""
    assert first.fingerprint == again.fingerprint != other.fingerprint


@pytest.mark.slow
def test_what_kills_one_process_costs_one_run(tmp_path: Path) -> None:
    chosen = _corpus(tmp_path, dies=DIES, shapes=SHAPES)
    tasks = [Task(chosen, "dies", None), Task(chosen, "shapes", None)]
    found = {task.id: outcome for task, outcome in train_all(tasks, num_workers=1)}
    assert found["dies"] == Outcome(error="its process ended with code 3")
    assert found["shapes"].error == ""


@pytest.mark.slow
def test_a_run_that_diverges_is_mended_and_a_fault_of_the_source_gets_advice(tmp_path: Path) -> None:
    found = measure(_corpus(tmp_path, diverges=DIVERGES, shapes=SHAPES), num_workers=2)
    diverged, shapes = found["cases"]
    assert diverged["metric"]["faulty"] is None
    assert diverged["gap_closed"] > 0.3, diverged
    assert diverged["ends_finite"] == {"faulty": False, "repaired": True}
    assert "set_learning_rate" in [a["fix"] for a in diverged["applied"]]
    assert shapes["advice_first"] is True, shapes
    assert [h["identical"] for h in found["healthy"]] == [True, True]
    assert (found["summary"]["repairable"], found["summary"]["harmed"]) == (1, 0)
