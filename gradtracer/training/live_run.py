"""The live run as fixes see it: `gradtracer.fixes.LiveRun` on the real model and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.optim import Optimizer

from gradtracer.errors import BadParameter, RunRefused
from gradtracer.fixes import SnapshotInfo, Undo
from gradtracer.records import SemanticEvent, Severity, TrialResult
from gradtracer.training import statistics
from gradtracer.training.capture import Capture
from gradtracer.training.hooks import HOOKS
from gradtracer.training.ranks import Ranks, any_rank
from gradtracer.training.recorder import Recorder
from gradtracer.training.rehearsal import BatchCollector, Rehearsal, TapedRehearsal, UserRehearsal
from gradtracer.training.silent_recorder import SilentRecorder
from gradtracer.training.snapshots import SnapshotStore
from gradtracer.training.state import TrainingState, random_states, set_random_states
from gradtracer.training.strays import held_by_any_optimizer, strays
from gradtracer.training.trial import Plan, Trial

T = TypeVar("T")

_NEAR_LOWEST = 0.5
"""A loss half again as high as the lowest is the noise of small batches; a divergence that has begun is beyond."""
_LOSSES_NEAR = 5
_FIRST_STEPS = 10
"""A rule needs some steps to tell that something is wrong with a run's start."""

_REPLAY_BATCHES = 200
"""What the user's `replay` can be asked for: a trial of the most steps has as many."""


