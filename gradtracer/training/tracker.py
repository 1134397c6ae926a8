"""FlowTracker: what a user puts into a training program."""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.detectors import all_detectors
from gradtracer.diagnosis import diagnose
from gradtracer.errors import TrackerInUse, UsageError
from gradtracer.home import home_directory, manifest_state, new_run_directory, write_manifest
from gradtracer.journal import Journal
from gradtracer.records import (
    AutofixPolicy,
    CaptureNotice,
    CausalHypothesis,
    OptimizerDescription,
    OptimizerGroup,
    ParameterValue,
    PolicyMode,
    RunManifest,
    SemanticEvent,
    Severity,
    clean_name,
)
from gradtracer.report import build_report, to_text
from gradtracer.series import Series
from gradtracer.training.audits import all_audits
from gradtracer.training.capture import Capture, is_compiled
from gradtracer.training.control_server import ControlServer
from gradtracer.training.controller import Controller, TrainingStopped
from gradtracer.training.hooks import HOOKS
from gradtracer.training.layers import describe_model
from gradtracer.training.live_run import GuardsAlone, TrainingRun
from gradtracer.training.rank_replicas import RankReplicas
from gradtracer.training.ranks import ranks_of
from gradtracer.training.recorder import Recorder
from gradtracer.training.schedule import Schedule
from gradtracer.training.silent_recorder import SilentRecorder
from gradtracer.training.snapshots import SnapshotStore
from gradtracer.training.state import TrainingState
from gradtracer.training.strays import held_by_any_optimizer

log = logging.getLogger("gradtracer")

F = TypeVar("F", bound=Callable[..., Any])

_OPEN: WeakKeyDictionary[nn.Module, FlowTracker] = WeakKeyDictionary()
_PARTING_S = 5.0
"""For all ranks to close their trackers, where a fix is in force."""
_COVERAGE_STEPS = (2, 10)
"""Steps after which parameters without an optimizer are looked for; afterwards at every sampled step. In the first
step of a loop with several optimizers not all of them have been seen."""


def _harmless(method: F) -> F:
    """A failure in what only records turns the recording off, says so once, and lets training go on."""

    @functools.wraps(method)
    def guarded(self: FlowTracker, *args: Any, **kwargs: Any) -> Any:
        if self._broken:
            return None
        try:
            return method(self, *args, **kwargs)
        except TrainingStopped:
            raise
        except Exception:
            self._turn_off(traceback.format_exc())
            return None

    return guarded  # type: ignore[return-value]


