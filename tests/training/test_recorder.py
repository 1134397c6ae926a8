"""The recorder: everything put is written, detectors are heard, and nothing that fails reaches the training."""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gradtracer.detectors.base import Detector, Finding
from gradtracer.journal import JOURNAL_NAME, Journal
from gradtracer.records import (
    CaptureNotice,
    Intervention,
    InterventionState,
    Measure,
    Observation,
    SemanticEvent,
    Severity,
)
from gradtracer.samples import Sample
from gradtracer.series import Series
from gradtracer.training.recorder import Recorder
from tests import runs
from tests.deadline import wait_until


class HighLoss(Detector):
    """Finds losses above 1: a warning, and critical above 10."""

    code = "high_loss"
    signal = "loss"
    leave_after = 2

    def __init__(self) -> None:
        self.observed: list[Observation] = []

    def observe(self, observation: Observation) -> None:
        self.observed.append(observation)

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        if sample.loss <= 1:
            return []
        severity = Severity.CRITICAL if sample.loss > 10 else Severity.WARNING
        return [Finding("high", severity, evidence=(Measure(name="loss", value=sample.loss, threshold=1.0),))]


class Raising(Detector):
    """Raises at step 3, after it found something."""

    code = "raising"
    signal = "loss"

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        if sample.step == 3:
            raise ZeroDivisionError("a bug of a detector")
        return [Finding("found", Severity.WARNING)]


class Gate(Detector):
    """Holds the recorder's thread at the first sample until it is opened."""

    code = "gate"
    signal = "loss"

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        self.reached.set()
        assert self.opened.wait(30)
        return None


def losses(*values: float) -> Iterator[Sample]:
    for step, loss in enumerate(values):
        yield Sample(step=step, time_s=float(step), loss=loss)


def intervention(state: InterventionState) -> Intervention:
    return Intervention(
        id="i1", run_id="r", fix="clip_grad_norm", mode="apply", requester="agent", state=state, requested_at_s=1.0
    )


def load(directory: Path) -> Series:
    with Journal(directory) as journal:
        return Series.from_journal(journal)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "gradtracer"]


def test_what_is_put_is_in_the_journal_in_order(tmp_path: Path) -> None:
    columns = runs.layout(3)
    samples = [runs.sample(step, columns) for step in range(300)]
    notice = CaptureNotice(step=7, message="no activations: the model is compiled")
    recorder = Recorder(tmp_path, [])
    for sample in samples:
        recorder.add_sample(sample)
    recorder.add_table(95, runs.table(95, columns))
    recorder.add_observation(notice)
    for state in (InterventionState.PENDING, InterventionState.APPLIED):
        recorder.put_intervention(intervention(state))
    recorder.close()
    series = load(tmp_path)
    assert [runs.numbers(s) for s in series.samples()] == [runs.numbers(s) for s in samples]
    assert [step for step, table in series.tables if table.look_back] == [95]
    assert series.observations == (notice,)
    assert series.interventions == (intervention(InterventionState.APPLIED),)


def test_after_a_flush_everything_put_before_is_visible(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, [], commit_interval_s=3600)
    with Journal(tmp_path) as journal:
        for step in range(5):
            recorder.add_sample(runs.sample(step))
            assert recorder.flush()
            assert journal.steps().steps.tolist() == list(range(step + 1))
    recorder.close()


def test_without_a_flush_it_is_visible_soon(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, [], commit_interval_s=0.01)
    recorder.add_sample(runs.sample(0))
    with Journal(tmp_path) as journal:
        wait_until(lambda: journal.last_step() is not None)
    recorder.close()


def test_closing_twice_or_flushing_and_putting_after_it_is_harmless(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, [HighLoss()])
    recorder.add_sample(runs.sample(0))
    recorder.close()
    recorder.close()
    for put in (
        lambda: recorder.add_sample(runs.sample(1)),
        lambda: recorder.add_table(1, runs.table(1, runs.layout(1))),
        lambda: recorder.add_observation(CaptureNotice(step=1, message="")),
        lambda: recorder.put_intervention(intervention(InterventionState.PENDING)),
    ):
        put()
    assert recorder.flush()
    assert load(tmp_path).steps.tolist() == [0]
    assert [t.name for t in threading.enumerate() if t.name == "gradtracer-recorder"] == []


