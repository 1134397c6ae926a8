"""The audit trail: whatever is done to its entries afterwards is found, at the first entry that does not hold."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from gradtracer.journal import JOURNAL_NAME, Journal, JournalWriter
from gradtracer.records import AuditHead, Intervention, InterventionState

P, A, K, R = (InterventionState(s) for s in ("pending", "applied", "kept", "refused"))
COURSE = (("i1", P), ("i1", A), ("i2", P), ("i2", R), ("i1", K), ("i3", P), ("i3", A))


def intervention(name: str, state: InterventionState) -> Intervention:
    return Intervention(
        id=name,
        run_id="r",
        fix="set_learning_rate",
        mode="apply",
        requester="agent-1",
        reason="é \N{SNOWMAN} 'quoted' \"twice\"",
        state=state,
        requested_at_s=1.5,
    )


def write(directory: Path) -> AuditHead:
    writer = JournalWriter(directory)
    for i, (name, state) in enumerate(COURSE):
        writer.put_intervention(intervention(name, state), 100.0 + i)
    head = writer.audit_head
    writer.close()
    return head


def edit(directory: Path, *statements: str) -> None:
    db = sqlite3.connect(directory / JOURNAL_NAME, isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


def rows(directory: Path) -> list[tuple[int, str, str]]:
    db = sqlite3.connect(directory / JOURNAL_NAME)
    found = db.execute("SELECT seq, document, hash FROM audit ORDER BY seq").fetchall()
    db.close()
    return found


def break_of(directory: Path, head: AuditHead | None) -> tuple[int, str] | None:
    with Journal(directory) as journal:
        _, broken = journal.audit(head)
    return (broken.seq, broken.problem) if broken else None


def by_hand(directory: Path) -> AuditHead:
    """The head of the chain, made anew from the interventions alone, as the docstrings describe it."""
    previous = "0" * 64
    for i, (name, state) in enumerate(COURSE):
        entry = {
            "intervention": json.loads(intervention(name, state).model_dump_json()),
            "previous_hash": previous,
            "seq": i + 1,
            "time_s": 100.0 + i,
        }
        text = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        previous = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return AuditHead(num_entries=len(COURSE), hash=previous)


def test_every_state_is_an_entry_chained_to_the_one_before_and_the_newest_states_stay_as_they_are(
    tmp_path: Path,
) -> None:
    head = write(tmp_path)
    assert head == by_hand(tmp_path)
    with Journal(tmp_path) as journal:
        entries, broken = journal.audit(head)
        assert journal.interventions() == [intervention("i1", K), intervention("i2", R), intervention("i3", A)]
    assert broken is None
    assert [(e.seq, e.time_s, e.intervention) for e in entries] == [
        (i + 1, 100.0 + i, intervention(name, state)) for i, (name, state) in enumerate(COURSE)
    ]
    assert [e.previous_hash for e in entries] == ["0" * 64, *(e.hash for e in entries[:-1])]
    assert break_of(tmp_path, None) is None


def test_a_writer_that_opens_a_journal_again_goes_on_with_its_chain(tmp_path: Path) -> None:
    head = write(tmp_path)
    writer = JournalWriter(tmp_path)
    assert writer.audit_head == head
    writer.put_intervention(intervention("i3", K))
    longer = writer.audit_head
    writer.close()
    assert longer.num_entries == len(COURSE) + 1
    assert break_of(tmp_path, longer) is None
    assert break_of(tmp_path, head) == (8, "it was added after the run closed with 7 entries")


def test_a_run_that_nobody_acted_on_has_an_empty_chain_and_one_slipped_in_is_found(tmp_path: Path) -> None:
    JournalWriter(tmp_path).close()
    assert break_of(tmp_path, AuditHead()) is None
    writer = JournalWriter(tmp_path)
    writer.put_intervention(intervention("i1", P))
    writer.close()
    assert break_of(tmp_path, AuditHead()) == (1, "it was added after the run closed with 0 entries")


def tamper(seq: int, old: str, new: str) -> str:
    return f"UPDATE audit SET document = replace(document, '{old}', '{new}') WHERE seq = {seq}"


def swap(first: int, second: int, *columns: str) -> tuple[str, ...]:
    return (
        "CREATE TEMP TABLE kept AS SELECT * FROM audit",
        *(
            f"UPDATE audit SET {c} = (SELECT {c} FROM kept WHERE seq = {a}) WHERE seq = {b}"
            for c in columns
            for a, b in ((first, second), (second, first))
        ),
    )


FOUND = {
    "who asked is changed": ((tamper(3, "agent-1", "agent-2"),), 3, "not as it was written"),
    "the time is changed": ((tamper(1, "100.0", "99.0"),), 1, "not as it was written"),
    "a space is added": ((tamper(4, ":", ": "),), 4, "not as it was written"),
    "the last is changed": ((tamper(7, "applied", "refused"),), 7, "not as it was written"),
    "a hash is changed": ((f"UPDATE audit SET hash = '{'0' * 64}' WHERE seq = 2",), 2, "not as it was written"),
    "it is no entry any more": (("UPDATE audit SET document = '[1]' WHERE seq = 5",), 5, "not as it was written"),
    "it is a blob": (("UPDATE audit SET document = x'00' WHERE seq = 5",), 5, "not as it was written"),
    "one is removed": (("DELETE FROM audit WHERE seq = 4",), 4, "it is missing"),
    "the first is removed": (("DELETE FROM audit WHERE seq = 1",), 1, "it is missing"),
    "one is removed and the rest renumbered": (
        ("DELETE FROM audit WHERE seq = 4", "UPDATE audit SET seq = seq - 1 WHERE seq > 4"),
        4,
        "the entry numbered 5 stands in its place",
    ),
    "one is put before the first": (("UPDATE audit SET seq = 0 WHERE seq = 1",), 1, "an entry numbered 0"),
    "two are exchanged": (swap(2, 5, "document", "hash"), 2, "the entry numbered 5 stands in its place"),
    "two documents are exchanged": (swap(2, 5, "document"), 2, "not as it was written"),
    "all are removed": (("DELETE FROM audit",), 1, "the run closed with 7 entries, 0 are left"),
    "the end is cut": (("DELETE FROM audit WHERE seq > 5",), 6, "the run closed with 7 entries, 5 are left"),
    "the newest state is changed": (
        ("UPDATE interventions SET document = replace(document, 'refused', 'kept') WHERE id = 'i2'",),
        8,
        "intervention i2 is recorded as kept, which no entry says",
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_was_done_to_the_chain_is_found_at_its_first_broken_entry(tmp_path: Path, what: str) -> None:
    statements, seq, problem = FOUND[what]
    head = write(tmp_path)
    before = rows(tmp_path)
    edit(tmp_path, *statements)
    assert rows(tmp_path) != before or "interventions" in statements[0]
    found = break_of(tmp_path, head)
    assert found is not None
    assert (found[0], problem in found[1]) == (seq, True), found


@pytest.mark.parametrize(("cut", "shows"), [(1, "i1"), (4, "i1"), (6, "i3")])
def test_a_cut_end_of_a_run_that_was_never_closed_is_found_by_the_newest_states(
    tmp_path: Path, cut: int, shows: str
) -> None:
    write(tmp_path)
    edit(tmp_path, f"DELETE FROM audit WHERE seq > {cut}")
    found = break_of(tmp_path, None)
    assert found is not None
    assert found[0] == cut + 1
    assert f"intervention {shows}" in found[1]


def remake(directory: Path, change: Callable[[int, dict], None]) -> None:
    """What someone does who knows how the chain is made: an entry is changed and every later hash made anew."""
    previous = "0" * 64
    for seq, document, _ in rows(directory):
        entry = json.loads(document)
        change(seq, entry)
        entry["previous_hash"] = previous
        text = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        previous = hashlib.sha256(text.encode()).hexdigest()
        db = sqlite3.connect(directory / JOURNAL_NAME)
        with db:
            db.execute("UPDATE audit SET document = ?, hash = ? WHERE seq = ?", (text, previous, seq))
        db.close()


def test_a_chain_that_was_made_anew_is_found_by_the_head_in_the_manifest_alone(tmp_path: Path) -> None:
    head = write(tmp_path)
    remake(tmp_path, lambda _seq, _entry: None)
    assert break_of(tmp_path, head) is None

    def hide(seq: int, entry: dict) -> None:
        if seq == 3:
            entry["time_s"] = 50.0

    remake(tmp_path, hide)
    assert break_of(tmp_path, None) is None
    assert break_of(tmp_path, head) == (7, "the chain was made anew: the run closed with another hash")


def test_entries_that_can_be_read_are_shown_beside_the_break(tmp_path: Path) -> None:
    head = write(tmp_path)
    edit(tmp_path, "UPDATE audit SET document = '{}' WHERE seq = 5", tamper(2, "agent-1", "agent-9"))
    with Journal(tmp_path) as journal:
        entries, broken = journal.audit(head)
    assert [e.seq for e in entries] == [1, 2, 3, 4, 6, 7]
    assert broken is not None
    assert broken.seq == 2


def test_interventions_of_a_journal_from_before_the_audit_trail_are_said_to_be_without_entries(tmp_path: Path) -> None:
    write(tmp_path)
    edit(tmp_path, "DROP TABLE audit", "PRAGMA user_version = 1")
    found = break_of(tmp_path, None)
    assert found is not None
    assert found[0] == 1
    with Journal(tmp_path) as journal:
        assert len(journal.interventions()) == 3
