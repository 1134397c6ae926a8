"""The corpus that needs no data files, as regression: causes stay named, healthy twins stay silent."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import corpus, ours
from benchmarks.faults.score import Answer, Guess, score

# Everything but one long run and those that read data sets which are not in scikit-learn.
_LEFT_OUT = {"attention_scale_missing"}
_DATA_SETS = ("california(", "mnist(", "shakespeare(")
QUICK = [
    p.stem
    for p in sorted(corpus.CASES.glob("[a-z]*.py"))
    if p.stem not in _LEFT_OUT and not any(name in p.read_text() for name in _DATA_SETS)
]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs = corpus.load_runs(corpus.CASES, corpus.HEALTHY, None, (), [*QUICK, "healthy"])
    home = tmp_path_factory.mktemp("home")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases' own, such as broadcasting losses
        answers = [ours.ask(run, home) for run in runs]
    return score(runs, answers)


@pytest.mark.slow
def test_no_healthy_run_raises_an_alarm(result: dict[str, Any]) -> None:
    assert len(result["healthy"]) > len(QUICK)
    assert [h for h in result["healthy"] if h["alarms"] or h.get("error")] == []


@pytest.mark.slow
def test_the_tracker_breaks_on_none_of_them(result: dict[str, Any]) -> None:
    assert [c for c in result["cases"] if c.get("error")] == []


def _answer(alarms: tuple[str, ...], *guesses: Guess) -> Answer:
    return Answer(alarms, guesses, 1.0)


def test_scoring_follows_the_rules_of_the_corpus() -> None:
    def run(name: str, truth: corpus.Truth | None) -> corpus.Run:
        return corpus.Run(name, lambda: pytest.fail("not built"), truth)

    runs = [
        run("named", corpus.Truth(("dead_relu",), ("block.fc1",), 30, 2)),
        run("second", corpus.Truth(("log_of_zero",), (), None)),
        run("missed", corpus.Truth(("data_order",), ("a",), 5)),
        run("quiet", None),
        run("loud", None),
    ]
    answers = [
        _answer(("dead",), Guess("dead_relu", "block", 0.9, 33)),
        _answer(("nan",), Guess("nan_in_data", None, 0.6, 0), Guess("log_of_zero", None, 0.4, 0)),
        _answer((), Guess("healthy", None, 0.8, None)),
        _answer((), Guess("healthy", None, 1.0, None)),
        _answer(("oops",), Guess("healthy", None, 1.0, None)),
    ]
    found = score(runs, answers)["summary"]
    assert found == {
        "num_cases": 3,
        "num_healthy": 2,
        "detected": pytest.approx(2 / 3, abs=1e-4),
        "cause_at_1": pytest.approx(1 / 3, abs=1e-4),
        "cause_at_3": pytest.approx(2 / 3, abs=1e-4),
        "layer": 0.5,
        "onset": 0.5,
        "false_alarm_rate": 0.5,
        "brier": pytest.approx((0.01 + 0.36 + 0.64) / 3, abs=1e-4),
        "brier_with_healthy": pytest.approx((0.01 + 0.36 + 0.64) / 5, abs=1e-4),
    }


@pytest.mark.slow
def test_cases_of_any_folder_are_loaded_and_their_truth_is_left_to_scoring(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "import torch\n"
        "def build():\n"
        "    m = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), 0.1)\n"
        "    return dict(model=m, optimizer=o, steps=3, step=lambda i: m(torch.ones(4, 2)).mean(), metric=None,\n"
        "                truth=dict(category='healthy', layer=None, step=None))\n"
        "build_fixed = build\n"
    )
    runs = corpus.load_runs(tmp_path, None, None, ())
    assert [r.id for r in runs] == ["one", "one/twin"]
    answer = ours.ask(runs[0], tmp_path / "home")
    assert (answer.error, answer.alarms, answer.guesses[0].code) == ("", (), "healthy")


@pytest.mark.slow
def test_causes_layers_and_first_steps_stay_named(result: dict[str, Any]) -> None:
    summary = result["summary"]
    assert summary["num_cases"] == len(QUICK) > 25
    for what, least in {"detected": 0.95, "cause_at_1": 0.8, "cause_at_3": 0.95, "layer": 0.9, "onset": 0.9}.items():
        assert summary[what] >= least, what
    assert summary["brier"] <= 0.12