def test_events_are_written_as_they_stand_and_told_when_they_are_news(tmp_path: Path) -> None:
    told: list[SemanticEvent] = []
    recorder = Recorder(tmp_path, [HighLoss()], on_event=told.append)
    for sample in losses(0.5, 2, 2, 20, 20, 2):
        recorder.add_sample(sample)
    assert recorder.flush()
    (event,) = recorder.events
    assert (event.step, event.last_step, event.severity, event.open) == (1, 5, Severity.CRITICAL, True)
    assert [(e.last_step, e.severity) for e in told] == [(1, Severity.WARNING), (3, Severity.CRITICAL)]
    assert load(tmp_path).events == (event,)
    recorder.close()


def test_open_warnings_are_counted_while_they_are_open(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, [HighLoss()])
    counts = []
    for sample in losses(0.5, 2, 0.5, 0.5, 0.5, 20, 20):
        recorder.add_sample(sample)
        recorder.flush()
        counts.append(recorder.num_open_warnings)
    recorder.close()
    assert counts == [0, 1, 1, 0, 0, 1, 1]
    assert [(e.id, e.open) for e in load(tmp_path).events] == [("e1", False), ("e2", True)]


def test_a_reader_that_waits_sees_an_event_once_for_each_piece_of_news(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, [HighLoss()], commit_interval_s=3600)
    seen: list[tuple[int, Severity]] = []
    with Journal(tmp_path) as journal:
        after_seq = 0
        for sample in losses(2, 2, 2, 20, 20, 20, 0.5, 0.5, 0.5):
            recorder.add_sample(sample)
            recorder.flush()
            for seq, event in journal.events(after_seq=after_seq):
                after_seq = seq
                seen.append((sample.step, event.severity))
    recorder.close()
    assert seen == [(0, Severity.WARNING), (3, Severity.CRITICAL)]


def test_detectors_are_told_the_facts_in_order(tmp_path: Path) -> None:
    detector = HighLoss()
    recorder = Recorder(tmp_path, [detector])
    notices = [CaptureNotice(step=step, message=f"{step}") for step in range(3)]
    for notice in notices:
        recorder.add_observation(notice)
    recorder.close()
    assert detector.observed == notices


def test_reading_while_writing_always_shows_a_whole_beginning(tmp_path: Path) -> None:
    columns = runs.layout(2)
    recorder = Recorder(tmp_path, [], commit_interval_s=0.001)

    def train() -> None:
        for step in range(2_000):
            recorder.add_sample(runs.sample(step, columns))
        recorder.close()

    training = threading.Thread(target=train)
    training.start()
    num_seen = 0
    while num_seen < 2_000:
        series = load(tmp_path)
        assert series.steps.tolist() == list(range(len(series.steps)))
        assert len(series.steps) >= num_seen
        num_seen = len(series.steps)
    training.join()


# Detectors and receivers that raise


def test_a_detector_that_raises_is_turned_off_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, [Raising(), HighLoss()])
    for sample in losses(0.5, 0.5, 0.5, 0.5, 2, 2):
        recorder.add_sample(sample)
    recorder.close()
    (warning,) = warnings_of(caplog)
    assert warning.getMessage() == "the detector raising raised, and is off for the rest of this run"
    assert "a bug of a detector" in caplog.text
    series = load(tmp_path)
    assert series.observations == (CaptureNotice(step=3, message=warning.getMessage()),)
    assert [(e.kind, e.step, e.last_step, e.open) for e in series.events] == [
        ("raising", 0, 2, False),
        ("high_loss", 4, 5, True),
    ]
    assert recorder.num_open_warnings == 1
    assert recorder.disabled_reason is None


def test_a_detector_that_cannot_take_a_fact_is_turned_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Picky(HighLoss):
        def observe(self, observation: Observation) -> None:
            raise KeyError(observation.kind)

    recorder = Recorder(tmp_path, [Picky()])
    recorder.add_observation(CaptureNotice(step=0, message="first"))
    for sample in losses(2, 2):
        recorder.add_sample(sample)
    recorder.close()
    assert len(warnings_of(caplog)) == 1
    series = load(tmp_path)
    assert series.events == ()
    assert [o.message for o in series.observations if isinstance(o, CaptureNotice)] == [
        "first",
        "the detector high_loss raised, and is off for the rest of this run",
    ]


