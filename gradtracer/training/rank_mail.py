"""Numbers of every rank, put together on the main one without anybody waiting.

Each rank posts an array under a topic and a step; a thread carries what has gathered to the main rank through the
process group's store. The main rank takes a step once it has all its parts, or learns that it will not be complete.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

_LOOK_S = 0.2
_EXPIRES_S = 30.0
_MAX_LETTERS = 64
"""Letters of one rank that lie unread, at most: beyond that the main rank does not read, and they are dropped."""
_MAX_PARTS = 20_000

Parts = Sequence[np.ndarray]


class RankMail:
    """See the module.

    Args:
        store: A `torch.distributed.Store`.
        rank: Of this process.
        size: Number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._lock = threading.Lock()
        self._outbox: list[tuple[str, int, str]] = []
        self._num_sent = 0
        self._next_look = 0.0
        self._num_read = [0] * size
        self._parts: dict[tuple[str, int], dict[int, np.ndarray]] = {}
        self._expected: dict[str, deque[tuple[int, float]]] = {}
        self._expired = False
        """Whether parts were waited for in vain, and none has come since: they are not waited for any more."""

    def post(self, topic: str, step: int, values: np.ndarray) -> None:
        """Give this rank's part, float64; does not wait."""
        values = np.ascontiguousarray(values, dtype=np.float64)
        with self._lock:
            if self._rank == 0:
                self._parts.setdefault((topic, step), {})[0] = values
                self._expected.setdefault(topic, deque()).append((step, time.monotonic()))
            else:
                self._outbox.append((topic, step, values.tobytes().hex()))
                del self._outbox[:-_MAX_PARTS]

    def take(self, topic: str) -> list[tuple[int, Parts | None]]:
        """Main rank: steps that are settled, in the order in which they were posted here.

        Returns:
            Step, and its parts in the order of ranks; None where one did not come within 30 s.
        """
        found: list[tuple[int, Parts | None]] = []
        with self._lock:
            expected = self._expected.get(topic, deque())
            while expected:
                step, since = expected[0]
                parts = self._parts[topic, step]
                if len(parts) == self._size:
                    found.append((step, [parts[r] for r in range(self._size)]))
                elif time.monotonic() - since > _EXPIRES_S or self._expired:
                    self._expired = True
                    found.append((step, None))
                else:
                    break
                expected.popleft()
                del self._parts[topic, step]
        return found

    def give_up(self, timeout_s: float) -> None:
        """Main rank, at the end: wait a little for what is under way, then expect nothing more."""
        deadline = time.monotonic() + timeout_s
        while self._num_missing() and not self._expired and time.monotonic() < deadline:
            self._fetch()
            time.sleep(0.005)
        with self._lock:
            for topic, expected in self._expected.items():
                self._expected[topic] = deque((step, -float("inf")) for step, _ in expected)

    def _num_missing(self) -> int:
        with self._lock:
            waiting = [(topic, step) for topic, expected in self._expected.items() for step, _ in expected]
            return sum(len(self._parts[key]) < self._size for key in waiting)

    def carry(self) -> None:
        """Send what was posted, or fetch what the others sent.

        Raises:
            RuntimeError: If the store is gone.
        """
        if self._rank == 0:
            if time.monotonic() >= self._next_look and self._num_missing():
                self._next_look = time.monotonic() + _LOOK_S
                self._fetch()
            return
        with self._lock:
            posted, self._outbox = self._outbox, []
        if not posted or not self._store.check(["here/0"]):
            return
        if self._num_sent >= _MAX_LETTERS and self._store.check([self._key(self._rank, self._num_sent - _MAX_LETTERS)]):
            return
        self._store.set(self._key(self._rank, self._num_sent), json.dumps(posted))
        self._num_sent += 1

    def _fetch(self) -> None:
        for rank in range(1, self._size):
            while self._store.check([key := self._key(rank, self._num_read[rank])]):
                letters = json.loads(self._store.get(key))
                self._store.delete_key(key)
                self._num_read[rank] += 1
                self._expired = False
                with self._lock:
                    for topic, step, values in letters:
                        part = np.frombuffer(bytes.fromhex(values), dtype=np.float64)
                        self._parts.setdefault((topic, step), {})[rank] = part
                    self._prune()

    def _prune(self) -> None:
        """Drop parts that came too late for their step."""
        if len(self._parts) > _MAX_PARTS:
            wanted = {(topic, step) for topic, expected in self._expected.items() for step, _ in expected}
            self._parts = {key: parts for key, parts in self._parts.items() if key in wanted}

    @staticmethod
    def _key(rank: int, number: int) -> str:
        return f"mail/{rank}/{number}"
