"""The chain of hashes over the audit entries of a run: how it grows, and where it breaks.

Each entry is stored as the text of its canonical JSON (keys sorted, no spaces, UTF-8) with the hash of the entry before
in it, beside the SHA-256 of that text. So an entry cannot be changed, removed or moved without every later hash being
made anew; the manifest of a closed run keeps the last one, which finds a cut end and a remade chain. There is no secret
in it: whoever may write all files of a run can write another history.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from gradtracer.records import AuditEntry, AuditHead, Intervention


@dataclass(frozen=True)
class StoredEntry:
    """An entry as the journal keeps it."""

    seq: int
    document: str
    """Canonical JSON of the entry without its hash."""
    hash: str


@dataclass(frozen=True)
class Break:
    """The first place at which a chain does not hold."""

    seq: int
    problem: str


def seal(intervention: Intervention, time_s: float, head: AuditHead) -> StoredEntry:
    """The entry that comes behind `head`."""
    seq = head.num_entries + 1
    fields = {
        "seq": seq,
        "time_s": time_s,
        "intervention": intervention.model_dump(mode="json"),
        "previous_hash": head.hash,
    }
    document = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return StoredEntry(seq, document, _hash(document))


def head_of(stored: StoredEntry) -> AuditHead:
    """The head of a chain that ends in this entry."""
    return AuditHead(num_entries=stored.seq, hash=stored.hash)


def verify(
    stored: Sequence[StoredEntry], interventions: Iterable[Intervention], head: AuditHead | None
) -> tuple[list[AuditEntry], Break | None]:
    """Read a chain and look for the first entry that does not hold.

    Args:
        stored: The entries by number.
        interventions: The newest state of each intervention, which must be that of its last entry.
        head: Where the chain ended when the run was closed; None where it was not.

    Returns:
        The entries that can be read, and the first break; None where the chain holds.
    """
    entries: list[AuditEntry] = []
    broken: Break | None = None
    before = AuditHead()
    for one in stored:
        entry = _read(one)
        if entry is not None:
            entries.append(entry)
        if broken is None:
            broken = _break_at(one, entry, before)
            before = head_of(one) if broken is None else before
    if broken is None and head is not None and before != head:
        broken = _wrong_end(before, head)
    return entries, broken or _disagreement(before, {e.intervention.id: e.intervention for e in entries}, interventions)


def _read(stored: StoredEntry) -> AuditEntry | None:
    try:
        return AuditEntry.model_validate({**json.loads(stored.document), "hash": stored.hash})
    except (ValidationError, ValueError, TypeError, RecursionError):
        return None


def _break_at(stored: StoredEntry, entry: AuditEntry | None, before: AuditHead) -> Break | None:
    seq = before.num_entries + 1
    if stored.seq != seq:
        return Break(seq, "it is missing" if stored.seq > seq else f"an entry numbered {stored.seq} stands before it")
    if entry is None or _hash(stored.document) != stored.hash:
        return Break(seq, "it is not as it was written: its hash is another")
    if entry.seq != seq:
        return Break(seq, f"the entry numbered {entry.seq} stands in its place")
    if entry.previous_hash != before.hash:
        return Break(seq, "it does not follow the entry before it: that one has another hash now")
    return None


def _wrong_end(end: AuditHead, head: AuditHead) -> Break:
    if end.num_entries < head.num_entries:
        return Break(
            end.num_entries + 1,
            f"it is missing: the run closed with {head.num_entries} entries, {end.num_entries} are left",
        )
    if end.num_entries > head.num_entries:
        return Break(head.num_entries + 1, f"it was added after the run closed with {head.num_entries} entries")
    return Break(end.num_entries, "the chain was made anew: the run closed with another hash")


def _disagreement(end: AuditHead, last: Mapping[str, Intervention], newest: Iterable[Intervention]) -> Break | None:
    for intervention in newest:
        if last.get(intervention.id) != intervention:
            return Break(
                end.num_entries + 1,
                f"intervention {intervention.id} is recorded as {intervention.state.value}, which no entry says: "
                "entries are missing at the end, or that record was changed",
            )
    return None


def _hash(document: str) -> str:
    return hashlib.sha256(document.encode()).hexdigest()
