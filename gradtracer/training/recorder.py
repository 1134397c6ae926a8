"""Takes samples from the training thread, lets the detectors look at them, and writes the journal.

The training thread only puts things into a queue. Everything else happens in a thread of the recorder's own, where a
full disk, a locked file or a detector that raises costs the recording, never the training.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from gradtracer.detectors.base import Detector, Episodes, EventChange
from gradtracer.errors import GradtracerError
from gradtracer.journal import JournalWriter
from gradtracer.records import AuditHead, CaptureNotice, Intervention, Observation, SemanticEvent, Severity
from gradtracer.samples import LayerTable, Sample

log = logging.getLogger("gradtracer")

# What a queued item weighs without its table: a sample and its boxed numbers, by tracemalloc.
_ITEM_BYTES = 512
# Samples gather for this long before the thread takes them, so that the training thread hands over the interpreter
# lock at most fifty times a second, however short its steps are.
_GATHER_S = 0.02
# Longer than any commit to a disk that works; a disk that hangs must not keep the process from ending.
_CLOSE_TIMEOUT_S = 10.0


class Recorder:
    """Records one run. What is put while the disk hangs waits in memory, up to `max_queue_bytes`.

    Args:
        directory: The run directory; it must exist.
        detectors: Fresh detectors, for this run alone.
        on_event: Called in the recorder's thread with each event that opens or escalates, before it is written. It
            must not call `flush` or `close`.
        commit_interval_s: What is put becomes durable, and visible to readers, within this time.
        busy_timeout_s: How long to wait for a journal that someone else has locked before recording is turned off.
        max_queue_bytes: Samples, tables and observations beyond this are dropped, and a notice says how many.
    """

    def __init__(
        self,
        directory: Path,
        detectors: Sequence[Detector],
        *,
        on_event: Callable[[SemanticEvent], None] | None = None,
        commit_interval_s: float = 0.5,
        busy_timeout_s: float = 5.0,
        max_queue_bytes: int = 64 << 20,
    ) -> None:
        self._detectors = list(detectors)
        self._episodes = Episodes(self._detectors)
        self._on_event = on_event
        self._commit_interval_s = commit_interval_s
        self._max_queue_bytes = max_queue_bytes
        # What to do with an item, the item, and its weight; None ends the thread.
        self._queue: queue.SimpleQueue[tuple[Callable[..., None], object, int] | None] = queue.SimpleQueue()
        # Each number has one writer: the training thread puts and drops, the recorder's thread takes.
        self._bytes_put = 0
        self._bytes_taken = 0
        self._num_dropped = 0
        self._num_dropped_told = 0
        self._hurry = threading.Event()
        self._gate = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

        self._step = 0
        self._commit_due: float | None = None
        self._events: dict[str, SemanticEvent] = {}
        self._events_lock = threading.Lock()
        # Events that changed since the last commit, and whether a change was news: an episode of a thousand steps is
        # written once a commit, not once a step.
        self._changed: dict[str, bool] = {}
        self._open_warnings: set[str] = set()

        self._disabled_reason: str | None = None
        self._audit_head: AuditHead | None = None
        self._writer: JournalWriter | None = None
        try:
            self._writer = JournalWriter(directory, busy_timeout_s=busy_timeout_s)
        except (sqlite3.Error, OSError, GradtracerError) as error:
            self._turn_off(error)
        self._thread = threading.Thread(target=self._run, name="gradtracer-recorder", daemon=True)
        self._thread.start()
        # Daemon threads still run while atexit callbacks do, so the queue can be drained then.
        atexit.register(self.close)

    def add_sample(self, sample: Sample) -> None:
        """Record a step and let the detectors look at it."""
        self._put(self._take_sample, sample, 0 if sample.layers is None else sample.layers.values.nbytes)

    def add_table(self, step: int, table: LayerTable) -> None:
        """Record a look-back table; detectors do not see it."""
        self._put(self._take_table, (step, table), table.values.nbytes)

    def add_observation(self, observation: Observation) -> None:
        """Record a fact and tell the detectors."""
        self._put(self._take_observation, observation, 0)

    def put_intervention(self, intervention: Intervention) -> None:
        """Record an intervention, or how it stands now. It is never dropped, and any thread may call this."""
        if not self._closed:
            self._queue.put((self._take_intervention, (intervention, time.time()), 0))

    @property
    def disabled_reason(self) -> str | None:
        """Why nothing is written any more; None while all is well."""
        return self._disabled_reason

    @property
    def audit_head(self) -> AuditHead | None:
        """End of the audit trail, once closed; None before, and where recording was turned off."""
        return self._audit_head

    @property
    def num_open_warnings(self) -> int:
        """Open events of severity warning or above, as of the last sample that the detectors have seen."""
        return len(self._open_warnings)

    @property
    def events(self) -> list[SemanticEvent]:
        """All events so far, in the order in which they were found."""
        with self._events_lock:
            return list(self._events.values())

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything put so far is durable and visible. Any thread may call this but the recorder's own.

        Returns:
            Whether it is; False where the time ran out or recording is off.
        """
        done = threading.Event()
        with self._gate:
            if self._closed:
                return self._disabled_reason is None
            self._queue.put((self._take_flush, done, 0))
        self._hurry.set()
        return done.wait(timeout_s) and self._disabled_reason is None

    def close(self) -> None:
        """Write what was put, and end the thread. What is put later is ignored."""
        if os.getpid() != self._pid:  # A forked child has the object, but neither the thread nor a right to the file.
            return
        with self._gate:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._hurry.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the last steps are not recorded: the disk did not take them within %g s", _CLOSE_TIMEOUT_S)
        atexit.unregister(self.close)

    def _put(self, take: Callable[..., None], item: object, num_bytes: int) -> None:
        if self._closed:
            return
        if self._bytes_put - self._bytes_taken >= self._max_queue_bytes:
            self._num_dropped += 1
            return
        num_bytes += _ITEM_BYTES
        self._bytes_put += num_bytes
        self._queue.put((take, item, num_bytes))

    # What follows runs in the recorder's thread.

    def _run(self) -> None:
        while True:
            wait_s = None if self._commit_due is None else max(0.0, self._commit_due - time.monotonic())
            try:
                task = self._queue.get(timeout=wait_s)
            except queue.Empty:
                self._commit()
                continue
            if task is None:
                break
            take, item, num_bytes = task
            self._bytes_taken += num_bytes
            if self._commit_due is None:
                self._commit_due = time.monotonic() + self._commit_interval_s
            take(item)
            if self._commit_due is not None and time.monotonic() >= self._commit_due:
                self._commit()
            if self._queue.empty():
                self._hurry.wait(_GATHER_S)
        self._commit()
        self._audit_head = self._writer.audit_head if self._writer is not None else None
        self._write(JournalWriter.close)
        self._writer = None

    def _take_sample(self, sample: Sample) -> None:
        self._step = max(0, sample.step)
        self._write(lambda writer: writer.add_sample(sample))
        for detector in tuple(self._detectors):
            try:
                changes = self._episodes.assess_with(detector, sample)
            except Exception:
                changes = self._retire(detector)
            self._note(changes)

    def _take_table(self, item: tuple[int, LayerTable]) -> None:
        self._write(lambda writer: writer.add_table(*item))

    def _take_observation(self, observation: Observation) -> None:
        self._write(lambda writer: writer.add_observation(observation))
        for detector in tuple(self._detectors):
            try:
                detector.observe(observation)
            except Exception:
                self._note(self._retire(detector))

    def _take_intervention(self, item: tuple[Intervention, float]) -> None:
        self._write(lambda writer: writer.put_intervention(*item))

    def _take_flush(self, done: threading.Event) -> None:
        self._hurry.clear()
        self._commit()
        done.set()

    def _note(self, changes: Iterable[EventChange]) -> None:
        for change in changes:
            event = change.event
            with self._events_lock:
                self._events[event.id] = event
            self._changed[event.id] = change.announce or self._changed.get(event.id, False)
            if event.open and event.severity.rank >= Severity.WARNING.rank:
                self._open_warnings.add(event.id)
            else:
                self._open_warnings.discard(event.id)
            if change.announce and self._on_event is not None:
                try:
                    self._on_event(event)
                except Exception:
                    self._on_event = None
                    self._notify("the receiver of events raised, and gets none for the rest of this run")

    def _retire(self, detector: Detector) -> list[EventChange]:
        self._detectors.remove(detector)
        self._notify(f"the detector {detector.code} raised, and is off for the rest of this run")
        return self._episodes.retire(detector)

    def _notify(self, message: str) -> None:
        """Say what is not recorded, with the traceback of the exception in hand."""
        log.warning(message, exc_info=True)
        self._take_observation(CaptureNotice(step=self._step, message=message))

    def _commit(self) -> None:
        if self._num_dropped > self._num_dropped_told:
            num_new, self._num_dropped_told = self._num_dropped - self._num_dropped_told, self._num_dropped
            message = f"{num_new} samples were not recorded: the disk did not keep up with the training"
            self._take_observation(CaptureNotice(step=self._step, message=message))
        self._commit_due = None
        for event_id, announce in self._changed.items():
            self._write(lambda writer, e=self._events[event_id], a=announce: writer.put_event(e, announce=a))
        self._changed.clear()
        self._write(JournalWriter.commit)

    def _write(self, write: Callable[[JournalWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            write(self._writer)
        except Exception as error:
            writer, self._writer = self._writer, None
            with suppress(sqlite3.Error):  # The disk that failed may fail again; what is committed stays.
                writer.abandon()
            self._turn_off(error)

    def _turn_off(self, error: Exception) -> None:
        self._disabled_reason = f"{type(error).__name__}: {error}"
        expected = isinstance(error, sqlite3.Error | OSError | GradtracerError)
        log.warning(
            "recording is off for the rest of this run, training goes on (%s)",
            self._disabled_reason,
            exc_info=None if expected else error,
        )
