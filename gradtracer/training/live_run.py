"""The live run as fixes see it: `gradtracer.fixes.LiveRun` on the real model and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from gradtracer.errors import BadParameter
from gradtracer.fixes import SnapshotInfo, Undo
from gradtracer.records import Severity
from gradtracer.training.capture import Capture
from gradtracer.training.hooks import HOOKS
from gradtracer.training.recorder import Recorder
from gradtracer.training.snapshots import SnapshotStore


class TrainingRun:
    """See `gradtracer.fixes.LiveRun`; all of it is for the training thread.

    Args:
        capture: Reads the training.
        recorder: Knows the events.
        store: Keeps snapshots.
    """

    def __init__(self, capture: Capture, recorder: Recorder, store: SnapshotStore) -> None:
        self._capture, self._recorder, self._store = capture, recorder, store
        self._guards: list[tuple[Callable[[Optimizer], None], Callable[[Optimizer], None] | None]] = []
        self._left_out: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def step(self) -> int:
        """The last finished step."""
        return self._capture.last_step

    @property
    def model(self) -> torch.nn.Module:
        """The model."""
        return self._capture.model

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers seen so far."""
        return self._capture.optimizers

    @property
    def grad_scalers(self) -> Sequence[torch.amp.GradScaler]:
        """The gradient scalers seen so far."""
        return HOOKS.scalers

    @property
    def num_held_batches(self) -> int:
        """See `gradtracer.fixes.LiveRun`."""
        return 0

    def rehearse(self, num_batches: int) -> int:
        """See `gradtracer.fixes.LiveRun`."""
        raise BadParameter("no step was captured that could run again")

    def around_update(
        self, before: Callable[[Optimizer], None], after: Callable[[Optimizer], None] | None = None
    ) -> Undo:
        """See `gradtracer.fixes.LiveRun`."""
        guard = (before, after)
        self._guards.append(guard)
        return lambda: self._guards.remove(guard)

    def skip_update(self, optimizer: Optimizer) -> None:
        """See `gradtracer.fixes.LiveRun`."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # An optimizer passes over parameters without a gradient; the user's gradient comes back after.
                    self._left_out.append((parameter, parameter.grad))
                    parameter.grad = None

    def snapshots(self) -> Sequence[SnapshotInfo]:
        """See `gradtracer.fixes.LiveRun`."""
        return self._store.list()

    def take_snapshot(self) -> SnapshotInfo | None:
        """See `gradtracer.fixes.LiveRun`."""
        return self._store.take(self.step, healthy=self.first_open_problem_step() is None)

    def restore(self, snapshot: str) -> None:
        """See `gradtracer.fixes.LiveRun`."""
        self._store.restore(snapshot)

    def first_open_problem_step(self) -> int | None:
        """See `gradtracer.fixes.LiveRun`."""
        self._recorder.flush(1.0)
        open_problems = [e.step for e in self._recorder.events if e.open and e.severity is not Severity.INFO]
        return min(open_problems, default=None)

    def run_guards(self, optimizer: Optimizer) -> None:
        """What comes before an update."""
        for before, _ in self._guards:
            before(optimizer)

    def finish_guards(self, optimizer: Optimizer) -> None:
        """What comes after an update."""
        for parameter, gradient in self._left_out:
            parameter.grad = gradient
        self._left_out.clear()
        for _, after in reversed(self._guards):
            if after is not None:
                after(optimizer)
