"""Steps of the training that can be run again, away from the training: what trials and some fixes work on.

They come from `replay=`, where the user gave it, else from tapes (`gradtracer.training.tape`) of live steps. A tape
counts only after its first run has repeated the live step: same losses, same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.training.state import State, TrainingState
from gradtracer.training.tape import MAX_BATCH_BYTES, Tape, TapeRecorder

# On the host the same calls on the same numbers give the same result; atomic additions of a device do not.
_CPU_TOLERANCE, _DEVICE_TOLERANCE = 1e-6, 1e-3


class Rehearsal(Protocol):
    """Some steps that can be run again on the model as it stands."""

    num_batches: int

    def step(self, batch: int) -> float:
        """Run a whole step on a batch: forward, backward, updates; returns the loss before the updates."""
        ...

    def forward(self, batch: int) -> None:
        """The forward pass of a batch, without gradient."""
        ...


class TapedRehearsal:
    """Recorded steps.

    Args:
        tapes: One a batch.
    """

    def __init__(self, tapes: Sequence[Tape]) -> None:
        self._tapes = tapes
        self.num_batches = len(tapes)

    def step(self, batch: int) -> float:
        """See `Rehearsal`."""
        return self._tapes[batch].step()

    def forward(self, batch: int) -> None:
        """See `Rehearsal`."""
        self._tapes[batch].forward()


class UserRehearsal:
    """Steps made of the user's `replay`: gradients cleared, loss of the batch, backward, one update of each optimizer.

    Args:
        replay: Computes the loss of batch `i` on the tracked model, ``replay(i) -> Tensor``; the same batch for the
            same `i`.
        optimizers: A live list.
        num_batches: Batches to use: `i` is below it.
    """

    def __init__(self, replay: Callable[[int], Tensor], optimizers: Sequence[Optimizer], num_batches: int) -> None:
        self._replay, self._optimizers, self.num_batches = replay, optimizers, num_batches

    def step(self, batch: int) -> float:
        """See `Rehearsal`."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss = self._replay(batch)
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        return float(loss.detach())

    def forward(self, batch: int) -> None:
        """See `Rehearsal`."""
        with torch.no_grad():
            self._replay(batch)


class BatchCollector:
    """Records live steps, one after another, until there are as many as were asked for.

    Args:
        model: The model.
        state: Takes and restores the state of the training.
        undisturbed: Runs something with recording off: what happens in it is not the user's training.
        on_all_ranks: Whether what holds here holds on all ranks: a step that communicates runs on all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        state: TrainingState,
        undisturbed: Callable[[Callable[[], Any]], Any],
        on_all_ranks: Callable[[bool], bool] = bool,
    ) -> None:
        self.recorder = TapeRecorder(model)
        self._on_all_ranks = on_all_ranks
        self._state, self._undisturbed = state, undisturbed
        self._wanted = 0
        self._running = False
        self._fork: State | None = None
        self.tapes: list[Tape] = []
        self.trouble: str | None = None
        """Why steps of this training cannot be run again; None while they can, as far as is known."""

    @property
    def is_collecting(self) -> bool:
        """Whether steps are still to be recorded."""
        return self._running

    def want(self, num_batches: int) -> None:
        """Have the next steps recorded, at a step boundary; what was recorded before is dropped."""
        self.release()
        self._wanted = num_batches
        self._fork = self._state.take(gradients=True)
        self._running = True
        self.recorder.start()

    def at_boundary(self) -> None:
        """A step is over."""
        if not self._running:
            return
        tape = self.recorder.stop()
        if not self.tapes:
            everywhere = self._on_all_ranks(tape is not None)
            if tape is not None and everywhere:
                self._check(tape)
            elif tape is not None:
                self.trouble = "another rank could not record its step"
        if tape is None or self.trouble is not None:
            self.trouble = self.trouble or self.recorder.trouble
            if self.tapes and self.recorder.out_of_space:
                self.trouble = None  # those that fit are enough
            else:
                self.tapes = []
            self._running = False
            return
        self.tapes.append(tape)
        self.recorder.max_bytes = MAX_BATCH_BYTES - sum(t.num_bytes for t in self.tapes)
        if len(self.tapes) >= self._wanted:
            self._running = False
        else:
            self.recorder.start()

    def release(self) -> None:
        """Drop what was recorded, and stop recording."""
        if self._running:
            self.recorder.stop()
        self.recorder.max_bytes = MAX_BATCH_BYTES
        self._running, self._fork, self.tapes = False, None, []

    def _check(self, tape: Tape) -> None:
        """Whether the tape repeats the step that was just trained."""
        assert self._fork is not None
        live = self._state.take(gradients=True)
        fork, self._fork = self._fork, None

        def again() -> tuple[float, State]:
            self._state.restore(fork)
            return tape.step(), self._state.take()

        try:
            loss, repeated = self._undisturbed(again)
        except Exception as error:
            self.trouble = f"it raised {type(error).__name__}: {error}"
        else:
            on_device = any(t.device.type != "cpu" for t in live["tensors"].values())
            tolerance = _DEVICE_TOLERANCE if on_device else _CPU_TOLERANCE
            if not _close(loss, tape.live_loss, tolerance):
                self.trouble = f"run again it gives a loss of {loss:.6g}, not {tape.live_loss:.6g}"
            elif not all(_same(t, repeated["tensors"][k], tolerance) for k, t in live["tensors"].items()):
                self.trouble = "run again it leads to other weights"
        finally:
            self._state.restore(live)


def _close(a: float, b: float, tolerance: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def _same(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True)