@pytest.mark.parametrize("confidence", [math.nan, 7.0])
@pytest.mark.parametrize("from_loss", [2.0, 20.0])
def test_a_detector_that_finds_nonsense_leaves_a_readable_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, confidence: float, from_loss: float
) -> None:
    class Nonsense(HighLoss):
        def assess(self, sample: Sample) -> Sequence[Finding] | None:
            found = super().assess(sample) or []
            return [
                Finding(f.state, f.severity, confidence=confidence if sample.loss >= from_loss else 1) for f in found
            ]

    recorder = Recorder(tmp_path, [Nonsense()])
    for sample in losses(2, 2, 20, 20):
        recorder.add_sample(sample)
    recorder.close()
    assert len(load(tmp_path).events) == (from_loss == 20)
    assert len(warnings_of(caplog)) == 1


def test_a_receiver_of_events_that_raises_is_asked_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def receive(event: SemanticEvent) -> None:
        told.append(event.id)
        raise RuntimeError("a bug of the receiver")

    recorder = Recorder(tmp_path, [HighLoss()], on_event=receive)
    for sample in losses(2, 0.5, 0.5, 2):
        recorder.add_sample(sample)
    recorder.close()
    assert told == ["e1"]
    assert len(warnings_of(caplog)) == 1
    assert [e.id for e in load(tmp_path).events] == ["e1", "e2"]


# Disks that fail


def test_a_locked_journal_turns_recording_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, [HighLoss()], commit_interval_s=0.01, busy_timeout_s=0.1)
    recorder.add_sample(runs.sample(0))
    assert recorder.flush()
    lock = sqlite3.connect(tmp_path / JOURNAL_NAME, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    for sample in losses(0.5, 2, 2):
        recorder.add_sample(sample)
    wait_until(lambda: recorder.disabled_reason)
    assert recorder.disabled_reason == "OperationalError: database is locked"
    assert not recorder.flush()
    lock.close()
    for sample in losses(2, 2, 2):
        recorder.add_sample(sample)
    recorder.close()
    (warning,) = warnings_of(caplog)
    assert "recording is off for the rest of this run, training goes on" in warning.getMessage()
    assert load(tmp_path).steps.tolist() == [0]
    assert [e.kind for e in recorder.events] == ["high_loss"]  # Detectors go on in memory.


def test_a_lock_that_is_let_go_in_time_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path, [], busy_timeout_s=30)
    lock = sqlite3.connect(tmp_path / JOURNAL_NAME, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    recorder.add_sample(runs.sample(0))
    assert not recorder.flush(timeout_s=0.05)
    lock.close()
    assert recorder.flush(timeout_s=30)
    recorder.close()
    assert load(tmp_path).steps.tolist() == [0]
    assert warnings_of(caplog) == []


def test_a_journal_that_cannot_be_made_does_not_stop_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "missing", [HighLoss()])
    for sample in losses(0.5, 2):
        recorder.add_sample(sample)
    assert not recorder.flush()
    assert recorder.num_open_warnings == 1
    recorder.close()
    assert recorder.disabled_reason is not None
    assert "No such file or directory" in recorder.disabled_reason
    assert len(warnings_of(caplog)) == 1


def test_what_the_disk_does_not_keep_up_with_is_dropped_and_counted(tmp_path: Path) -> None:
    gate = Gate()
    recorder = Recorder(tmp_path, [gate], max_queue_bytes=100 * 512)
    recorder.add_sample(runs.sample(0))
    assert gate.reached.wait(30)
    for step in range(1, 1001):
        recorder.add_sample(runs.sample(step))
    recorder.put_intervention(intervention(InterventionState.APPLIED))
    gate.opened.set()
    assert recorder.flush(timeout_s=30)
    recorder.add_sample(runs.sample(1001))
    recorder.close()
    series = load(tmp_path)
    assert series.steps.tolist() == [*range(101), 1001]
    assert series.observations == (
        CaptureNotice(step=100, message="900 samples were not recorded: the disk did not keep up with the training"),
    )
    assert series.interventions == (intervention(InterventionState.APPLIED),)


def test_a_queue_of_large_tables_is_bounded_too(tmp_path: Path) -> None:
    gate = Gate()
    columns = runs.layout(50)
    recorder = Recorder(tmp_path, [gate], max_queue_bytes=10 * runs.table(0, columns).values.nbytes)
    recorder.add_sample(runs.sample(0))
    assert gate.reached.wait(30)
    for step in range(1, 101):
        recorder.add_table(step, runs.table(step, columns))
    gate.opened.set()
    recorder.close()
    assert 5 <= len(load(tmp_path).tables) <= 10
