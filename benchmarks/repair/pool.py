"""Tasks in processes of their own, as many at a time as there are cores: what kills one costs that one."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.repair.runs import Outcome, Task, train


@dataclass
class _Worker:
    task: Task
    process: Any
    deadline_s: float


def train_all(
    tasks: Sequence[Task], *, num_workers: int | None = None, limit_s: float = 900
) -> Iterator[tuple[Task, Outcome]]:
    """Train every task, and yield each with its outcome as it ends.

    Args:
        tasks: What to train.
        num_workers: How many at a time; by default one a core.
        limit_s: A training that takes longer is ended, and its outcome is an error.
    """
    # A fork server has torch loaded once; forking this process would take its threads' locks along.
    context: Any = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    if sys.platform != "win32":
        context.set_forkserver_preload(["torch", "gradtracer.training.tracker", "benchmarks.repair.runs"])
    os.environ["OMP_NUM_THREADS"] = "1"
    waiting = deque(tasks)
    running: dict[Connection, _Worker] = {}
    limit = num_workers or os.cpu_count() or 1
    while waiting or running:
        while waiting and len(running) < limit:
            task = waiting.popleft()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(task, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = _Worker(task, process, time.monotonic() + limit_s)
        for connection in wait(list(running), timeout=1.0):
            assert isinstance(connection, Connection)
            yield _taken(connection, running.pop(connection))
        for connection in [c for c, w in running.items() if time.monotonic() > w.deadline_s]:
            worker = running.pop(connection)
            worker.process.kill()
            worker.process.join()
            connection.close()
            yield worker.task, Outcome(error=f"it did not end within {limit_s:g} s")


def _taken(connection: Connection, worker: _Worker) -> tuple[Task, Outcome]:
    try:
        outcome = connection.recv()
    except EOFError:
        worker.process.join()
        outcome = Outcome(error=f"its process ended with code {worker.process.exitcode}")
    connection.close()
    worker.process.join()
    return worker.task, outcome


def _work(task: Task, connection: Connection) -> None:
    connection.send(train(task))
    connection.close()