class GuardsAlone:
    """Keeps the fixes of a run in force once its tracker is gone; see `gradtracer.training.hooks.TrainingListener`."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def on_backward(self, loss: torch.Tensor, unscaled: torch.Tensor) -> None:
        """Nothing."""

    def on_backward_done(self) -> None:
        """Nothing."""

    def on_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        """What comes before an update."""
        if not has_closure and any(optimizer is o for o in self._run.optimizers):
            self._run.run_guards(optimizer)

    def on_updated(self, optimizer: Optimizer, has_closure: bool) -> None:
        """What comes after it."""
        if not has_closure and any(optimizer is o for o in self._run.optimizers):
            self._run.finish_guards(optimizer)


class TrainingRun:
    """See `gradtracer.fixes.LiveRun`; all of it is for the training thread.

    Args:
        capture: Reads the training.
        recorder: Knows the events.
        store: Keeps snapshots.
        state: Takes and restores the state of the training.
        replay: Computes the loss of a batch, where the user gave it; see `gradtracer.training.rehearsal.UserRehearsal`.
        ranks: What is agreed with other ranks, where there are any.
    """

    def __init__(
        self,
        capture: Capture,
        recorder: Recorder | SilentRecorder,
        store: SnapshotStore,
        state: TrainingState,
        replay: Callable[[int], torch.Tensor] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._agreed_problem: tuple[int | None] | None = None
        self._capture, self._recorder, self._store, self._state = capture, recorder, store, state
        self._replay = replay
        self.collector = BatchCollector(capture.model, state, self.undisturbed, self._on_all_ranks)
        self.is_rehearsing = False
        """Whether what runs now is no step of the user's: nothing of it is recorded, and fixes still act on it."""
        self._rehearsed_norms: list[float] = []
        self._had_gradient: dict[str, torch.Tensor] = {}
        """Parameters without an optimizer that were found to have a gradient: a rollback clears it."""
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

    def missing_parameters(self) -> Sequence[tuple[str, torch.Tensor]]:
        """See `gradtracer.fixes.LiveRun`."""
        held = self._capture.held | held_by_any_optimizer()
        found: dict[str, torch.Tensor] = dict(self._capture.unheld_with_gradient())
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            # On several ranks nothing reduces the gradients of what the model has not registered.
            unregistered = {
                s.name: s.tensor
                for s in strays(self.model)
                if s.tensor.is_leaf and s.tensor.requires_grad and s.tensor.grad is not None
            }
            self._state.include(unregistered)
            found.update(unregistered)
        self._had_gradient.update(found)
        return [(name, p) for name, p in self._had_gradient.items() if p.requires_grad and id(p) not in held]

    @property
    def is_finite(self) -> bool:
        """Whether the weights and the optimizer's moments are finite."""
        return self._state.is_finite()

    @property
    def replays(self) -> bool:
        """Whether the user gave a way to compute the loss of a batch, so that no step need be recorded."""
        return self._replay is not None

    @property
    def num_held_batches(self) -> int:
        """See `gradtracer.fixes.LiveRun`."""
        return _REPLAY_BATCHES if self._replay is not None else len(self.collector.tapes)

    @property
    def rehearsal(self) -> Rehearsal:
        """The batches at hand.

        Raises:
            BadParameter: If there are none; the message says what to pass.
        """
        if self._replay is not None:
            return UserRehearsal(self._replay, self.optimizers, _REPLAY_BATCHES)
        if not self.collector.tapes:
            why = self.collector.trouble or "none was recorded yet"
            raise BadParameter(
                f"no step of this training can be run again: {why}. Pass replay= to FlowTracker: a callable that "
                "computes the loss of batch i on the tracked model, the same batch for the same i"
            )
        return TapedRehearsal(self.collector.tapes)

    def rehearse(self, num_batches: int) -> int:
        """See `gradtracer.fixes.LiveRun`."""
        rehearsal = self.rehearsal
        chosen = range(min(num_batches, rehearsal.num_batches))

        def run() -> None:
            buffers = [(b, b.clone()) for b in self.model.buffers()]
            random_state = random_states()
            try:
                for i in chosen:
                    rehearsal.forward(i)
            finally:
                set_random_states(random_state)
                with torch.no_grad():
                    for buffer, old in buffers:
                        buffer.copy_(old)

        self.undisturbed(run)
        return len(chosen)

    def try_out(self, plans: Sequence[Plan], num_steps: int) -> TrialResult:
        """Try fixes on a fork of the live state; see `gradtracer.training.trial.Trial`.

        Raises:
            BadParameter: If no step can be run again.
            RunRefused: If it would not fit.
        """
        if not self.replays and not any(tape.has_update for tape in self.collector.tapes) and self.collector.tapes:
            raise BadParameter(
                "in none of the recorded steps did an optimizer step (a gradient scaler skips those whose gradient is "
                "not finite), so a trial would train nothing; mode=apply watches"
            )
        self.missing_parameters()  # from now on they belong to the state that the trial puts back
        rehearsal = self.rehearsal
        mean: Callable[[Sequence[float]], list[float]] = list
        if self._ranks is not None:
            rehearsal.num_batches = int(min(n for (n,) in self._ranks.exchange([rehearsal.num_batches])))
            mean = self._ranks.mean
        trial = Trial(self._state, rehearsal, self.carry_out, self._take_rehearsed_norms, mean=mean)
        return self.undisturbed(lambda: trial.run(plans, num_steps))

    def carry_out(self, plan: Plan) -> Undo:
        """Apply a fix, from the newest snapshot before the trouble where the plan says so.

        Raises:
            BadParameter: If it cannot be applied, or there is no such snapshot; then nothing was changed.
        """
        if plan.rollback_first:
            plan.fix.preview(self, plan.parameters)
            self.restore(self.rollback_target().name)
        undo = plan.fix.apply(self, plan.parameters)
        if not self.is_rehearsing:
            self._capture.note_intervention()
        return undo

    def snapshot_before_trouble(self) -> SnapshotInfo | None:
        """The newest healthy snapshot from before the first open problem; None where there is none.

        A problem is told some steps after it began. So of a run that is in trouble within its first steps it is the
        start, and otherwise one whose loss was still near the lowest until then; the oldest where there is none.
        """
        trouble = self.first_open_problem_step()
        if trouble is not None and trouble < _FIRST_STEPS:
            trouble = 0
        healthy = [s for s in self.snapshots() if s.healthy and (trouble is None or s.step < trouble)]
        if trouble is None or not healthy or self._ranks is not None:  # losses differ between ranks
            return healthy[-1] if healthy else None
        losses = [(s, x) for s, x in self._capture.recent_losses if s < trouble]
        near = {info.step: _loss_near(losses, info.step) for info in healthy}
        known = [x for x in near.values() if x is not None]
        lowest = min(known, default=0.0)
        bound = lowest + _NEAR_LOWEST * abs(lowest)
        good = [s for s in healthy if (x := near[s.step]) is None or x <= bound]
        return good[-1] if good else healthy[0]

    def rollback_target(self) -> SnapshotInfo:
        """`snapshot_before_trouble`, for what cannot do without.

        Raises:
            BadParameter: If there is none.
        """
        found = self.snapshot_before_trouble()
        if found is None:
            raise BadParameter("no snapshot was taken before the trouble began, so there is nothing to roll back to")
        return found

    def undisturbed(self, run: Callable[[], T]) -> T:
        """Run something that is no part of the user's training; in the training thread, at a step boundary."""
        was, self.is_rehearsing = self.is_rehearsing, True  # a fix that is tried may rehearse too
        try:
            with torch.enable_grad():  # the boundary may lie within an optimizer's step
                return run()
        finally:
            self.is_rehearsing = was

    def _take_rehearsed_norms(self) -> list[float]:
        norms, self._rehearsed_norms = self._rehearsed_norms, []
        return norms

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

    def pruned_places(self) -> Mapping[str, torch.Tensor]:
        """See `gradtracer.fixes.LiveRun`."""
        return getattr(self._capture.audit("pruned_weights"), "places", {})

    def any_rank(self, flag: bool) -> bool:
        """See `gradtracer.fixes.LiveRun`."""
        return any_rank(flag)

    @property
    def is_sharded(self) -> bool:
        """See `gradtracer.fixes.LiveRun`."""
        return self._capture.is_sharded

    def snapshots(self) -> Sequence[SnapshotInfo]:
        """See `gradtracer.fixes.LiveRun`."""
        return self._store.list()

    def take_snapshot(self) -> SnapshotInfo | None:
        """See `gradtracer.fixes.LiveRun`."""
        if self.is_rehearsing:
            return None  # what a branch of a trial comes to is not kept
        return self._store.take(self.step, healthy=self.first_open_problem_step() is None)

    def restore(self, snapshot: str) -> None:
        """See `gradtracer.fixes.LiveRun`."""
        self._store.restore(snapshot)
        if not self.is_rehearsing:
            self._capture.note_intervention()

    def first_open_problem_step(self) -> int | None:
        """See `gradtracer.fixes.LiveRun`."""
        if self._agreed_problem is not None:
            return self._agreed_problem[0]
        self._recorder.flush(1.0)
        open_problems = [_began(e) for e in self._recorder.events if e.open and e.severity is not Severity.INFO]
        return min(open_problems, default=None)

    @contextmanager
    def agreed(self, first_open_problem_step: int | None) -> Iterator[None]:
        """While all ranks act together: what the main rank knows of events holds on all of them."""
        self._agreed_problem = (first_open_problem_step,)
        try:
            yield
        finally:
            self._agreed_problem = None

    def _on_all_ranks(self, flag: bool) -> bool:
        if self._ranks is None:
            return flag
        try:
            return self._ranks.all(flag)
        except RunRefused:
            return False

    @property
    def has_guards(self) -> bool:
        """Whether anything comes before or after updates."""
        return bool(self._guards)

    def run_guards(self, optimizer: Optimizer) -> None:
        """What comes before an update."""
        if self.is_rehearsing:
            with torch.no_grad():
                held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                self._rehearsed_norms.append(
                    float(statistics.norms([statistics.gradient_values(g) for g in held]).norm())
                )
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


def _began(event: SemanticEvent) -> int:
    """When the trouble began: an event may be told only after it has gone on for some time, and says since when."""
    since = next((m.value for m in event.evidence if m.name == "first_step"), None)
    return event.step if since is None else min(event.step, int(since))


def _loss_near(losses: Sequence[tuple[int, float]], step: int) -> float | None:
    """Median of the last losses up to a step; None where none is remembered."""
    until = [x for s, x in losses if s <= step][-_LOSSES_NEAR:]
    return sorted(until)[len(until) // 2] if until else None
