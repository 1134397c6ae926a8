"""The journal: what is written is what is read, whatever happens to the writer or to the file."""

from __future__ import annotations

import sqlite3
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gradtracer import journal as journal_module
from gradtracer.errors import CorruptJournal
from gradtracer.journal import BLOCK_STEPS, JOURNAL_NAME, Journal, JournalWriter
from gradtracer.records import (
    CaptureNotice,
    Intervention,
    InterventionState,
    Measure,
    NonFiniteOrigin,
    SemanticEvent,
    Severity,
)
from gradtracer.samples import Layout, Sample
from tests import runs
from tests.families import family


def event(number: int, *, layer: str | None = "fc1", severity: Severity = Severity.WARNING) -> SemanticEvent:
    return SemanticEvent(
        id=f"e{number}",
        kind="update_ratio",
        step=10 * number,
        last_step=10 * number + 5,
        layer=layer,
        signal="update_ratio",
        from_state="healthy",
        to_state="too_high",
        severity=severity,
        confidence=0.9,
        evidence=(Measure(name="update_ratio", value=0.5, baseline=1e-3, threshold=0.1),),
        message="the update is half the weight",
    )


def intervention(number: int, state: InterventionState = InterventionState.PENDING) -> Intervention:
    return Intervention(
        id=f"i{number}",
        run_id="r",
        fix="set_learning_rate",
        mode="apply",
        requester="agent",
        state=state,
        requested_at_s=1.0,
    )


def write_run(directory: Path, num_steps: int, num_layers: int = 5, *, commit_every: int = 37) -> list[Sample]:
    """Record a run with events, facts and interventions; return its samples."""
    columns = runs.layout(num_layers)
    samples = [runs.sample(step, columns) for step in range(num_steps)]
    writer = JournalWriter(directory)
    for recorded in samples:
        writer.add_sample(recorded)
        if recorded.step % commit_every == 0:
            writer.commit()
    for number in range(1, 6):
        writer.put_event(event(number))
        writer.put_intervention(intervention(number))
        writer.add_observation(NonFiniteOrigin(step=number, where="forward", layer="fc1"))
    writer.close()
    return samples


def read_everything(directory: Path) -> None:
    with Journal(directory) as journal:
        journal.last_step()
        journal.steps()
        list(journal.tables())
        journal.table_steps()
        journal.events()
        journal.last_seq()
        journal.observations()
        journal.interventions()


def edit(directory: Path, sql: str, *parameters: object) -> None:
    db = sqlite3.connect(directory / JOURNAL_NAME, isolation_level=None)
    db.execute(sql, parameters)
    db.close()


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    samples = write_run(tmp_path, 3 * BLOCK_STEPS + 17)
    with Journal(tmp_path) as journal:
        columns = journal.steps()
        newest = journal.last_step()
    assert columns.steps.tolist() == [s.step for s in samples]
    assert columns.times.tolist() == [s.time_s for s in samples]
    for signal in journal_module.RUN_COLUMNS:
        expected = np.asarray([getattr(s, signal) for s in samples], dtype=np.float32)
        np.testing.assert_array_equal(columns.column(signal), expected)
    assert newest == (samples[-1].step, samples[-1].time_s, float(np.float32(samples[-1].loss)))


@pytest.mark.parametrize(("first", "last"), [(0, 0), (5, 5), (250, 260), (300, None), (0, 2**40), (900, 1000), (7, 3)])
def test_a_range_of_steps_holds_both_its_ends(tmp_path: Path, first: int, last: int | None) -> None:
    samples = write_run(tmp_path, 600)
    expected = [s.step for s in samples if first <= s.step and (last is None or s.step <= last)]
    with Journal(tmp_path) as journal:
        assert journal.steps(first, last).steps.tolist() == expected
        assert [step for step, _ in journal.tables(first, last)] == [s for s in expected if runs.is_sampled(s)]


def test_tables_are_read_bit_for_bit_and_in_order_of_steps(tmp_path: Path) -> None:
    columns, narrow = runs.layout(4), Layout((("blocks.0.linear", "grad_norm"),))
    look_back = runs.table(3, narrow)
    writer = JournalWriter(tmp_path)
    for step in range(10):
        writer.add_sample(runs.sample(step, columns))
    writer.add_table(3, look_back)
    writer.close()
    with Journal(tmp_path) as journal:
        tables = list(journal.tables())
        assert journal.table_steps() == list(range(10))
    assert [(step, table.look_back) for step, table in tables] == [
        (0, False), (1, False), (2, False), (3, True), (3, False), *((s, False) for s in range(4, 10)),
    ]  # fmt: skip
    for step, table in tables:
        expected = look_back if table.look_back else runs.table(step, columns)
        assert table.layout == expected.layout
        assert table.values.tobytes() == expected.values.tobytes()