class FlowTracker:
    """Watches a training run, and lets an agent steer it.

    Use it in one of two ways. Mark the steps::

        tracker = FlowTracker(model, optimizer)
        for x, y in loader:
            ...
            optimizer.step()
            tracker.step(loss=loss.item())
        tracker.close()

    or put the loop into a block and change nothing in it: steps then come from the optimizer, losses from `backward`::

        with FlowTracker(model) as tracker:
            ...

    In a distributed training make it on every rank, after `init_process_group` and behind DistributedDataParallel or
    `fully_shard`, and close it on every rank: rank 0 keeps the record, the others act together with it.

    Recording does not change training: losses and weights are bit for bit what they are without it.

    Args:
        model: The model, or any module that contains what is trained.
        optimizer: Its optimizer, or several; optimizers not named here are found when they step.
        track_interval: Steps between samples of the heavier statistics (update ratios, activations). Losses and
            gradient norms are read at every step.
        run_name: What the run is called; by default the name of the script.
        loss_fn: The loss function: where its expression makes a NaN, the record says where it stands in the source.
        replay: Computes the loss of batch `i` on the tracked model, ``replay(i) -> Tensor``, the same batch for the
            same `i`, from 0. Trials of fixes on a fork train on these; without it they use steps that were recorded
            while the training ran, where those can be run again.
        autofix: Which fixes the run may apply to itself: none, those that cannot hurt a healthy run, or also those
            that need to be watched. An `AutofixPolicy` sets budget and cooldown too.
        serve: Whether the run can be steered from outside, through a local socket.
        home: Where runs are kept; by default ``GRADTRACER_HOME``, else the user's state folder.

    Raises:
        TypeError: If `model` is not a module or `optimizer` not an optimizer.
        UsageError: If the model has no parameters, or an argument has a value that cannot work.
        TrackerInUse: If the model, or one that shares parameters with it, has an open tracker.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        track_interval: int = 100,
        run_name: str | None = None,
        loss_fn: Callable[..., Any] | None = None,
        replay: Callable[[int], Tensor] | None = None,
        autofix: Literal["off", "safe", "guarded"] | AutofixPolicy = "off",
        serve: bool = True,
        home: str | Path | None = None,
    ) -> None:
        optimizers = _checked_optimizers(optimizer)
        _check(model, track_interval)
        policy = _policy(autofix)
        self.model, self.loss_fn, self.replay = model, loss_fn, replay
        self.track_interval = track_interval
        self._broken = False
        self._left_guards = False
        self._broken_reason = ""
        self._closed = False
        self._has_start = False
        self._pid = os.getpid()
        self._ranks = ranks_of(model)
        self._is_main_rank = self._ranks is None or self._ranks.is_main
        self._described_optimizers: tuple[Any, ...] = ()
        self._seemed_missing: list[str] = []
        self._missing: list[str] = []
        self._manifest: RunManifest | None = None
        self._schedule = Schedule(track_interval)
        self.run_id, self.directory = "", Path()
        self._recorder: Recorder | SilentRecorder = SilentRecorder()
        audits = all_audits()  # on every rank: some fixes need what an audit has seen
        name = clean_name(run_name or Path(sys.argv[0]).stem or "run")
        if self._is_main_rank:
            self.run_id, self.directory = new_run_directory(home_directory(home), name)
            self._recorder = Recorder(self.directory, all_detectors(), on_event=self._on_event)
        else:  # It acts as the main rank does; journal and socket are there. What it saves for a while is its own.
            self.directory = Path(tempfile.mkdtemp(prefix="gradtracer-"))
        if self._ranks is not None:
            audits.append(RankReplicas(self._ranks, track_interval))
        self._capture = Capture(
            model,
            optimizers,
            self._schedule,
            self._recorder,
            on_step_end=self._on_step_end,
            on_guards=lambda o: self._run.run_guards(o),
            after_guards=lambda o: self._run.finish_guards(o),
            audits=audits,
            loss_fn=loss_fn,
            mail=self._ranks.mail if self._ranks is not None else None,
            rank=self._ranks.rank if self._ranks is not None else 0,
        )
        state = TrainingState(model, self._capture.optimizers, HOOKS.scalers)
        self._snapshots = SnapshotStore(
            self.directory / "snapshots",
            state,
            notify=self._put_notice,
            on_all_ranks=self._ranks.all if self._ranks is not None else bool,
        )
        self._run = TrainingRun(self._capture, self._recorder, self._snapshots, state, replay, self._ranks)
        self._controller = Controller(
            self.run_id,
            self._run,
            self._capture,
            self._recorder,
            self._snapshots,
            policy=policy,
            diagnose=self.explain_failure,
            ranks=self._ranks,
        )
        self._server = ControlServer(self._controller, self.directory) if serve and self._is_main_rank else None
        _OPEN[model] = self
        HOOKS.add(self)
        atexit.register(self._at_exit)
        if not self._is_main_rank:
            return
        if self._server is not None:
            self._server.start()
        self._manifest = RunManifest(
            run_id=self.run_id,
            name=name,
            pid=self._pid,
            pid_created_s=psutil.Process().create_time(),
            started_at_s=time.time(),
            track_interval=track_interval,
            address=self._server.address if self._server else None,
            token=self._server.token if self._server else "",
            framework=f"torch {torch.__version__}",
            command=" ".join(sys.argv),
        )
        write_manifest(self.directory, self._manifest)
        if is_compiled(model):
            self._put_notice(
                "The model is compiled: activations are not read, since a forward hook would make it compile again. "
                "Gradients, weights and updates are."
            )
        if self._capture.is_sharded:
            self._put_notice(
                "Parameters are sharded over ranks: gradient norms are those of the whole, and need a tracker on every "
                "rank; update ratios and step cosines are of rank 0's part; audits of weights and gradients are off."
            )
        self._describe_model(0)

    # ------------------------------------------------------------------ for the user

    def step(self, loss: float | Tensor | None = None) -> None:
        """Say that a training step is over; call it once behind `optimizer.step()`.

        Args:
            loss: The step's loss. A float or a one-element tensor; without it the loss that backward was called on
                is taken.

        Raises:
            TypeError: If the loss is neither.
            TrainingStopped: If an agent asked for the training to stop.
        """
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise TypeError(f"expected a loss of one element, got a tensor of shape {tuple(loss.shape)}")
        elif loss is not None:
            try:
                loss = float(loss)
            except (TypeError, ValueError) as error:
                raise TypeError(f"expected a loss that is a number or a tensor, got {type(loss).__name__}") from error
        self._mark(loss)

    def explain_failure(self) -> list[CausalHypothesis]:
        """Possible causes of what the run shows, most probable first; also after `close`.

        Returns:
            Hypotheses with their evidence; `healthy` competes with the causes, and is first where nothing is wrong.
            Empty before anything was recorded.
        """
        series = self._series()
        return list(diagnose(series)) if series is not None and len(series.steps) else []

    def report(self) -> None:
        """Print a readable report: how the run went, what happened, why, and what was done about it."""
        series = self._series()
        if series is None or self._manifest is None:
            print(f"gradtracer: nothing was recorded{self._why_nothing()}")
            return
        print(to_text(build_report(self._manifest, series, manifest_state(self._manifest))))

    @property
    def events(self) -> list[SemanticEvent]:
        """What happened so far, in order."""
        self._recorder.flush(5.0)
        return list(self._recorder.events)

    @property
    def broken_reason(self) -> str:
        """Why recording stopped before the training did: an error of the tracker's own; empty where it did not."""
        return self._broken_reason

    def close(self, error: BaseException | None = None) -> None:
        """Remove every hook, write what is left, and end the run. A second call does nothing.

        Args:
            error: The exception that ended the training, where one did.
        """
        if self._closed or os.getpid() != self._pid:  # a forked worker has nothing to close
            return
        self._closed = True
        HOOKS.remove(self)
        _OPEN.pop(self.model, None)
        atexit.unregister(self._at_exit)
        if not self._broken:
            self._finish_capture()
        self._controller.close()
        self._leave_ranks()
        self._snapshots.close(keep=self._is_main_rank)
        self._recorder.close()
        if self._server is not None:
            self._server.close()
        if self._manifest is None:
            shutil.rmtree(self.directory, ignore_errors=True)
            return
        self._manifest = self._manifest.model_copy(
            update={
                "state": "crashed" if error is not None else "finished",
                "error": _describe_error(error) if error is not None else None,
                "ended_at_s": time.time(),
                "address": None,
                "token": "",
                "audit_head": self._recorder.audit_head,
            }
        )
        try:
            write_manifest(self.directory, self._manifest)
        except OSError as problem:
            log.warning("the end of run %s could not be written: %s", self.run_id, problem)

    def __enter__(self) -> FlowTracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        stopped = isinstance(error, TrainingStopped)
        self.close(None if stopped else error)
        return stopped

    def __deepcopy__(self, memo: dict[int, object]) -> FlowTracker:
        return self  # a copy of what holds a tracker is tracked by the same one

    def __reduce__(self) -> Any:
        raise TypeError("a FlowTracker cannot be pickled: it belongs to this process. Save the model without it")

    # ------------------------------------------------------------------ TrainingListener

    @_harmless
    def on_backward(self, loss: Tensor, unscaled: Tensor) -> None:
        """See `gradtracer.training.hooks.TrainingListener`."""
        if self._run.is_rehearsing:
            return
        self._save_start()
        recorder = self._run.collector.recorder
        recorder.on_backward(loss, unscaled)
        with recorder.aside():
            self._capture.on_backward(loss, unscaled)

    @_harmless
    def on_backward_done(self) -> None:
        """See `gradtracer.training.hooks.TrainingListener`."""
        if not self._run.is_rehearsing:
            with self._run.collector.recorder.aside():
                self._capture.on_backward_done()

    @_harmless
    def on_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        """See `gradtracer.training.hooks.TrainingListener`."""
        if self._run.is_rehearsing:
            self._run.run_guards(optimizer)
            return
        self._save_start()
        self._run.collector.recorder.on_update(optimizer, has_closure)
        self._capture.on_update(optimizer, has_closure)

    @_harmless
    def on_updated(self, optimizer: Optimizer, has_closure: bool) -> None:
        """See `gradtracer.training.hooks.TrainingListener`."""
        if self._run.is_rehearsing:
            self._run.finish_guards(optimizer)
            return
        self._run.collector.recorder.on_updated()
        with self._run.collector.recorder.aside():
            self._capture.on_updated(optimizer, has_closure)

    # ------------------------------------------------------------------ inside

    def _save_start(self) -> None:
        if not self._has_start:
            self._has_start = True
            self._snapshots.take_start()

    @_harmless
    def _mark(self, loss: float | Tensor | None) -> None:
        if not self._closed and not self._run.is_rehearsing:
            with self._run.collector.recorder.aside():
                self._capture.mark_step(loss)

    @_harmless
    def _finish_capture(self) -> None:
        self._run.collector.release()
        self._capture.close()
        self._describe_optimizers(self._capture.last_step)

    def _put_notice(self, message: str) -> None:
        self._recorder.add_observation(CaptureNotice(step=max(self._capture.last_step, 0), message=message))

    def _on_step_end(self, step: int) -> None:
        if step == 0 or (step < 100 and len(self._capture.forward_order) > self._num_described):
            self._describe_model(step)
        if step == 0 or step in _COVERAGE_STEPS or self._schedule.is_due(step):
            self._describe_optimizers(step)
        self._controller.at_boundary(step)

    def _on_event(self, event: SemanticEvent) -> None:
        """In the recorder's thread: look closely at what follows."""
        if event.severity is not Severity.INFO:
            self._schedule.look_closely()

    def _describe_model(self, step: int) -> None:
        capture = self._capture
        self._num_described = len(capture.forward_order)
        self._recorder.add_observation(
            describe_model(
                self.model,
                capture.layers,
                step=max(step, 0),
                held=capture.held,
                forward_order=capture.forward_order,
                fed_by=capture.fed_by,
                types=capture.activation_types,
                loss_source=capture.loss_sources[0] if len(capture.loss_sources) == 1 else None,
            )
        )

    def _describe_optimizers(self, step: int) -> None:
        capture = self._capture
        unheld = capture.unheld_with_gradient() if step >= min(_COVERAGE_STEPS) else []
        missing = [name for name, _ in unheld]
        if missing and missing != self._seemed_missing:
            self._seemed_missing = missing
            held = held_by_any_optimizer()  # also by one that has not stepped yet: a critic's, a warm-up's
            self._missing = [name for name, p in unheld if id(p) not in held]
        missing = self._missing if missing else []
        described = tuple(
            (
                type(o).__name__,
                tuple((len(g["params"]), g.get("weight_decay"), g.get("momentum")) for g in o.param_groups),
                tuple(missing),
            )
            for o in capture.optimizers
        )
        if described == self._described_optimizers:
            return
        self._described_optimizers = described
        ours = {id(p) for p in capture.parameters}
        for optimizer in capture.optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self._recorder.add_observation(
                OptimizerDescription(
                    step=max(step, 0),
                    type=type(optimizer).__name__,
                    groups=tuple(_group(g) for g in optimizer.param_groups),
                    missing=tuple(missing),
                    num_foreign=sum(id(p) not in ours for p in held),
                    source=capture.program.optimizer_line(optimizer),
                )
            )
        if capture.optimizers:
            self._describe_model(step)

    def _series(self) -> Series | None:
        if not self._is_main_rank or (
            self._recorder.disabled_reason and not (self.directory / "journal.sqlite").exists()
        ):
            return None
        self._recorder.flush(10.0)
        with Journal(self.directory) as journal:
            return Series.from_journal(journal)

    def _why_nothing(self) -> str:
        if not self._is_main_rank:
            return " on this rank: the main rank keeps the record"
        return f": {self._recorder.disabled_reason}" if self._recorder.disabled_reason else ""

    def _turn_off(self, trace: str) -> None:
        self._broken = True
        self._broken_reason = trace
        HOOKS.remove(self)
        self._run.collector.release()
        self._capture.activations.disarm()
        for optimizer in self._capture.optimizers:
            self._run.finish_guards(optimizer)  # a fix in force must not leave its rate or a gradient behind
        self._leave_ranks()
        log.warning(
            "gradtracer stopped recording run %s because of an error of its own; training goes on. Please report:\n%s",
            self.run_id,
            trace,
        )
        self._recorder.add_observation(
            CaptureNotice(
                step=max(self._capture.last_step, 0),
                message=f"Recording stopped because of an error in the tracker:\n{trace[-1500:]}",
            )
        )
        self._controller.close("the tracker stopped because of an error of its own; training goes on without it")

    def _leave_ranks(self) -> None:
        """A fix in force ends on all ranks or on none: what the others still do, this one does too."""
        if self._ranks is None:
            return
        patience_s = _PARTING_S if self._run.has_guards and not self._broken else 0.0
        if not self._ranks.close(patience_s) and self._run.has_guards and not self._left_guards:
            self._left_guards = True
            HOOKS.add(GuardsAlone(self._run))
            log.warning("gradtracer: a fix stays in force, since the other ranks go on with it")

    def _at_exit(self) -> None:
        # An exception that ended the program was printed before this runs, which leaves it in sys.last_value.
        error = getattr(sys, "last_value", None)
        self.close(error if isinstance(error, BaseException) and not isinstance(error, SystemExit) else None)


