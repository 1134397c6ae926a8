"""The journal of a run: SQLite in WAL mode, written in batches, readable after any crash.

Two readers' rules shape the format. Numbers that come every step are packed into blocks of steps, those of a sampled
step into one row, so that neither size nor read time grows with the count of layers. And whatever is committed
survives ``kill -9`` of the writer: WAL with ``synchronous=NORMAL`` loses at most what was not yet committed
(https://www.sqlite.org/wal.html), and the recorder commits at least once a second.

Numbers are float32 (steps int64, times float64), little-endian, coded as `gradtracer.signals` says. An array is packed
by writing the first bytes of all its numbers, then all second bytes, and so on, and deflating that: signs and exponents
of like numbers are alike, mantissas are noise. Steps, and times by their bit patterns, are first replaced by their
differences. The Adler-32 checksum of the deflated stream tells a damaged array from a whole one. Measured on noise of
the spread of real gradients, that is 85 % of the plain size for layer tables, and a third for blocks.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from gradtracer.audit_chain import Break, StoredEntry, head_of, seal, verify
from gradtracer.errors import CorruptJournal
from gradtracer.records import AuditEntry, AuditHead, Intervention, Observation, SemanticEvent, Severity
from gradtracer.samples import LayerTable, Layout, Sample

JOURNAL_NAME = "journal.sqlite"
# Large enough to compress and to scan quickly; the newest block is rewritten at each commit until it is full, so small
# enough that this stays within a few kilobytes.
BLOCK_STEPS = 256
RUN_COLUMNS = ("loss", "grad_norm", "learning_rate", "step_time_s", "num_non_finite_grads")

T = TypeVar("T")

_OBSERVATION: TypeAdapter[Observation] = TypeAdapter(Observation)

_SCHEMA_1 = """
CREATE TABLE blocks (
    id INTEGER PRIMARY KEY, first_step INTEGER NOT NULL, last_step INTEGER NOT NULL,
    steps BLOB NOT NULL, times BLOB NOT NULL, numbers BLOB NOT NULL);
CREATE INDEX blocks_by_step ON blocks (first_step, last_step);
CREATE TABLE layouts (id INTEGER PRIMARY KEY, columns BLOB NOT NULL);
CREATE TABLE tables (
    step INTEGER NOT NULL, look_back INTEGER NOT NULL, layout INTEGER NOT NULL REFERENCES layouts (id),
    numbers BLOB NOT NULL);
CREATE INDEX tables_by_step ON tables (step, look_back DESC);
CREATE TABLE events (
    id TEXT PRIMARY KEY, seq INTEGER NOT NULL, step INTEGER NOT NULL, severity INTEGER NOT NULL,
    layer TEXT, kind TEXT NOT NULL, document TEXT NOT NULL);
