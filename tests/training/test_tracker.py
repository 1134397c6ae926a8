"""The tracker as a user meets it."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gradtracer
from gradtracer import FlowTracker, NeuralDbg
from gradtracer.errors import TrackerInUse, UsageError
from gradtracer.home import list_run_directories, read_manifest
from gradtracer.journal import Journal
from tests.training.models import Training, cnn, mlp


def test_neuraldbg_is_the_same_class_and_explains() -> None:
    assert NeuralDbg is FlowTracker
    training = mlp()
    with NeuralDbg(training.model) as dbg:
        training.run(30)
    hypotheses = dbg.explain_failure()
    assert hypotheses[0].code == "healthy"
    assert sum(h.probability for h in hypotheses) == pytest.approx(1.0)


def test_report_prints_what_a_person_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    training = mlp()
    tracker = FlowTracker(training.model, training.optimizer, run_name="a run of mine")
    training.run(20, lambda loss: tracker.step(loss.item()))
    tracker.report()
    tracker.close()
    printed = capsys.readouterr().out
    assert "a run of mine" in printed
    assert "loss" in printed.lower()


def test_an_exception_in_the_loop_is_recorded_and_passes_through() -> None:
    training = mlp()
    tracker = FlowTracker(training.model)

    def loop() -> None:
        with tracker:
            training.run(3)
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        loop()
    manifest = read_manifest(tracker.directory)
    assert manifest.state == "crashed"
    assert manifest.error is not None
    assert "KeyError: 'lost'" in manifest.error
    assert "test_tracker.py" in manifest.error
    with Journal(tracker.directory) as journal:
        assert journal.steps().steps.tolist() == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "code", "state"),
    [("", 0, "finished"), ("raise ValueError('oh')", 1, "crashed"), ("exit(3)", 3, "finished")],
)
def test_a_program_that_never_closes_its_tracker_leaves_a_finished_or_crashed_run(
    home: Path, ending: str, code: int, state: str
) -> None:
    program = (
        "import torch; from gradtracer import FlowTracker; m = torch.nn.Linear(2, 1); "
        "o = torch.optim.SGD(m.parameters(), 0.1); t = FlowTracker(m, o)\n"
        "for _ in range(5):\n m(torch.ones(1, 2)).sum().backward(); o.step(); t.step(1.0)\n" + ending
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    (directory,) = list_run_directories(home)
    manifest = read_manifest(directory)
    assert manifest.state == state
    if state == "crashed":
        assert manifest.error is not None
        assert "ValueError: oh" in manifest.error
    with Journal(directory) as journal:
        assert journal.steps().steps.tolist() == list(range(5))


def test_run_directories_are_private_and_hold_a_manifest_and_a_journal() -> None:
    training = mlp()
    with FlowTracker(training.model) as tracker:
        assert tracker.directory.stat().st_mode & 0o777 == 0o700
        for name in ("run.json", "journal.sqlite"):
            assert (tracker.directory / name).stat().st_mode & 0o777 == 0o600
        manifest = read_manifest(tracker.directory)
        assert manifest.address is not None
        assert len(manifest.token) > 20


def test_without_serve_there_is_no_socket() -> None:
    training = mlp()
    with FlowTracker(training.model, serve=False) as tracker:
        training.run(2)
    assert read_manifest(tracker.directory).address is None


def test_two_trackers_on_one_model_or_on_one_that_shares_weights_are_refused() -> None:
    training = mlp()
    wrapper = nn.Sequential(training.model)
    with FlowTracker(training.model):
        with pytest.raises(TrackerInUse, match="close it first"):
            FlowTracker(training.model)
        with pytest.raises(TrackerInUse):
            FlowTracker(wrapper)
        FlowTracker(cnn().model).close()
    FlowTracker(wrapper).close()


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"model": "a model"}, TypeError, "torch.nn.Module"),
        ({"model": nn.ReLU()}, UsageError, "no parameters"),
        ({"optimizer": 0.1}, TypeError, "Optimizer"),
        ({"optimizer": [0.1]}, TypeError, "Optimizer"),
        ({"track_interval": 0}, UsageError, "at least 1"),
        ({"track_interval": 1.5}, UsageError, "whole number"),
        ({"autofix": "bold"}, UsageError, "autofix"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_made(
    home: Path, arguments: dict[str, object], error: type[Exception], says: str
) -> None:
    arguments = {"model": mlp().model, **arguments}
    with pytest.raises(error, match=says):
        FlowTracker(**arguments)  # type: ignore[arg-type]
    assert list_run_directories(home) == []


@pytest.mark.parametrize("loss", ["low", [1.0, 2.0], torch.ones(2)])
def test_a_loss_that_is_no_number_is_refused(loss: object) -> None:
    training = mlp()
    with FlowTracker(training.model) as tracker, pytest.raises(TypeError, match="loss"):
        tracker.step(loss)  # type: ignore[arg-type]


def test_a_closed_tracker_lets_training_go_on_and_ignores_steps() -> None:
    training: Training = mlp()
    tracker = FlowTracker(training.model, training.optimizer)
    training.run(3, lambda loss: tracker.step(loss.item()))
    tracker.close()
    tracker.close()
    training.run(3, lambda loss: tracker.step(loss.item()))
    with Journal(tracker.directory) as journal:
        assert journal.steps().steps.tolist() == [0, 1, 2]


def test_a_tracker_is_not_pickled_and_a_copy_of_its_holder_keeps_the_same() -> None:
    training = mlp()
    with FlowTracker(training.model) as tracker:
        assert copy.deepcopy({"tracker": tracker})["tracker"] is tracker
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(tracker)


def test_the_package_names_what_it_lacks() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        gradtracer.no_such_name  # noqa: B018


@pytest.mark.slow
def test_a_full_disk_turns_recording_off_and_training_is_untouched(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3

    from gradtracer.journal import JournalWriter

    plain = mlp().run(200)
    training = mlp()
    tracker = FlowTracker(training.model, training.optimizer, track_interval=1)

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(JournalWriter, "commit", full)
    assert training.run(200, lambda loss: tracker.step(loss.item())) == plain
    tracker.report()
    tracker.close()
    assert len([r for r in caplog.records if "disk is full" in r.getMessage()]) == 1
    assert math.isfinite(plain[-1])
