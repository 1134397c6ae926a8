"""Carries out what is asked of a live run, in the training thread, at step boundaries.

Requests come in on the control channel's thread, are checked there, and wait in a queue. Between two steps the training
thread takes them, acts, watches what its actions did, and takes back what made things worse.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from gradtracer.control import (
    ActingRequest,
    FixRequest,
    FlushRequest,
    InterventionReply,
    LiveStatus,
    PolicyRequest,
    Reply,
    RevertRequest,
    StatusRequest,
    TrainingRequest,
)
from gradtracer.errors import BadParameter, GradtracerError, RunNotLive, RunRefused, UnknownIntervention
from gradtracer.fixes import ReportingUndo, Undo
from gradtracer.records import (
    AutofixPolicy,
    CaptureNotice,
    CausalHypothesis,
    Change,
    Intervention,
    InterventionState,
    ParameterValue,
    PolicyMode,
    Safety,
    Stall,
)
from gradtracer.training.autofix import Autofix
from gradtracer.training.capture import Capture
from gradtracer.training.control_server import Submission
from gradtracer.training.live_run import TrainingRun
from gradtracer.training.ranks import Ranks
from gradtracer.training.recorder import Recorder
from gradtracer.training.silent_recorder import SilentRecorder
from gradtracer.training.snapshots import SnapshotStore
from gradtracer.training.stack import training_stack
from gradtracer.training.together import JointAction
from gradtracer.training.trial import Plan
from gradtracer.training.watch import Watch

log = logging.getLogger("gradtracer")

_LOSSES_BEFORE, _DIVERGED_STEPS = 50, 3
_REPORT_STEPS = 10
"""What fixes in force tell of themselves is put on record every so many steps."""
_MAX_BATCHES = 32
"""Steps recorded for a trial at most; a longer one sees them again."""
_BATCHES_LAST_STEPS = 100
"""Recorded batches are used again for this long: later ones say more about the training as it is then."""
_MAX_TOLD = 5
"""Unseen changes that a refusal names, the newest."""
_ACTED = (InterventionState.APPLIED, InterventionState.KEPT, InterventionState.FAILED)
"""States in which what was asked may have changed the run; a fix that raised may have changed a part of it."""
_STALL_FACTOR, _STALL_AT_LEAST_S = 20.0, 2.0
_SAVE_TOGETHER_S = 10.0
"""Between periodic snapshots of several ranks, each of which makes the ranks wait for one another for some ms."""


class TrainingStopped(SystemExit):
    """Raised out of the training loop when an agent asked for the training to stop.

    It is a `SystemExit` with code 0: unless it is caught, the program ends cleanly, with its ``finally`` blocks run.
    A ``with FlowTracker(...)`` block swallows it, and the program goes on behind the block.
    """

    def __init__(self) -> None:
        super().__init__(0)


@dataclass
class _Queued:
    request: ActingRequest
    intervention: Intervention
    future: Future[Reply]
    plans: tuple[Plan, ...] = ()
    body: str = ""
    """As the other ranks are told; empty until they are."""


@dataclass
class _Active:
    """An intervention that was applied and may still be taken back."""

    intervention: Intervention
    undo: Undo
    watch: Watch | None
    """None once it is over."""


@dataclass(frozen=True)
class _RunChange:
    """Something that changed the run, in words for those who have not seen it."""

    requester: str
    what: str


class Controller:
    """The control channel's handler, and what it does at step boundaries.

    Args:
        run_id: Id of the run.
        run: The live run, as fixes see it.
        capture: Reads the training.
        recorder: Takes interventions.
        snapshots: Keeps states.
        policy: What the run may do by itself.
        diagnose: What the run shows now.
        ranks: What is agreed with other ranks, where there are any. On ranks above 0 a controller does what the main
            one tells.
    """

    def __init__(
        self,
        run_id: str,
        run: TrainingRun,
        capture: Capture,
        recorder: Recorder | SilentRecorder,
        snapshots: SnapshotStore,
        *,
        policy: AutofixPolicy,
        diagnose: Callable[[], Sequence[CausalHypothesis]],
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._joint: deque[JointAction] = deque()
        """What the main rank has decided by itself and all ranks are to do."""
        self._begins_to_record = False
        self._noted: set[str] = set()
        self._run_id, self._run = run_id, run
        self._capture, self._recorder, self._snapshots = capture, recorder, snapshots
        self.policy = policy
        self._autofix = Autofix(
            lambda request: self.submit(request).future,
            diagnose,
            lambda: recorder.events,
            lambda intervention_id: (a := self._active.get(intervention_id)) is not None and a.watch is not None,
            lambda: not run.is_finite or self._has_diverged(),
            lambda: run.snapshot_before_trouble() is not None,
        )
        self._wake = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._closed = ""
        self._changes: list[_RunChange] = []
        self._paused: Intervention | None = None
        self._stop = False
        self._collected_at, self._collected_for = -1, None
        self._num_interventions = 0
        self._active: dict[str, _Active] = {}
        self._interventions: dict[str, Intervention] = {}
        self._thread_id = threading.get_ident()
        self._last_boundary = time.monotonic()
        self._durations: deque[float] = deque(maxlen=64)

    # ------------------------------------------------------------------ the control channel's thread

    def status(self) -> LiveStatus:
        """How the training stands; answers also while a step hangs."""
        idle = time.monotonic() - self._last_boundary
        durations = list(self._durations)
        usual = statistics.median(durations) if durations else None
        paused = self._paused is not None
        stalled = not paused and not self._closed and idle > max(_STALL_AT_LEAST_S, _STALL_FACTOR * (usual or 0.0))
        return LiveStatus(
            step=self._capture.last_step,
            paused=paused,
            seconds_since_step=idle,
            usual_step_s=usual,
            stall=Stall(seconds=idle, usual_s=usual, stack=training_stack(self._thread_id)) if stalled else None,
            active_interventions=tuple(self._active),
            pending=len(self._queue),
            snapshots=tuple(s.name for s in self._snapshots.list()),
            policy=self.policy,
            num_changes=len(self._changes),
        )

    def flush(self) -> None:
        """Write everything captured so far."""
        self._recorder.flush(2.0)

    def submit(self, request: ActingRequest) -> Submission:
        """Check a request and queue it for the next step boundary.

        Raises:
            UnknownFix: If there is no such fix.
            BadParameter: If a parameter cannot be used.
            UnknownIntervention: If there is nothing of this id to revert.
            RunRefused: If this training cannot be steered, or others have changed it since the requester looked.
            RunNotLive: If it has ended.
        """
        try:
            plans = self._check(request)
        except GradtracerError as error:
            self._put(_ended(self._new_intervention(request), InterventionState.REFUSED, None, str(error)))
            raise
        queued = _Queued(request, self._new_intervention(request), Future(), plans)
        with self._wake:
            closed = self._closed
            if not closed:
                # Put before it can be carried out: the record is in the order of what happened.
                self._put(queued.intervention)
                self._queue.append(queued)
                self._wake.notify()
        if closed:
            self._put(_ended(queued.intervention, InterventionState.REFUSED, None, closed))
            raise RunNotLive(closed)
        return Submission(pending=queued.intervention, future=queued.future)

    def _check(self, request: ActingRequest) -> tuple[Plan, ...]:
        """The plans of a fix request, once it is sure that the request can be tried at the step boundary."""
        if self._ranks is None and _num_ranks() > 1:
            raise RunRefused(
                "this training runs on several ranks, and its tracker was made before they were known, so that a "
                "change would reach one of them alone; make the FlowTracker after init_process_group, on every rank"
            )
        if isinstance(request, RevertRequest) and request.intervention_id not in self._interventions:
            known = ", ".join(self._interventions) or "none yet"
            raise UnknownIntervention(f"no intervention {request.intervention_id!r}; there are: {known}")
        self._refuse_a_stale_view(request)
        return _plans(request)

    def _refuse_a_stale_view(self, request: ActingRequest) -> None:
        """Raise where others have changed the run since the requester looked, and the request acts on what it saw."""
        if isinstance(request, FixRequest):
            harmless = request.mode == "dry_run"
        else:
            harmless = isinstance(request, TrainingRequest) and request.action in ("pause", "checkpoint")
        if harmless or request.seen is None:
            return
        unseen = [c.what for c in self._changes[request.seen :] if c.requester != request.requester]
        if unseen:
            more = f" and {len(unseen) - _MAX_TOLD} more before" if len(unseen) > _MAX_TOLD else ""
            raise RunRefused(
                f"the run has changed since you last looked: {'; '.join(unseen[-_MAX_TOLD:])}{more}. "
                "Call get_run_status, think again, and ask again if it still fits"
            )

    def _new_intervention(self, request: ActingRequest) -> Intervention:
        with self._wake:
            self._num_interventions += 1
            number = self._num_interventions
        fix, mode, parameters = "", "apply", {}
        if isinstance(request, FixRequest):
            fix, mode, parameters = request.fix, request.mode, request.parameters
        elif isinstance(request, RevertRequest):
            fix, parameters = "revert", {"intervention_id": request.intervention_id}
        elif isinstance(request, PolicyRequest):
            fix = "policy"
            parameters = request.policy.model_dump(mode="json")
        elif request.action == "rollback":
            fix, parameters = "rollback", {"snapshot": request.snapshot}
        else:
            fix = f"training:{request.action}"
        return Intervention(
            id=f"i{number}",
            run_id=self._run_id,
            fix=fix,
            mode=mode,
            parameters=tuple(ParameterValue(name=n, value=v) for n, v in sorted(parameters.items())),
            requester=request.requester,
            reason=request.reason,
            state=InterventionState.PENDING,
            requested_at_s=time.time(),
        )

    # ------------------------------------------------------------------ the training thread

    def at_boundary(self, step: int) -> None:
        """Between two steps: act, watch, save.

        Raises:
            TrainingStopped: If the training was asked to stop.
        """
        now = time.monotonic()
        self._thread_id = threading.get_ident()
        self._durations.append(now - self._last_boundary)
        self._last_boundary = now
        self._run.collector.at_boundary()
        if self._ranks is not None and self._begins_to_record:
            self._begins_to_record = False
            self._ranks.finish("")
        if self._ranks is not None and not self._ranks.is_main:
            self._follow(self._ranks, step)
        else:
            self._lead(step)
        self._last_boundary = time.monotonic()
        if self._stop:
            raise TrainingStopped

    def _lead(self, step: int) -> None:
        """Where the process is alone, or the main rank: decide, and act."""
        self._watch(step)
        healthy = self._recorder.num_open_warnings == 0
        if self._ranks is None:
            self._snapshots.take_if_due(step, healthy=healthy)
        elif healthy and not self._joint and not self._ranks.lost and self._snapshots.is_due(_SAVE_TOGETHER_S):
            self._joint.append(JointAction(kind="save"))
        if self.policy.mode is not PolicyMode.OFF:
            if self._capture.is_due(step) or self._capture.takes_news():
                self._recorder.flush(1.0)
            self._autofix.at_boundary(step, self.policy)
        if self._ranks is not None and not self._act_jointly(self._ranks, step):
            return
        while self._queue or self._paused is not None:
            with self._wake:
                while not self._queue and self._paused is not None and not self._closed:
                    self._wake.wait()
                queued = self._queue.popleft() if self._queue else None
            if queued is None:
                break
            if self._wants_batches(queued):
                self._queue.appendleft(queued)
                break
            try:
                if self._ranks is None:
                    done = self._carry_out(queued)
                elif self._agrees(self._ranks, step, queued):
                    done = self._carry_out_together(self._ranks, queued)
                else:
                    self._queue.appendleft(queued)
                    break
            except GradtracerError as error:
                self._put(_ended(queued.intervention, InterventionState.REFUSED, self._run.step, str(error)))
                queued.future.set_exception(error)
            except BaseException as error:
                outcome = f"cut short by {type(error).__name__}, so that it may be done in part"
                self._put(_ended(queued.intervention, InterventionState.FAILED, self._run.step, outcome))
                queued.future.set_exception(RunNotLive(f"the training was interrupted: this was {outcome}"))
                raise
            else:
                queued.future.set_result(InterventionReply(intervention=done, num_changes=len(self._changes)))

    def close(self, reason: str = "the training ended before the next step boundary") -> None:
        """Refuse what still waits, and take nothing more.

        Args:
            reason: Why nothing is carried out any more, for those who asked and who will ask.
        """
        with self._wake:
            self._closed = self._closed or reason
            waiting = list(self._queue)
            self._queue.clear()
            self._wake.notify_all()
        for active in self._active.values():
            self._note_report(active)
        for queued in waiting:
            self._put(_ended(queued.intervention, InterventionState.REFUSED, None, reason))
            queued.future.set_exception(RunNotLive(reason))

    def _carry_out(self, queued: _Queued) -> Intervention:
        request = queued.request
        try:
            self._refuse_a_stale_view(request)
            if isinstance(request, FixRequest):
                done = self._fix(queued.intervention, request, queued.plans)
            elif isinstance(request, RevertRequest):
                done = self._revert(queued.intervention, request)
            elif isinstance(request, PolicyRequest):
                done = self._set_policy(queued.intervention, request.policy)
            elif request.action == "rollback":
                done = self._apply(queued.intervention, Plan.parse("rollback", {"snapshot": request.snapshot}))
            else:
                done = self._training(queued.intervention, request)
        except GradtracerError:
            raise
        except Exception:
            # A fix that breaks must not take the training with it; the intervention says that it failed.
            log.exception("the fix %s failed", queued.intervention.fix)
            done = _ended(
                queued.intervention, InterventionState.FAILED, self._run.step, "it raised an error, see the log"
            )
        self._put(done)
        if done.mode == "apply" and done.state in _ACTED and not done.fix.startswith("training:"):
            self._note_change(f"{_deed(done)}, at step {self._run.step}", done.requester)
        return done

    def _wants_batches(self, queued: _Queued) -> bool:
        """Whether the request waits for steps to be recorded; begins to record them where it does."""
        request, run = queued.request, self._run
        if not isinstance(request, FixRequest) or request.mode == "dry_run" or run.replays:
            return False
        wanted = max(plan.fix.num_batches for plan in queued.plans)
        if request.mode == "trial":
            wanted = max(wanted, min(_MAX_BATCHES, request.trial_steps))
        collector = run.collector
        if wanted == 0 or collector.trouble is not None or self._paused is not None:
            return False
        if collector.is_collecting:
            return True
        if len(collector.tapes) >= wanted and run.step - self._collected_at <= _BATCHES_LAST_STEPS:
            return False
        if queued is self._collected_for:
            return False  # fewer fit than were wanted; it has to do with them
        self._collected_at, self._collected_for = run.step + wanted, queued
        if self._ranks is None:
            collector.want(wanted)
        else:
            self._joint.append(JointAction(kind="record", num_batches=wanted))
        return True

    # ------------------------------------------------------------------ several ranks

    def _agrees(self, ranks: Ranks, step: int, queued: _Queued) -> bool:
        """Main rank: whether all ranks carry the request out now."""
        if not queued.body:
            queued.body = JointAction(
                kind="request",
                request=queued.request,
                intervention=queued.intervention,
                first_open_problem_step=self._run.first_open_problem_step(),
            ).model_dump_json()
        try:
            return self._all_do(ranks, step, queued.body)
        except RunRefused as error:
            self._note(step, str(error))
            raise

    def _all_do(self, ranks: Ranks, step: int, body: str) -> bool:
        return ranks.agree(step, body, statistics.median(self._durations), at_once=self._paused is not None)

    def _carry_out_together(self, ranks: Ranks, queued: _Queued) -> Intervention:
        """Do what all ranks do now; where it failed on one, take it back on all."""
        told = JointAction.model_validate_json(queued.body)
        error: GradtracerError | None = None
        done = queued.intervention
        with self._run.agreed(told.first_open_problem_step):
            try:
                done = self._carry_out(queued)
            except GradtracerError as refused:
                error = refused
            failed = done.state is InterventionState.FAILED
            problems = ranks.finish(str(error) if error is not None else done.outcome if failed else "")
            if problems:
                self._undo(done.id, restore=failed)
        ranks.hold(self._paused is not None)
        if error is not None:
            raise error
        if problems:
            raise RunRefused(f"it failed on a rank, so it was taken back on all of them: {_by_rank(problems)}")
        return done

    def _undo(self, intervention_id: str, *, restore: bool) -> None:
        """Take back what has just been done, since another rank could not do it, or this one only in part."""
        active = self._active.pop(intervention_id, None)
        try:
            if active is not None:
                active.undo()
            elif restore and any(s.step == self._run.step for s in self._snapshots.list()):
                self._run.restore(f"step-{self._run.step}")
        except GradtracerError:
            log.exception("what had failed on another rank could not be taken back here")
        self._stop = False
        if self._paused is not None and self._paused.id == intervention_id:
            self._paused = None

    def _act_jointly(self, ranks: Ranks, step: int) -> bool:
        """What this rank has decided by itself; whether nothing of it waits any more."""
        while self._joint:
            action = self._joint[0]
            taking_back = action.intervention
            if taking_back is not None and taking_back.id not in self._active:
                self._joint.popleft()  # reverted by request meanwhile
                continue
            try:
                if not self._all_do(ranks, step, action.model_dump_json()):
                    return False
                self._do_jointly(ranks, action)
            except RunRefused as error:
                if action.kind == "save":
                    self._snapshots.stop_periodic()
                    self._note(step, f"No periodic snapshots: {error}")
                else:
                    self._note(step, str(error))
                if taking_back is not None:
                    outcome = f"{action.verdict}; it could not be taken back: {error}"
                    self._put(_ended(taking_back, InterventionState.FAILED, step, outcome))
            self._joint.popleft()
        return not self._begins_to_record

    def _do_jointly(self, ranks: Ranks, action: JointAction) -> None:
        if action.kind == "record":
            self._run.collector.want(action.num_batches)
            self._begins_to_record = True
            return
        with self._run.agreed(action.first_open_problem_step):
            problem = ""
            try:
                if action.intervention is not None:
                    problem = self._take_back(action.intervention, self._run.step, action.verdict)
                else:
                    self._snapshots.take_periodic(self._run.step)
            except Exception as error:  # the others wait for a word
                problem = f"{type(error).__name__}: {error}"
                log.exception("what all ranks do together failed")
            problems = ranks.finish(problem)
        if problems and ranks.is_main:
            raise RunRefused(_by_rank(problems))

    def _follow(self, ranks: Ranks, step: int) -> None:
        """On a rank above 0: what the main rank tells."""
        while (body := ranks.due(step, hold=self._paused is not None)) is not None:
            action = JointAction.model_validate_json(body)
            request = action.request
            if request is None or action.intervention is None:
                self._do_jointly(ranks, action)
                if self._begins_to_record:
                    return
                continue
            assert not isinstance(request, (StatusRequest, FlushRequest))
            queued = _Queued(request, action.intervention, Future(), _plans(request), body)
            with contextlib.suppress(GradtracerError):  # it was reported to the main rank
                self._carry_out_together(ranks, queued)
        self._paused = None  # resumed, or the main rank is gone

    def _note(self, step: int, message: str) -> None:
        if message not in self._noted:
            self._noted.add(message)
            self._recorder.add_observation(CaptureNotice(step=max(step, 0), message=message))

    # ------------------------------------------------------------------ acting

    def _fix(self, asked: Intervention, request: FixRequest, plans: Sequence[Plan]) -> Intervention:
        for plan in plans:
            if self._run.is_sharded and not plan.fix.works_sharded:
                raise BadParameter(
                    f"{plan.fix.code} needs whole parameters, and those of this model are sharded over the ranks "
                    "(fully_shard)"
                )
        if request.mode == "trial":
            result = self._run.try_out(plans, request.trial_steps)
            return asked.model_copy(
                update={
                    "state": InterventionState.TRIED,
                    "trial": result,
                    "ended_step": self._run.step,
                    "outcome": f"{result.conclusion} The run itself was not changed.",
                }
            )
        if request.mode == "apply":
            return self._apply(asked, plans[0])
        changes = tuple(plans[0].fix.preview(self._run, plans[0].parameters))
        return asked.model_copy(
            update={
                "state": InterventionState.PREVIEWED,
                "changes": changes,
                "outcome": "nothing was changed; mode='apply' does it",
            }
        )

    def _apply(self, asked: Intervention, plan: Plan) -> Intervention:
        changes = tuple(plan.fix.preview(self._run, plan.parameters))
        rolled_back_to = self._run.rollback_target().name if plan.rollback_first else None
        saved = self._run.take_snapshot()
        undo = self._run.carry_out(plan)
        watch = Watch.after(self._recent_losses(self._run.step))
        # A fix that cannot hurt a healthy run stays whatever the loss does.
        watched = plan.fix.safety is not Safety.SAFE
        until = "gets worse" if not plan.fix.loss_may_rise else "is no longer finite"
        done = asked.model_copy(
            update={
                "state": InterventionState.APPLIED,
                "changes": changes,
                "applied_step": self._run.step,
                "loss_before": watch.loss,
                "snapshot": saved.name if saved else None,
                "rolled_back_to": rolled_back_to,
                "outcome": f"in force; watched for {watch.num_steps} steps, taken back by itself if the loss {until}"
                if watched
                else "in force",
            }
        )
        if plan.fix.loss_may_rise:
            watch = replace(watch, loss=None)
        self._active[done.id] = _Active(done, undo, watch if watched else None)
        return done

    def _revert(self, asked: Intervention, request: RevertRequest) -> Intervention:
        active = self._active.get(request.intervention_id)
        if active is None:
            state = self._interventions[request.intervention_id].state.value
            raise RunRefused(f"{request.intervention_id} is {state}: there is nothing to take back")
        self._note_report(active)
        active.undo()
        del self._active[request.intervention_id]
        self._put(
            _ended(
                active.intervention, InterventionState.REVERTED, self._run.step, f"taken back by {request.requester}"
            )
        )
        return _ended(asked, InterventionState.KEPT, self._run.step, f"{request.intervention_id} was taken back")

    def _set_policy(self, asked: Intervention, policy: AutofixPolicy) -> Intervention:
        old, self.policy = self.policy.model_dump(mode="json"), policy
        new = policy.model_dump(mode="json")
        changes = tuple(Change(target=f"policy.{n}", old=old[n], new=new[n]) for n in new if new[n] != old[n])
        done = _ended(asked, InterventionState.KEPT, self._run.step, f"the policy is {policy.mode.value} now")
        return done.model_copy(update={"changes": changes})

    def _training(self, asked: Intervention, request: TrainingRequest) -> Intervention:
        if request.action == "pause":
            if self._paused is not None:
                raise RunRefused("the training is paused already; control_training resume lets it go on")
            self._paused = asked.model_copy(
                update={"state": InterventionState.APPLIED, "applied_step": self._run.step, "outcome": "paused"}
            )
            return self._paused
        if request.action == "resume":
            if self._paused is None:
                raise RunRefused("the training is not paused")
            self._put(_ended(self._paused, InterventionState.REVERTED, self._run.step, "resumed"))
            self._paused = None
            return _ended(asked, InterventionState.KEPT, self._run.step, "resumed")
        saved = self._run.take_snapshot()
        if request.action == "checkpoint":
            if saved is None:
                raise RunRefused("the state holds a non-finite number, so it is not saved")
            path = self._snapshots.path(saved.name)
            part = "; it holds rank 0's part of a sharded model" if self._run.is_sharded else ""
            outcome = f"saved as {saved.name}: {os.fspath(path)}{part}"
            done = _ended(asked, InterventionState.KEPT, self._run.step, outcome)
        else:
            self._stop, self._paused = True, None
            name = saved.name if saved else "nothing, since the state is not finite"
            done = _ended(asked, InterventionState.KEPT, self._run.step, f"stopped after this step; saved {name}")
        return done.model_copy(update={"snapshot": saved.name if saved else None})

    def _watch(self, step: int) -> None:
        for active in list(self._active.values()):
            applied = active.intervention.applied_step
            assert applied is not None
            watch = active.watch if active.watch and step >= applied + active.watch.num_steps else None
            if watch is not None or step % _REPORT_STEPS == 0:
                self._note_report(active)
            if watch is None:
                continue
            active.watch = None
            after = [x for s, x in self._capture.recent_losses if s > applied]
            finite = [x for x in after if x < float("inf")]
            median = statistics.median(finite) if finite else None
            watched = active.intervention.model_copy(update={"loss_after": median})
            verdict = watch.worse(after)
            if verdict is None:
                active.intervention = _ended(watched, InterventionState.KEPT, step, _kept(watch.loss, median))
                self._put(active.intervention)
                continue
            if self._ranks is None:
                self._take_back(watched, step, verdict)
            else:
                self._joint.append(JointAction(kind="take_back", intervention=watched, verdict=verdict))

    def _note_report(self, active: _Active) -> None:
        """Put on record what a fix in force tells of itself, where that is news."""
        if isinstance(active.undo, ReportingUndo) and (told := active.undo.report()) != active.intervention.report:
            active.intervention = active.intervention.model_copy(update={"report": told})
            self._put(active.intervention)

    def _take_back(self, watched: Intervention, step: int, verdict: str) -> str:
        """Undo what made things worse; why that failed, empty where it did not."""
        active = self._active.pop(watched.id)
        try:
            active.undo()
            if watched.snapshot is not None and watched.fix != "rollback":
                self._run.restore(watched.snapshot)
        except GradtracerError as error:
            outcome = f"{verdict}; it could not be taken back: {error}"
            self._put(_ended(watched, InterventionState.FAILED, step, outcome))
            return str(error)
        self._put(_ended(watched, InterventionState.REVERTED, step, f"taken back by itself: {verdict}"))
        self._note_change(f"{watched.id} {watched.fix} was taken back by itself at step {step}", "watch")
        return ""

    def _has_diverged(self) -> bool:
        """Whether none of the last losses was finite; a single one may be a bad batch."""
        last = [x for _, x in list(self._capture.recent_losses)[-_DIVERGED_STEPS:]]
        return len(last) == _DIVERGED_STEPS and all(x == float("inf") for x in last)

    def _recent_losses(self, until_step: int) -> list[float]:
        recent = [x for s, x in self._capture.recent_losses if s <= until_step and x < float("inf")]
        return recent[-_LOSSES_BEFORE:]

    def _note_change(self, what: str, requester: str) -> None:
        """Count a change of the run, once it is in the record: who has seen the count can have read it."""
        self._changes.append(_RunChange(requester, what))

    def _put(self, intervention: Intervention) -> None:
        self._interventions[intervention.id] = intervention
        self._recorder.put_intervention(intervention)


def _num_ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _plans(request: ActingRequest) -> tuple[Plan, ...]:
    if not isinstance(request, FixRequest):
        return ()
    wanted = (request, *request.alternatives)
    return tuple(Plan.parse(c.fix, c.parameters, c.rollback_first) for c in wanted)


def _by_rank(problems: dict[int, str]) -> str:
    return "; ".join(f"rank {r}: {text}" for r, text in sorted(problems.items()))


def _deed(done: Intervention) -> str:
    parameters = ", ".join(f"{p.name}={p.value}" for p in done.parameters if p.value is not None)
    failed = ", which failed" if done.state is InterventionState.FAILED else ""
    return f"{done.id} {done.fix}({parameters}) by {done.requester}{failed}"


def _ended(intervention: Intervention, state: InterventionState, step: int | None, outcome: str) -> Intervention:
    return intervention.model_copy(update={"state": state, "ended_step": step, "outcome": outcome})


def _kept(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "kept: the loss is finite"
    return f"kept: the median loss went from {before:.4g} to {after:.4g}"