def test_layer_names_of_any_characters_are_kept(tmp_path: Path) -> None:
    columns = Layout((("a\"<b>&'\x00\n", "grad_norm"), ("模型.层😀", "grad_norm"), ("\ud800", "weight_norm")))
    writer = JournalWriter(tmp_path)
    writer.add_table(0, runs.table(0, columns))
    writer.close()
    with Journal(tmp_path) as journal:
        ((_, table),) = journal.tables()
    assert table.layout == columns


def test_numbers_beyond_float32_become_non_finite(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.add_sample(Sample(step=0, time_s=0.0, loss=1e300, grad_norm=-1e300))
    writer.close()
    with Journal(tmp_path) as journal:
        columns = journal.steps()
    assert columns.column("loss").tolist() == [np.inf]
    assert columns.column("grad_norm").tolist() == [-np.inf]


def test_nothing_is_visible_before_the_commit(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.add_sample(runs.sample(0, runs.layout(1)))
    writer.put_event(event(1))
    with Journal(tmp_path) as journal:
        assert (journal.last_step(), journal.table_steps(), journal.events()) == (None, [], [])
        writer.commit()
        assert journal.last_step() is not None
        assert journal.table_steps() == [0]
        assert journal.events() == [(1, event(1))]
    writer.close()


def test_an_event_keeps_its_number_until_it_is_news_again(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.put_event(event(1))
    writer.put_event(event(2))
    moved = event(1).model_copy(update={"last_step": 99})
    writer.put_event(moved, announce=False)
    writer.commit()
    worse = event(2, severity=Severity.CRITICAL)
    with Journal(tmp_path) as journal:
        assert journal.events() == [(1, moved), (2, event(2))]
        assert journal.events(after_seq=2) == []
        writer.put_event(worse)
        writer.close()
        assert journal.events(after_seq=2) == [(3, worse)]
        assert (journal.last_seq(), journal.count_events(), journal.count_events(Severity.CRITICAL)) == (3, 2, 1)


def test_events_are_filtered_by_step_layer_kind_and_severity(tmp_path: Path) -> None:
    events = [event(1), event(2, layer=None), event(3, severity=Severity.INFO), event(4, severity=Severity.CRITICAL)]
    writer = JournalWriter(tmp_path)
    for found in events:
        writer.put_event(found)
    writer.close()

    with Journal(tmp_path) as journal:

        def ids(**filters: object) -> list[str]:
            return [e.id for _, e in journal.events(**filters)]  # pyright: ignore[reportArgumentType]

        assert ids(first=20, last=30) == ["e2", "e3"]
        assert ids(layer="fc1") == ["e1", "e3", "e4"]
        assert ids(kind="loss_spike") == []
        assert ids(min_severity=Severity.WARNING) == ["e1", "e2", "e4"]
        assert ids(limit=2) == ["e1", "e2"]


def test_observations_and_interventions_keep_their_order(tmp_path: Path) -> None:
    notices = [CaptureNotice(step=s, message=f"notice {s}") for s in (3, 1, 2)]
    origin = NonFiniteOrigin(step=2, where="data", num_non_finite=4)
    writer = JournalWriter(tmp_path)
    for observation in (*notices, origin):
        writer.add_observation(observation)
    for number in (2, 1):
        writer.put_intervention(intervention(number))
    writer.put_intervention(intervention(2, InterventionState.APPLIED))
    writer.close()
    with Journal(tmp_path) as journal:
        assert journal.observations() == [*notices, origin]
        assert journal.observations("non_finite_origin") == [origin]
        assert journal.interventions() == [intervention(2, InterventionState.APPLIED), intervention(1)]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_only_the_owner_can_read_any_file_of_the_journal(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.add_sample(runs.sample(0))
    writer.commit()
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    writer.close()
    assert modes == {JOURNAL_NAME: 0o600, f"{JOURNAL_NAME}-wal": 0o600, f"{JOURNAL_NAME}-shm": 0o600}


@pytest.mark.slow
@pytest.mark.parametrize("commit_every", [5, 50])
def test_ten_thousand_steps_of_a_hundred_layers_fit_in_a_megabyte(tmp_path: Path, commit_every: int) -> None:
    columns = runs.layout(100)
    writer = JournalWriter(tmp_path)
    for step in range(10_000):
        writer.add_sample(runs.sample(step, columns))
        if step % commit_every == 0:
            writer.commit()
    writer.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1_000_000


# Versions

NEXT = journal_module.VERSION + 1


def test_a_journal_of_version_zero_is_brought_to_the_newest(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_NAME).touch()
    with pytest.raises(CorruptJournal, match="has not recorded anything yet"):
        Journal(tmp_path)
    JournalWriter(tmp_path).close()
    with Journal(tmp_path) as journal:
        assert journal.last_step() is None


def test_an_older_journal_is_migrated_by_whoever_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = write_run(tmp_path, 20)
    added = "CREATE TABLE notes (note TEXT); INSERT INTO notes VALUES ('moved');"
    monkeypatch.setattr(journal_module, "MIGRATIONS", (*journal_module.MIGRATIONS, added))
    monkeypatch.setattr(journal_module, "VERSION", NEXT)
    for _ in range(2):
        with Journal(tmp_path) as journal:
            assert journal.steps().steps.tolist() == [s.step for s in samples]
    db = sqlite3.connect(tmp_path / JOURNAL_NAME)
    assert db.execute("SELECT note FROM notes").fetchall() == [("moved",)]
    assert db.execute("PRAGMA user_version").fetchone() == (NEXT,)
    db.close()


def test_a_migration_that_fails_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, 20)
    with monkeypatch.context() as patch:
        broken = "CREATE TABLE notes (note TEXT); CREATE TABLE notes (note TEXT);"
        patch.setattr(journal_module, "MIGRATIONS", (*journal_module.MIGRATIONS, broken))
        patch.setattr(journal_module, "VERSION", NEXT)
        with pytest.raises(CorruptJournal):
            Journal(tmp_path)
    with Journal(tmp_path) as journal:
        assert len(journal.steps().steps) == 20


def test_a_newer_journal_is_refused_by_reader_and_writer(tmp_path: Path) -> None:
    write_run(tmp_path, 5)
    edit(tmp_path, "PRAGMA user_version = 99")
    for opens in (Journal, JournalWriter):
        with pytest.raises(CorruptJournal, match=r"version 99.*upgrade gradtracer-mcp"):
            opens(tmp_path)


# Damage


def test_a_run_that_recorded_nothing_has_no_journal(tmp_path: Path) -> None:
    with pytest.raises(CorruptJournal, match="has not recorded anything yet"):
        Journal(tmp_path)


def test_a_file_that_is_no_database_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_NAME).write_bytes(b"this is not a database, whatever its name says" * 100)
    with pytest.raises(CorruptJournal, match="not a database"):
        Journal(tmp_path)


@pytest.mark.parametrize(
    ("table", "column"),
    [("events", "document"), ("observations", "document"), ("interventions", "document"), ("layouts", "columns"),
     ("blocks", "steps"), ("blocks", "times"), ("blocks", "numbers"), ("tables", "numbers"), ("tables", "layout")],
)  # fmt: skip
@pytest.mark.parametrize(
    "garbage",
    family(["{", "", "null", '{"kind":"model"}', b"\xff\x00", 7, 1.5, "[" * 100_000, "\x00"], "{", b"\xff\x00"),
)
def test_garbage_in_any_column_is_corrupt(tmp_path: Path, table: str, column: str, garbage: object) -> None:
    write_run(tmp_path, 30)
    edit(tmp_path, f"UPDATE {table} SET {column} = ?", garbage)
    with pytest.raises(CorruptJournal, match="cannot be read"):
        read_everything(tmp_path)


def test_text_that_is_no_text_is_corrupt(tmp_path: Path) -> None:
    write_run(tmp_path, 30)
    edit(tmp_path, "UPDATE events SET document = CAST(x'ff' AS TEXT)")
    with pytest.raises(CorruptJournal, match="cannot be read"):
        read_everything(tmp_path)


def flip_bits(data: bytearray, rng: np.random.Generator) -> None:
    for position in rng.integers(0, len(data), 1 + int(rng.integers(64))):
        data[position] ^= 1 << int(rng.integers(8))


def overwrite(data: bytearray, rng: np.random.Generator) -> None:
    start = int(rng.integers(len(data)))
    data[start : start + 4096] = rng.bytes(len(data[start : start + 4096]))


def truncate(data: bytearray, rng: np.random.Generator) -> None:
    del data[int(rng.integers(len(data))) :]


def flip_bits_of_the_header(data: bytearray, rng: np.random.Generator) -> None:
    data[int(rng.integers(200))] ^= 1 << int(rng.integers(8))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip_bits, overwrite, truncate, flip_bits_of_the_header])
@pytest.mark.parametrize("target", ["", "-wal"])
def test_a_damaged_file_is_read_or_corrupt_and_nothing_else(
    tmp_path: Path, damage: Callable[[bytearray, np.random.Generator], None], target: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_run(source, 400)
    writer = JournalWriter(source)
    writer.add_sample(runs.sample(400, runs.layout(5)))
    writer.commit()
    names = [JOURNAL_NAME, f"{JOURNAL_NAME}-wal"] if target else [JOURNAL_NAME]
    if target:  # Damage to the database itself shows only where the WAL does not cover the page.
        files = {name: (source / name).read_bytes() for name in names}
        writer.close()
    else:
        writer.close()
        files = {name: (source / name).read_bytes() for name in names}
    num_corrupt = 0
    for seed in range(100):
        directory = tmp_path / str(seed)
        directory.mkdir()
        for name, content in files.items():
            data = bytearray(content)
            if name == JOURNAL_NAME + target:
                damage(data, np.random.default_rng(seed))
            (directory / name).write_bytes(data)
        try:
            read_everything(directory)
        except CorruptJournal:
            num_corrupt += 1
    # A WAL carries checksums: SQLite takes it up to the first bad frame.
    assert num_corrupt == 0 if target else num_corrupt > 0