NeuralDbg = FlowTracker
"""The name that NeuralDBG users know; the same class."""


def _check(model: object, track_interval: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected model to be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(track_interval, bool) or not isinstance(track_interval, int) or track_interval < 1:
        raise UsageError(f"expected track_interval to be a whole number of at least 1, got {track_interval!r}")
    parameters = {id(p) for p in model.parameters()}
    if not parameters:
        raise UsageError(
            f"{type(model).__name__} has no parameters, so there is nothing to track. If its layers are in a plain "
            "list or dict, put them into nn.ModuleList or nn.ModuleDict"
        )
    for other in list(_OPEN):
        if any(id(p) in parameters for p in other.parameters()):
            raise TrackerInUse(
                f"{type(model).__name__} already has an open tracker (run {_OPEN[other].run_id}); close it first"
            )


def _policy(autofix: object) -> AutofixPolicy:
    if isinstance(autofix, AutofixPolicy):
        return autofix
    modes = [mode.value for mode in PolicyMode]
    if autofix not in modes:
        raise UsageError(f"expected autofix to be one of {', '.join(modes)} or an AutofixPolicy, got {autofix!r}")
    return AutofixPolicy(mode=PolicyMode(autofix))


def _checked_optimizers(optimizer: Any) -> list[Optimizer]:
    if optimizer is None:
        return []
    found = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(found, Iterable) or isinstance(found, (str, Tensor)):
        raise TypeError(f"expected optimizer to be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    checked = list(found)
    for one in checked:
        if not isinstance(one, Optimizer):
            raise TypeError(f"expected optimizer to be a torch.optim.Optimizer, got {type(one).__name__}")
    return checked


def _group(group: dict[str, Any]) -> OptimizerGroup:
    plain = {
        name: value
        for name, value in group.items()
        if name != "params" and (value is None or isinstance(value, (bool, int, float, str)))
    }
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            plain[name] = float(value)
        elif name == "betas":
            plain.update({f"beta{i + 1}": float(b) for i, b in enumerate(value)})
    return OptimizerGroup(
        num_parameters=sum(p.numel() for p in group["params"]),
        hyperparameters=tuple(
            ParameterValue(name=name, value=value if not isinstance(value, float) or math.isfinite(value) else None)
            for name, value in sorted(plain.items())
        ),
    )


def _describe_error(error: BaseException) -> str:
    lines = traceback.format_exception_only(type(error), error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f' (File "{frames[-1].filename}", line {frames[-1].lineno})' if frames else ""
    return "".join(lines).strip() + where