CREATE INDEX events_by_seq ON events (seq);
CREATE TABLE observations (seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, kind TEXT NOT NULL, document TEXT NOT NULL);
CREATE TABLE interventions (id TEXT PRIMARY KEY, seq INTEGER NOT NULL, document TEXT NOT NULL);
"""

_SCHEMA_2 = """
CREATE TABLE audit (seq INTEGER PRIMARY KEY, document TEXT NOT NULL, hash TEXT NOT NULL)
"""

# Migrations in order: entry n brings a journal from version n to n + 1. Append, never edit.
MIGRATIONS: tuple[str, ...] = (_SCHEMA_1, _SCHEMA_2)
VERSION = len(MIGRATIONS)


class JournalWriter:
    """Appends to a journal; one writer a journal, used from one thread at a time.

    Nothing is visible to readers before `commit`. Errors of the disk or of SQLite come out as `sqlite3.Error` or
    `OSError`; the recorder turns itself off on the first.

    Args:
        directory: The run directory; it must exist.
        busy_timeout_s: How long to wait for a lock that someone else holds.
    """

    def __init__(self, directory: Path, *, busy_timeout_s: float = 5.0) -> None:
        path = directory / JOURNAL_NAME
        # Made with its mode before SQLite opens it: the -wal and -shm files inherit the mode of the database.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=busy_timeout_s)
        try:
            # Layer tables are rows of several kilobytes, and what they leave of a page is lost: up to a quarter of the
            # file with the default of 4096. A commit writes less, too.
            self._db.execute("PRAGMA page_size=1024")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            migrate(self._db)
            self._seq: int = self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM events").fetchone()[0]
            last = self._db.execute("SELECT seq, document, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
            self.audit_head = head_of(StoredEntry(*last)) if last else AuditHead()
            """End of the audit trail so far."""
        except BaseException:
            self._db.close()
            raise
        self._layouts: dict[Layout, int] = {}
        self._block: list[Sample] = []
        self._block_id: int | None = None
        self._num_in_block = 0
        self._in_transaction = False

    def add_sample(self, sample: Sample) -> None:
        """Append one step, with its layer table where it has one."""
        self._block.append(sample)
        if sample.layers is not None:
            self._insert_table(sample.step, sample.layers, look_back=False)

    def add_table(self, step: int, table: LayerTable) -> None:
        """Append a look-back table: one of a step that is already appended, and was not sampled then."""
        self._insert_table(step, table, look_back=True)

    def _insert_table(self, step: int, table: LayerTable, *, look_back: bool) -> None:
        self._begin()
        layout_id = self._layouts.get(table.layout)
        if layout_id is None:
            document = zlib.compress(json.dumps(table.layout.columns).encode())
            layout_id = self._db.execute("INSERT INTO layouts (columns) VALUES (?)", (document,)).lastrowid
            assert layout_id is not None
            self._layouts[table.layout] = layout_id
        self._db.execute(
            "INSERT INTO tables VALUES (?, ?, ?, ?)", (step, look_back, layout_id, _pack_floats(table.values))
        )

    def put_event(self, event: SemanticEvent, *, announce: bool = True) -> None:
        """Insert or replace an event.

        Args:
            event: Its id decides which event is replaced.
            announce: Whether those who wait for events should be woken: true for new and escalated events, false
                where only the last step moved.
        """
        self._begin()
        if announce:
            self._seq += 1
        self._db.execute(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
            "seq = CASE WHEN ? THEN excluded.seq ELSE seq END, step = excluded.step, severity = excluded.severity, "
            "layer = excluded.layer, kind = excluded.kind, document = excluded.document",
            (event.id, self._seq, event.step, event.severity.rank, event.layer, event.kind, event.model_dump_json(),
             announce),
        )  # fmt: skip

    def add_observation(self, observation: Observation) -> None:
        """Append an observation."""
        self._begin()
        self._db.execute(
            "INSERT INTO observations (step, kind, document) VALUES (?, ?, ?)",
            (observation.step, observation.kind, observation.model_dump_json()),
        )

    def put_intervention(self, intervention: Intervention, time_s: float | None = None) -> None:
        """Insert or replace an intervention, and append to the audit trail how it stands now.

        Args:
            intervention: Its id decides which is replaced.
            time_s: Unix time at which it came to stand so, seconds; now by default.
        """
        self._begin()
        entry = seal(intervention, time.time() if time_s is None else time_s, self.audit_head)
        self._db.execute("INSERT INTO audit VALUES (?, ?, ?)", (entry.seq, entry.document, entry.hash))
        self.audit_head = head_of(entry)
        self._db.execute(
            "INSERT INTO interventions SELECT ?, COALESCE(MAX(seq), 0) + 1, ? FROM interventions WHERE true "
            "ON CONFLICT (id) DO UPDATE SET document = excluded.document",
            (intervention.id, intervention.model_dump_json()),
        )

    def commit(self) -> None:
        """Make everything appended so far durable and visible."""
        if len(self._block) > self._num_in_block:
            self._begin()
            steps = np.asarray([s.step for s in self._block], dtype="<i8")
            times = np.asarray([s.time_s for s in self._block], dtype="<f8")
            numbers = np.asarray([[getattr(s, c) for s in self._block] for c in RUN_COLUMNS])
            self._block_id = self._db.execute(
                "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?)",
                (self._block_id, int(steps[0]), int(steps[-1]), _pack_ints(steps), _pack_ints(times.view("<i8")),
                 _pack_floats(numbers)),
            ).lastrowid  # fmt: skip
            self._num_in_block = len(self._block)
            if self._num_in_block >= BLOCK_STEPS:
                self._block, self._block_id, self._num_in_block = [], None, 0
        if self._in_transaction:
            self._db.execute("COMMIT")
            self._in_transaction = False

    def close(self) -> None:
        """Commit, fold the WAL into the database and close."""
        try:
            self.commit()
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self._db.close()

    def abandon(self) -> None:
        """Close without a commit, after an error."""
        self._db.close()

    def _begin(self) -> None:
        if not self._in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
            self._in_transaction = True


def migrate(db: sqlite3.Connection) -> None:
    """Bring a journal to the newest version, one migration a transaction.

    Raises:
        CorruptJournal: If it was written by a newer version of the package.
    """
    while (version := _version(db)) < VERSION:
        db.execute("BEGIN IMMEDIATE")
        try:
            # Read again under the lock: another process may have been faster.
            if _version(db) == version:
                for statement in MIGRATIONS[version].split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {version + 1}")
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise


def _version(db: sqlite3.Connection) -> int:
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if not 0 <= version <= VERSION:
        path = db.execute("PRAGMA database_list").fetchone()[2]
        raise CorruptJournal(
            f"{path} has version {version}, this package reads up to {VERSION}: upgrade gradtracer-mcp"
        )
    return version


def _pack(array: NDArray[Any]) -> bytes:
    by_byte = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T
    # Runs and symbol frequencies are all that noise offers; the flush gives the bytes of each place a code of their
    # own. Both together take 6 % less than plain deflate.
    stream = zlib.compressobj(6, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    places = [stream.compress(place.tobytes()) + stream.flush(zlib.Z_PARTIAL_FLUSH) for place in by_byte]
    return b"".join(places) + stream.flush()


def _unpack(blob: bytes, dtype: str) -> NDArray[Any]:
    by_byte = np.frombuffer(zlib.decompress(blob), dtype=np.uint8).reshape(np.dtype(dtype).itemsize, -1)
    return np.ascontiguousarray(by_byte.T).reshape(-1).view(dtype)


def _pack_floats(array: NDArray[Any]) -> bytes:
    with np.errstate(over="ignore"):
        return _pack(array.astype("<f4"))


def _pack_ints(array: NDArray[Any]) -> bytes:
    return _pack(np.diff(array, prepend=np.zeros(1, array.dtype)))


def _unpack_ints(blob: bytes) -> NDArray[Any]:
    return np.cumsum(_unpack(blob, "<i8"), dtype="<i8")


@dataclass(frozen=True)
class StepColumns:
    """Run signals by step: `steps` int64 `[n]`, `times` float64 `[n]`, `numbers` float32 `[n, len(RUN_COLUMNS)]`."""

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    numbers: NDArray[np.float32]

    def column(self, signal: str) -> NDArray[np.float32]:
        """One run signal, `[n]`."""
        return self.numbers[:, RUN_COLUMNS.index(signal)]


class Journal:
    """Reads a journal, also while it is being written, and after the writer was killed.

    Args:
        directory: The run directory.

    Raises:
        CorruptJournal: From any method, if the file is no journal, is damaged, or is of a newer version.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / JOURNAL_NAME
        if not self.path.is_file():
            raise CorruptJournal(f"{directory} holds no {JOURNAL_NAME}: the run has not recorded anything yet")
        with self._errors():
            # Not immutable and not mode=ro: after a kill the reader itself must recover the WAL, which writes -shm.
            self._db = sqlite3.connect(f"{self.path.as_uri()}?mode=rw", uri=True, check_same_thread=False, timeout=5.0)
        try:
            with self._errors():
                if _version(self._db) == 0:
                    raise CorruptJournal(f"{self.path} is empty: the run has not recorded anything yet")
                migrate(self._db)
                self._db.execute("PRAGMA query_only=ON")
        except BaseException:
            self._db.close()
            raise
        self._layouts: dict[int, Layout] = {}

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def steps(self, first: int = 0, last: int | None = None) -> StepColumns:
        """Run signals of steps `first` to `last`, both included."""
        rows = self._all(
            "SELECT steps, times, numbers FROM blocks WHERE last_step >= ? AND first_step <= ? ORDER BY id",
            (first, _upper(last)),
        )
        with self._errors():
            blocks = [_unpack_block(*row) for row in rows]
        if not blocks:
            return StepColumns(np.empty(0, np.int64), np.empty(0), np.empty((0, len(RUN_COLUMNS)), np.float32))
        steps, times, numbers = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        keep = (steps >= first) & (steps <= _upper(last))
        return StepColumns(steps[keep], times[keep], numbers[keep])

    def tables(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, LayerTable]]:
        """Layer tables of steps `first` to `last`, by step; the look-back table of a step comes before its own."""
        rows = self._all(
            "SELECT step, look_back, layout, numbers FROM tables WHERE step BETWEEN ? AND ? "
            "ORDER BY step, look_back DESC, rowid",
            (first, _upper(last)),
        )
        for step, look_back, layout_id, numbers in rows:
            yield step, self._table(step, look_back, layout_id, numbers)

    def newest_table(self, at_or_before: int | None = None) -> tuple[int, LayerTable] | None:
        """The newest layer table at or before a step (the newest of all by default) that is no look-back table."""
        rows = self._all(
            "SELECT step, look_back, layout, numbers FROM tables WHERE step <= ? AND NOT look_back "
            "ORDER BY step DESC, rowid DESC LIMIT 1",
            (_upper(at_or_before),),
        )
        return next(((row[0], self._table(*row)) for row in rows), None)

    def table_steps(self) -> list[int]:
        """Steps that have a layer table, ascending."""
        return [row[0] for row in self._all("SELECT DISTINCT step FROM tables ORDER BY step")]

    def events(
        self,
        *,
        after_seq: int = 0,
        first: int = 0,
        last: int | None = None,
        layer: str | None = None,
        kind: str | None = None,
        min_severity: Severity = Severity.INFO,
        limit: int = -1,
    ) -> list[tuple[int, SemanticEvent]]:
        """Events with their sequence numbers, oldest announcement first.

        Args:
            after_seq: Only events announced (found or escalated) after this number; the last number of one answer
                is the `after_seq` of the next.
            first: Only episodes that begin at this step or later.
            last: Only episodes that begin at this step or earlier.
            layer: Only this layer.
            kind: Only this detector.
            min_severity: Only this severity or above.
            limit: At most so many; all where negative.
        """
        rows = self._all(
            "SELECT seq, document FROM events WHERE seq > ?1 AND step BETWEEN ?2 AND ?3 AND severity >= ?4 "
            "AND (?5 IS NULL OR layer = ?5) AND (?6 IS NULL OR kind = ?6) ORDER BY seq, id LIMIT ?7",
            (after_seq, first, _upper(last), min_severity.rank, layer, kind, limit),
        )
        return [(seq, self._parse(SemanticEvent.model_validate_json, document)) for seq, document in rows]

    def last_seq(self) -> int:
        """Number of the newest announcement; 0 before the first event."""
        return self._all("SELECT COALESCE(MAX(seq), 0) FROM events")[0][0]

    def count_events(self, min_severity: Severity = Severity.INFO) -> int:
        """How many events there are."""
        return self._all("SELECT COUNT(*) FROM events WHERE severity >= ?", (min_severity.rank,))[0][0]

    def observations(self, kind: str | None = None) -> list[Observation]:
        """Observations in order."""
        rows = self._all("SELECT document FROM observations WHERE ?1 IS NULL OR kind = ?1 ORDER BY seq", (kind,))
        return [self._parse(_OBSERVATION.validate_json, document) for (document,) in rows]

    def interventions(self) -> list[Intervention]:
        """Interventions in the order in which they were asked for."""
        rows = self._all("SELECT document FROM interventions ORDER BY seq")
        return [self._parse(Intervention.model_validate_json, document) for (document,) in rows]

    def audit(self, head: AuditHead | None) -> tuple[list[AuditEntry], Break | None]:
        """The audit trail, and where it breaks; see `gradtracer.audit_chain.verify`."""
        rows = self._all("SELECT seq, CAST(document AS TEXT), CAST(hash AS TEXT) FROM audit ORDER BY seq")
        return verify([StoredEntry(*row) for row in rows], self.interventions(), head)

    def last_step(self) -> tuple[int, float, float] | None:
        """Number, Unix time and loss of the newest step; None before the first."""
        rows = self._all("SELECT steps, times, numbers FROM blocks ORDER BY id DESC LIMIT 1")
        if not rows:
            return None
        with self._errors():
            steps, times, numbers = _unpack_block(*rows[0])
            return int(steps[-1]), float(times[-1]), float(numbers[-1, 0])

    def _table(self, step: int, look_back: int, layout_id: int, numbers: bytes) -> LayerTable:
        with self._errors():
            layout = self._layout(layout_id)
            values = _unpack(numbers, "<f4")
            if len(values) != len(layout.columns):
                raise ValueError(f"the layer table of step {step} has {len(values)} numbers")
            return LayerTable(layout, values, look_back=bool(look_back))

    def _layout(self, layout_id: int) -> Layout:
        if layout_id not in self._layouts:
            ((document,),) = self._all("SELECT columns FROM layouts WHERE id = ?", (layout_id,))
            columns = json.loads(zlib.decompress(document))
            self._layouts[layout_id] = Layout(tuple((str(layer), str(signal)) for layer, signal in columns))
        return self._layouts[layout_id]

    def _all(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple]:
        with self._errors():
            return self._db.execute(sql, parameters).fetchall()

    def _parse(self, validate: Callable[[str], T], document: str) -> T:
        with self._errors():
            return validate(document)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (
            sqlite3.Error,
            zlib.error,
            ValueError,
            TypeError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise CorruptJournal(
                f"{self.path} cannot be read ({type(error).__name__}: {error}). The other runs are not affected; "
                "move the run directory away to hide it"
            ) from error


def _unpack_block(steps: bytes, times: bytes, numbers: bytes) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    unpacked = _unpack_ints(steps), _unpack_ints(times).view("<f8"), _unpack(numbers, "<f4")
    num_steps = len(unpacked[0])
    if num_steps == 0 or len(unpacked[1]) != num_steps or len(unpacked[2]) != num_steps * len(RUN_COLUMNS):
        raise ValueError("a block's columns differ in length")
    return unpacked[0], unpacked[1], unpacked[2].reshape(len(RUN_COLUMNS), num_steps).T


def _upper(last: int | None) -> int:
    return 2**62 if last is None else last
