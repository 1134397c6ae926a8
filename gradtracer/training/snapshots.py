"""Saved states of a training, in memory within a budget and on disk beyond it, restored bit for bit.

A snapshot is copied in the training thread (a memory copy); where it goes to disk, a thread of its own writes it, so
the training does not wait. Files are read with ``weights_only=True``: they hold tensors and plain values, no code. What
schedulers and loaders say of their state may be anything, so it never leaves memory.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from gradtracer.errors import BadParameter
from gradtracer.fixes import SnapshotInfo
from gradtracer.training.state import State, TrainingState

START = "start"
"""Name of the snapshot of the state before the first update."""
_MAX_PERIODIC, _MAX_ASKED_FOR = 8, 5
_SHARE_OF_TIME = 1 / 200
_MIN_INTERVAL_S, _MIN_INTERVAL_ON_DISK_S = 0.1, 1.0
PERIODIC_BYTES = 1 << 30
"""A larger state is saved on request and before interventions only: three of them would fill a disk unasked."""
MEMORY_BYTES = 256 << 20
"""What all snapshots together may take in memory; older ones go to disk first."""


@dataclass
class _Snapshot:
    info: SnapshotInfo
    periodic: bool
    num_bytes: int
    path: Path
    state: State | None
    """None once it is on disk alone."""
    others: list[object]
    writing: Future[None] | None = None


class SnapshotStore:
    """Takes, keeps and restores snapshots of one run.

    Args:
        directory: Where the files go; made when the first is written.
        state: Takes and restores the state.
        notify: Told once where the state is too large for periodic snapshots.
        periodic_bytes: The largest state that is saved periodically.
        memory_bytes: What snapshots may take in memory before they are written to disk.
        on_all_ranks: Whether a state that is finite here is so on all ranks: none saves what another one does not.
    """

    def __init__(
        self,
        directory: Path,
        state: TrainingState,
        *,
        notify: Callable[[str], None] = lambda message: None,
        periodic_bytes: int = PERIODIC_BYTES,
        memory_bytes: int = MEMORY_BYTES,
        on_all_ranks: Callable[[bool], bool] = lambda finite: finite,
    ) -> None:
        self._directory, self._state = directory, state
        self._notify, self._periodic_bytes, self._memory_bytes = notify, periodic_bytes, memory_bytes
        self._on_all_ranks = on_all_ranks
        self._periodic = True
        self._kept: list[_Snapshot] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradtracer-snapshots")
        self._last_periodic = -float("inf")
        self._interval_s = 0.0

    def list(self) -> list[SnapshotInfo]:
        """All that can be restored, oldest first."""
        return [s.info for s in self._kept]

    def take_if_due(self, step: int, *, healthy: bool) -> None:
        """Take a periodic snapshot where one is due, and the run healthy: for at most 0.5 % of the time."""
        if healthy and self.is_due():
            self.take_periodic(step)

    def is_due(self, at_least_s: float = 0.0) -> bool:
        """Whether a periodic snapshot is due."""
        waited_s = time.monotonic() - self._last_periodic
        return self._periodic and waited_s >= max(self._interval_s, at_least_s) and self._may_be_unasked()

    def take_periodic(self, step: int) -> None:
        """Take one of a healthy state, and reckon from its cost when the next is due."""
        start = time.monotonic()
        self.take(step, healthy=True, periodic=True)
        self._last_periodic = time.monotonic()
        fits = self._state.num_bytes() * (_MAX_PERIODIC + _MAX_ASKED_FOR) <= self._memory_bytes
        cost_s = self._last_periodic - start
        self._interval_s = max(_MIN_INTERVAL_S if fits else _MIN_INTERVAL_ON_DISK_S, cost_s / _SHARE_OF_TIME)

    def stop_periodic(self) -> None:
        """Take no periodic snapshots any more."""
        self._periodic = False

    def take_start(self) -> None:
        """Save the state before the first update; it is never dropped."""
        if self._may_be_unasked():
            self.take(-1, healthy=True, periodic=True)

    def _may_be_unasked(self) -> bool:
        size = self._state.num_bytes()
        if size > self._periodic_bytes and self._periodic:
            self._periodic = False
            self._notify(
                f"No periodic snapshots: model and optimizer take {size / 2**30:.2f} GiB, more than the "
                f"{self._periodic_bytes / 2**30:.2f} GiB allowed. A checkpoint can be asked for, and every "
                "intervention saves one first."
            )
        return self._periodic

    def take(self, step: int, *, healthy: bool, periodic: bool = False) -> SnapshotInfo | None:
        """Take a snapshot of the state after `step`.

        Args:
            step: The last finished step.
            healthy: Whether nothing was wrong then, as far as is known.
            periodic: Whether it may be thrown away for the next one.

        Returns:
            None where the state holds a non-finite number: such a state is never saved.
        """
        if not self._on_all_ranks(self._state.is_finite()):
            return None
        existing = next((s for s in self._kept if s.info.step == step), None)
        if existing is not None and periodic:
            return existing.info
        if existing is not None:
            self._drop(existing)  # a fix may have changed the state since, at the same boundary
        if not periodic or not self._kept:
            self._state.find_schedulers()
        # Copies leave the device: the memory of a GPU is the training's.
        state = {"step": step, **self._state.take(device="cpu")}
        others = state.pop("others")
        name = f"step-{step}" if step >= 0 else START
        size = self._state.num_bytes()
        path = self._directory / f"{name}.pt"
        snapshot = _Snapshot(SnapshotInfo(name, step, healthy), periodic, size, path, state, others)
        self._kept.append(snapshot)
        self._thin_out()
        self._spill()
        return snapshot.info

    def path(self, name: str) -> Path:
        """The file of a snapshot; it is written if it was in memory alone.

        Raises:
            BadParameter: If there is none of this name.
            OSError: If writing it failed.
        """
        snapshot = self._find(name)
        self._write(snapshot).result()
        return snapshot.path

    def restore(self, name: str) -> int:
        """Put everything back to a snapshot, in place.

        Returns:
            The step of the snapshot.

        Raises:
            BadParameter: If there is no such snapshot.
            OSError: If it cannot be read; then nothing was changed.
        """
        snapshot = self._find(name)
        state = snapshot.state
        if state is None:
            state = torch.load(self.path(name), map_location="cpu", weights_only=True)
        self._state.restore({**state, "others": snapshot.others})
        return snapshot.info.step

    def close(self, *, keep: bool = True) -> None:
        """Write the newest snapshot of a healthy state, so that it outlives the process, and finish writing.

        Args:
            keep: Without it nothing outlives the process: the folder is removed.
        """
        self._writer.shutdown(wait=True)
        if not keep:
            shutil.rmtree(self._directory, ignore_errors=True)
            return
        healthy = [s for s in self._kept if s.info.healthy]
        if healthy and healthy[-1].writing is None and healthy[-1].state is not None:
            # Here and not in the writer: while the interpreter ends, no executor takes anything.
            _write(healthy[-1].path, healthy[-1].state)

    def _find(self, name: str) -> _Snapshot:
        snapshot = next((s for s in self._kept if s.info.name == name), None)
        if snapshot is None:
            kept = ", ".join(s.info.name for s in self._kept) or "none yet"
            raise BadParameter(f"no snapshot {name[:80]!r}; there are: {kept}")
        return snapshot

    def _write(self, snapshot: _Snapshot) -> Future[None]:
        if snapshot.writing is None:
            assert snapshot.state is not None
            snapshot.writing = self._writer.submit(_write, snapshot.path, snapshot.state)
        return snapshot.writing

    def _thin_out(self) -> None:
        """Keep the newest that were asked for; of the periodic ones, some of each age.

        The start and the newest two stay. Of the others the one goes whose neighbours are nearest to each other, in
        proportion to their age: what is kept is spaced like powers.
        """
        asked_for = [s for s in self._kept if not s.periodic]
        for old in asked_for[: max(0, len(asked_for) - _MAX_ASKED_FOR)]:
            self._drop(old)
        periodic = [s for s in self._kept if s.periodic and s.info.name != START]
        if len(periodic) > _MAX_PERIODIC:
            now = periodic[-1].info.step + 1
            gaps = {
                (now - older.info.step) / (now - newer.info.step): middle
                for older, middle, newer in zip(periodic, periodic[1:], periodic[2:], strict=False)
            }
            self._drop(gaps[min(gaps)])

    def _spill(self) -> None:
        """Move the oldest to disk until what is left fits; the newest too, where it does not fit by itself."""
        in_memory = [s for s in self._kept if s.state is not None]
        total = sum(s.num_bytes for s in in_memory)
        for snapshot in in_memory:
            if total <= self._memory_bytes:
                break
            self._write(snapshot)
            snapshot.state = None
            total -= snapshot.num_bytes

    def _drop(self, snapshot: _Snapshot) -> None:
        self._kept.remove(snapshot)
        if snapshot.writing is not None:
            self._writer.submit(_remove, snapshot.path)


def _write(path: Path, state: State) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        torch.save(state, file)
    os.replace(temporary, path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
