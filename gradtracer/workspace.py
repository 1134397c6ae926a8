"""Every question that a tool or the command line can ask about runs, one public method each.

What a run recorded is read from its journal, so it can be asked of a finished or dead run too. What changes a run goes
over its control channel. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from gradtracer.candidates import MAX_CANDIDATES, unknown
from gradtracer.causes import CAUSES
from gradtracer.control import (
    DEFAULT_TRIAL_STEPS,
    ActingRequest,
    Candidate,
    ControlClient,
    FixRequest,
    InterventionReply,
    PolicyRequest,
    Refusal,
    RevertRequest,
    TrainingRequest,
)
from gradtracer.detectors import DETECTORS
from gradtracer.diagnosis import diagnose
from gradtracer.errors import (
    BadParameter,
    GradtracerError,
    RunNotLive,
    RunRefused,
    UnknownFix,
    UnknownIntervention,
    Untrusted,
)
from gradtracer.fixes import FIXES, get_fix
from gradtracer.home import home_directory, list_run_directories
from gradtracer.journal import Journal
from gradtracer.recorded import (
    check_layers,
    layer_column,
    metric,
    model_layers,
    number,
    recorded_layers,
    with_recorded,
)
from gradtracer.records import (
    AuditTrail,
    AutofixPolicy,
    CausalHypothesis,
    Diagnosis,
    DiagnosticReport,
    EventPage,
    FixList,
    Intervention,
    LayerStat,
    LayerStats,
    LayerStatsAnswer,
    MetricsAnswer,
    MetricSeries,
    ParameterScalar,
    PolicyMode,
    RankedSuggestion,
    RunList,
    RunNotice,
    RunState,
    RunStatus,
    RunSummary,
    SemanticEvent,
    Severity,
)
from gradtracer.redetection import redetect as redetected
from gradtracer.report import build_report, layer_health
from gradtracer.runs import Run, find_run, flush, open_run, standing
from gradtracer.series import Series
from gradtracer.signals import LAYER_SIGNALS, RUN_SIGNALS

Action = Literal["pause", "resume", "checkpoint", "rollback", "stop"]

# A live process answers from a thread of its own within milliseconds; a second tells a busy machine from a stopped one.
_ANSWER_S = 1.0
_MAX_CANDIDATES = 8
_MAX_DEFAULT_LAYERS = 20
_MIN_SUGGESTED_PROBABILITY = 0.05
# A page ends early where its events are long: an agent pays for every character, and has the cursor for the rest.
_PAGE_CHARACTERS = 15_000


class Workspace:
    """Answers questions about the runs of one home.

    Wherever `run_id` may be left out, the one live run is meant, or the only run there is.

    A workspace speaks for one requester and remembers up to where it has shown each run: a run that others have
    changed since refuses what it asks for.

    Args:
        home: The home of all runs; ``GRADTRACER_HOME`` or the user's state folder by default.
        requester: Who asks, for the record; two who act independently need two names.
    """

    def __init__(self, home: Path | str | None = None, *, requester: str = "agent") -> None:
        self.home = home_directory(home)
        self.requester = requester
        self._seen: dict[str, int] = {}

    def list_runs(self, limit: int = 20) -> RunList:
        """The newest runs, each in one line, and the directories that cannot be read."""
        directories = list_run_directories(self.home)
        runs: list[RunSummary] = []
        notices: list[RunNotice] = []
        for directory in directories[:limit]:
            try:
                runs.append(self._summary(open_run(directory)))
            except Untrusted as error:
                notices.append(RunNotice(run_id=directory.name, reason=str(error)))
        if not directories:
            next_steps = (
                "No run yet. In the training script: `from gradtracer import FlowTracker`, then "
                "`FlowTracker(model, optimizer)`; start it and call list_runs again.",
            )
        else:
            next_steps = ("Call get_run_status with the run_id of the run that you want to look at.",) if runs else ()
        return RunList(
            home=str(self.home),
            runs=tuple(runs),
            total=len(directories),
            notices=tuple(notices),
            next_steps=next_steps,
        )

    def get_run_status(self, run_id: str | None = None) -> RunStatus:
        """How a run stands now.

        Raises:
            UnknownRun: If there is no such run, or none at all.
            AmbiguousRun: If no run was named and there is more than one to choose from.
            Untrusted: If what lies on disk cannot be believed.
        """
        run = find_run(self.home, run_id)
        state, live = standing(run)
        flush(run)
        status = RunStatus(
            run_id=run.run_id,
            name=run.manifest.name,
            state=state,
            live=live is not None,
            step=live.step if live and live.step >= 0 else None,
            loss=None,
            active_fixes=live.active_interventions if live else (),
            policy=live.policy if live else None,
            stall=live.stall if live else None,
            error=run.error(),
        )
        if run.has_journal:
            with Journal(run.directory) as journal:
                status = with_recorded(status, journal)
        self._note_seen(run, live.num_changes if live else None)
        return status.model_copy(update={"next_steps": _next_steps(status)})

    def get_health_events(
        self,
        run_id: str | None = None,
        *,
        cursor: int = 0,
        first_step: int = 0,
        last_step: int | None = None,
        layer: str | None = None,
        kind: str | None = None,
        min_severity: Severity | str = Severity.INFO,
        limit: int = 20,
    ) -> EventPage:
        """Events of a run, oldest announcement first.

        Args:
            run_id: The run.
            cursor: Only what was announced after it; of an earlier page.
            first_step: Only episodes that begin at this step or later.
            last_step: Only episodes that begin at this step or earlier.
            layer: Only this layer.
            kind: Only this detector.
            min_severity: Only this severity or above.
            limit: At most so many; fewer where they are long.

        Raises:
            UnknownLayer: If the run has no such layer.
            BadParameter: If no detector has this code.
        """
        with self._reading(run_id) as (run, journal):
            if layer is not None:
                check_layers(journal, [layer])
            if kind is not None and kind not in DETECTORS and not journal.events(kind=kind, limit=1):
                raise BadParameter(unknown("event kind", kind, DETECTORS.codes, "Leave `kind` out to get all events"))
            found = journal.events(
                first=first_step, last=last_step, layer=layer, kind=kind, min_severity=Severity(min_severity)
            )
        waiting = [(seq, event) for seq, event in found if seq > cursor]
        page = _first_page(waiting, limit)
        more = len(waiting) > len(page)
        next_cursor = page[-1][0] if page else cursor
        return EventPage(
            run_id=run.run_id,
            events=tuple(event for _, event in page),
            cursor=next_cursor,
            more=more,
            total=len(found),
            next_steps=(f"Call get_health_events with cursor={next_cursor} and the same filter for the rest.",)
            if more
            else ("Call explain_failure for the causes behind these events.",)
            if any(e.severity is not Severity.INFO for _, e in page)
            else (),
        )

    def events_after(
        self, run_id: str | None, cursor: int, limit: int = 20, min_severity: Severity | str = Severity.INFO
    ) -> EventPage:
        """`get_health_events` for those who poll: reads the journal only, and never disturbs the training.

        Its `total` counts no further than one behind the page.
        """
        run = find_run(self.home, run_id)
        found = []
        if run.has_journal:
            with Journal(run.directory) as journal:
                found = journal.events(after_seq=cursor, min_severity=Severity(min_severity), limit=limit + 1)
        page = _first_page(found, limit)
        return EventPage(
            run_id=run.run_id,
            events=tuple(event for _, event in page),
            cursor=page[-1][0] if page else cursor,
            more=len(found) > len(page),
            total=len(found),
        )

    def summary(self, run_id: str | None = None) -> RunSummary:
        """The line of `list_runs` about one run, without disturbing its training."""
        return self._summary(find_run(self.home, run_id))

    def get_metrics(
        self,
        run_id: str | None = None,
        *,
        signals: Sequence[str] = ("loss",),
        layers: Sequence[str] | None = None,
        first_step: int = 0,
        last_step: int | None = None,
        max_points: int = 100,
    ) -> MetricsAnswer:
        """Signals over steps, each reduced to `max_points` so that its extremes stay.

        Args:
            run_id: The run.
            signals: Names of `gradtracer.signals`.
            layers: The layers of layer signals. Without them a signal of the run is meant, and for a signal that
                only layers have, layers spread evenly over the depth.
            first_step: First step.
            last_step: Last step; the newest by default.
            max_points: At most so many points a series, at least 4.

        Raises:
            BadParameter: If a signal is unknown, or `layers` are given for a signal that only the run has.
            UnknownLayer: If the run has no such layer.
        """
        known = {**LAYER_SIGNALS, **RUN_SIGNALS}
        for signal in signals:
            if signal not in known:
                raise BadParameter(
                    unknown("signal", signal, list(known), f"get_metrics knows {', '.join(sorted(known))}")
                )
            if layers is not None and signal not in LAYER_SIGNALS:
                raise BadParameter(f"{signal} is a signal of the whole run: call get_metrics without layers for it")
        left_out: tuple[str, ...] = ()
        series: list[MetricSeries] = []
        with self._reading(run_id) as (run, journal):
            if layers is not None:
                check_layers(journal, layers)
            run_signals = [s for s in signals if layers is None and s in RUN_SIGNALS]
            if run_signals:
                columns = journal.steps(first_step, last_step)
                series += [
                    metric(signal, None, columns.steps, columns.column(signal), max_points) for signal in run_signals
                ]
            layer_signals = [s for s in signals if s not in run_signals]
            if layer_signals:
                chosen = list(layers) if layers is not None else list(recorded_layers(journal))
                if layers is None and len(chosen) > _MAX_DEFAULT_LAYERS:
                    spread = np.linspace(0, len(chosen) - 1, _MAX_DEFAULT_LAYERS).round().astype(int)
                    left_out = (
                        f"{_MAX_DEFAULT_LAYERS} of {len(chosen)} layers are shown, spread over the depth; name others "
                        "in `layers`.",
                    )
                    chosen = [chosen[i] for i in spread]
                tables = list(journal.tables(first_step, last_step))
                series += [
                    metric(signal, layer, *layer_column(tables, layer, signal), max_points)
                    for signal in layer_signals
                    for layer in chosen
                ]
        recorded = tuple(s for s in series if s.layer is None or layers is not None or s.num_recorded)
        next_steps = () if recorded else ("Nothing was recorded in this range; get_run_status shows the last step.",)
        return MetricsAnswer(run_id=run.run_id, series=recorded, left_out=left_out, next_steps=next_steps)

    def get_layer_stats(
        self, run_id: str | None = None, *, step: int | None = None, layers: Sequence[str] | None = None
    ) -> LayerStatsAnswer:
        """All signals of the layers at one sampled step.

        Args:
            run_id: The run.
            step: The newest sampled step at or before this one is shown; the newest of all by default.
            layers: Only these.

        Raises:
            UnknownLayer: If the run has no such layer.
            BadParameter: If no step was sampled at or before `step`.
        """
        with self._reading(run_id) as (run, journal):
            known = check_layers(journal, layers or ())
            found = journal.newest_table(step)
            if found is None:
                sampled = journal.table_steps()
                raise BadParameter(
                    f"run {run.run_id} sampled no layers at or before step {step}; the first is {min(sampled)}"
                    if sampled
                    else f"run {run.run_id} has sampled no layers yet: it does so every {run.manifest.track_interval} "
                    "steps. get_run_status shows its step; get_metrics has the signals of every step"
                )
            types = {layer.name: layer.type for layer in model_layers(journal)}
        at, table = found
        wanted = known if layers is None else layers
        present = set(table.layers)
        return LayerStatsAnswer(
            run_id=run.run_id,
            step=at,
            layers=tuple(
                LayerStats(
                    layer=layer,
                    type=types.get(layer, ""),
                    health=layer_health(table, layer),
                    stats=tuple(
                        LayerStat(signal=signal, value=number(value))
                        for signal in LAYER_SIGNALS
                        if not np.isnan(value := table.get(layer, signal))
                    ),
                )
                for layer in wanted
                if layer in present
            ),
        )

    def explain_failure(self, run_id: str | None = None, *, redetect: bool = False) -> Diagnosis:
        """Ranked causes of what a run shows, with their evidence; works on a dead run too.

        Args:
            run_id: Which run.
            redetect: Run today's detectors over the recorded steps instead of taking the recorded events.
        """
        with self._reading(run_id) as (run, journal):
            series = Series.from_journal(journal)
        if redetect:
            series = redetected(series)
        anything = len(series.steps) or series.events or series.observations
        hypotheses = diagnose(series) if anything else ()
        return Diagnosis(
            run_id=run.run_id,
            step=max(0, series.last_step),
            summary=_summary_of(run, hypotheses),
            hypotheses=hypotheses,
            next_steps=_after_diagnosis(run, hypotheses),
        )

    def list_fixes(self, run_id: str | None = None, cause: str | None = None, fix: str | None = None) -> FixList:
        """Fixes with their parameters and bounds; those that fit a run first, where one is named.

        Args:
            run_id: Where a run is named, also what its diagnosis suggests; without it no run is needed.
            cause: Only fixes that mend this cause.
            fix: Only this one.

        Raises:
            BadParameter: If no cause has this code.
            UnknownFix: If no fix has this code.
        """
        fixes = [cls.info() for cls in FIXES] if fix is None else [get_fix(fix).info()]
        if cause is not None:
            known = sorted({*CAUSES.codes, *(code for fix in fixes for code in fix.mends)})
            if cause not in known:
                raise BadParameter(unknown("cause", cause, known, "explain_failure shows the causes that fit a run"))
            fixes = [f for f in fixes if cause in f.mends]
        hypotheses = self.explain_failure(run_id).hypotheses if run_id is not None else ()
        suggestions = [
            RankedSuggestion(cause=h.code, probability=h.probability, suggestion=suggestion)
            for h in hypotheses
            if h.probability >= _MIN_SUGGESTED_PROBABILITY and cause in (None, h.code)
            for suggestion in h.fixes
        ]
        suggested = {s.suggestion.fix for s in suggestions}
        causes = {s.cause for s in suggestions}
        fixes.sort(key=lambda f: (f.code not in suggested, causes.isdisjoint(f.mends)))
        return FixList(
            run_id=run_id,
            cause=cause,
            fixes=tuple(fixes),
            suggestions=tuple(suggestions),
            next_steps=(
                "Call apply_autofix with mode=dry_run first: it shows old and new values; mode=trial then proves a "
                "fix, or ranks several, on a fork of the run.",
            )
            if fixes
            else ("No fix mends this on a live run; explain_failure says what to change in the source.",),
        )

    def apply_autofix(
        self,
        run_id: str | None = None,
        *,
        fix: str,
        parameters: Mapping[str, ParameterScalar] | None = None,
        mode: Literal["dry_run", "trial", "apply"] = "dry_run",
        rollback_first: bool = False,
        alternatives: Sequence[Candidate] = (),
        trial_steps: int | None = None,
        reason: str = "",
    ) -> Intervention:
        """Preview, try or apply a fix at the next step boundary of a live run.

        Args:
            run_id: The run.
            fix: Code of the fix.
            parameters: Its parameters by name.
            mode: ``dry_run`` shows what would change; ``trial`` trains on with and without it for some steps, compares
                and puts everything back; ``apply`` snapshots and does it.
            rollback_first: Restore the newest snapshot from before the trouble first.
            alternatives: For a trial: further fixes, ranked with this one.
            trial_steps: For a trial: steps of each branch; 20 by default.
            reason: Why, for the record.

        Returns:
            The intervention; ``pending`` where it was not done in time, which a trial seldom is.

        Raises:
            UnknownFix: If there is no such fix.
            BadParameter: If a parameter is unknown, of the wrong type or out of bounds, or belongs to another mode.
            RunNotLive: If the run's process is gone.
            RunDidNotAnswer: If it does not answer.
            RunRefused: If it cannot do this now, or others have changed it since this workspace showed it.
        """
        if mode != "trial" and (alternatives or trial_steps is not None):
            raise BadParameter(f"`alternatives` and `trial_steps` go with mode=trial only, not with {mode}")
        # The run checks fixes and parameters itself, so that what it refuses is in its record too.
        request = FixRequest(
            fix=fix,
            mode=mode,
            parameters=dict(parameters or {}),
            rollback_first=rollback_first,
            alternatives=tuple(alternatives),
            trial_steps=DEFAULT_TRIAL_STEPS if trial_steps is None else trial_steps,
            requester=self.requester,
            reason=reason,
        )
        return self._act(run_id, request, f"{mode} of {fix[:80]}")

    def get_intervention(self, run_id: str | None, intervention_id: str) -> Intervention:
        """One intervention, as it stands now.

        Raises:
            UnknownIntervention: If the run has none of this id.
        """
        with self._reading(run_id) as (run, journal):
            interventions = journal.interventions()
            found = next((i for i in interventions if i.id == intervention_id), None)
            if found is None:
                raise UnknownIntervention(
                    f"run {run.run_id} has no intervention {intervention_id[:80]!r}; it has "
                    f"{', '.join(i.id for i in interventions[-MAX_CANDIDATES:]) or 'none'}. get_run_status shows those "
                    "in force, get_report all of them"
                )
        return found

    def revert_intervention(self, run_id: str | None, intervention_id: str, *, reason: str = "") -> Intervention:
        """Take an intervention back at the next step boundary of a live run.

        Raises:
            UnknownIntervention: If the run has none of this id.
            RunUnavailable: As `apply_autofix`.
        """
        request = RevertRequest(intervention_id=intervention_id, requester=self.requester, reason=reason)
        return self._act(run_id, request, f"revert of {intervention_id[:80]}")

    def control_training(
        self,
        run_id: str | None = None,
        *,
        action: Action,
        snapshot: str | None = None,
        reason: str = "",
    ) -> Intervention:
        """Pause, resume, checkpoint, roll back or stop a live run at its next step boundary.

        Args:
            run_id: The run.
            action: What to do.
            snapshot: For ``rollback``: which; the newest healthy one by default.
            reason: Why, for the record.

        Raises:
            BadParameter: If a snapshot is named for another action than ``rollback``, or does not exist.
            RunUnavailable: As `apply_autofix`.
        """
        if snapshot is not None and action != "rollback":
            raise BadParameter(f"`snapshot` goes with action=rollback only, not with {action}: leave it out")
        request = TrainingRequest(action=action, snapshot=snapshot, requester=self.requester, reason=reason)
        return self._act(run_id, request, action)

    def set_autofix_policy(
        self,
        run_id: str | None = None,
        *,
        mode: PolicyMode | str,
        max_interventions: int | None = None,
        within_steps: int | None = None,
        cooldown_steps: int | None = None,
        max_per_fix: int | None = None,
        reason: str = "",
    ) -> Intervention:
        """Change what a live run may do by itself, at its next step boundary; what is left out stays as it is.

        Args:
            run_id: The run.
            mode: ``off``, ``safe`` (only fixes that cannot hurt a healthy run) or ``guarded`` (also those that are
                watched and taken back).
            max_interventions: At most this many within `within_steps`.
            within_steps: See `max_interventions`.
            cooldown_steps: Steps between two interventions.
            max_per_fix: At most this many of one fix in the run.
            reason: Why, for the record.

        Raises:
            RunUnavailable: As `apply_autofix`.
        """
        budget = {
            "max_interventions": max_interventions,
            "within_steps": within_steps,
            "cooldown_steps": cooldown_steps,
            "max_per_fix": max_per_fix,
        }
        _, live = standing(find_run(self.home, run_id, to_act=True))
        now = live.policy if live else AutofixPolicy()
        changed = {"mode": mode, **{name: value for name, value in budget.items() if value is not None}}
        policy = AutofixPolicy.model_validate({**now.model_dump(), **changed})
        request = PolicyRequest(policy=policy, requester=self.requester, reason=reason)
        return self._act(run_id, request, f"the policy {policy.mode.value}")

    def get_audit(self, run_id: str | None = None) -> AuditTrail:
        """Everything that was asked of a run and done to it, and whether that record is whole and unchanged."""
        with self._reading(run_id) as (run, journal):
            entries, broken = journal.audit(run.manifest.audit_head)
        return AuditTrail(
            run_id=run.run_id,
            entries=tuple(entries),
            intact=broken is None,
            broken_at=broken.seq if broken else None,
            problem=broken.problem if broken else "",
        )

    def get_report(self, run_id: str | None = None) -> DiagnosticReport:
        """A run from start to now: how it went, what happened, why, and what was done about it."""
        with self._reading(run_id) as (run, journal):
            state, _ = standing(run)
            return build_report(run.manifest, Series.from_journal(journal), state)

    @contextmanager
    def _reading(self, run_id: str | None) -> Iterator[tuple[Run, Journal]]:
        """The run meant and its journal, brought up to now; its changes count as seen where no error came of it."""
        run = find_run(self.home, run_id)
        num_changes = flush(run)
        with Journal(run.directory) as journal:
            yield run, journal
        self._note_seen(run, num_changes)

    def _note_seen(self, run: Run, num_changes: int | None) -> None:
        if num_changes is not None:
            # Answers may overtake each other: the newest view stays.
            self._seen[run.run_id] = max(num_changes, self._seen.get(run.run_id, 0))

    def _act(self, run_id: str | None, request: ActingRequest, what: str) -> Intervention:
        run = find_run(self.home, run_id, to_act=True)
        request = request.model_copy(update={"seen": self._seen.get(run.run_id)})
        if run.state is not RunState.RUNNING:
            raise RunNotLive(
                f"run {run.run_id} {run.ending()}. Nothing was changed: {what} needs a live process. explain_failure "
                "still tells what to change before the next start"
            )
        reply = ControlClient(run.manifest).ask(request, timeout_s=request.wait_s + 5)
        if isinstance(reply, InterventionReply):
            self._note_seen(run, reply.num_changes)
            return reply.intervention
        assert isinstance(reply, Refusal), reply
        raise _REFUSALS.get(reply.code, RunRefused)(f"run {run.run_id} refused {what}: {reply.message}")

    @staticmethod
    def _summary(run: Run) -> RunSummary:
        state, live = standing(run)
        step, loss, num_warnings = None, None, 0
        if run.has_journal:
            with Journal(run.directory) as journal:
                if last := journal.last_step():
                    step, loss = last[0], number(last[2])
                num_warnings = journal.count_events(Severity.WARNING)
        if live and live.step >= 0:
            step = max(step or 0, live.step)
        return RunSummary(
            run_id=run.run_id,
            name=run.manifest.name,
            state=state,
            step=step,
            loss=loss,
            started_at_s=run.manifest.started_at_s,
            num_warnings=num_warnings,
            error=run.error(),
        )


_REFUSALS: dict[str, type[GradtracerError]] = {
    "unknown_fix": UnknownFix,
    "bad_parameter": BadParameter,
    "unknown_intervention": UnknownIntervention,
}


def _first_page(events: Sequence[tuple[int, SemanticEvent]], limit: int) -> list[tuple[int, SemanticEvent]]:
    """At most `limit` events; fewer where they are long, but at least one."""
    page, size = list(events[:1]), 0
    for seq, event in events[1:limit]:
        size += len(event.model_dump_json())
        if size > _PAGE_CHARACTERS:
            break
        page.append((seq, event))
    return page


def _next_steps(status: RunStatus) -> tuple[str, ...]:
    steps: list[str] = []
    if status.state is RunState.HUNG:
        steps.append(
            "`stall` says how long the step takes and where the training thread stands."
            if status.stall
            else "The process exists but does not answer: stopped, swapped out, or inside a call that holds the lock."
        )
    if status.state is RunState.PAUSED:
        steps.append("Call control_training with action=resume to go on.")
    if status.state is RunState.RUNNING and not status.live:
        steps.append("The process serves no control channel, so it can be read but not steered.")
    if any(e.severity is not Severity.INFO for e in status.events) or status.state is RunState.CRASHED:
        steps.append("Call explain_failure for ranked causes and the fixes that mend them.")
    elif status.live:
        steps.append("Call wait_for_event to be told when something goes wrong.")
    return tuple(steps)


def _summary_of(run: Run, hypotheses: Sequence[CausalHypothesis]) -> str:
    ending = f" The run {run.ending()}." if run.state is RunState.CRASHED else ""
    if not hypotheses:
        return f"Nothing was recorded yet, so there is nothing to explain.{ending}"
    best = hypotheses[0]
    where = f", in layer {best.layer}" if best.layer else ""
    since = f", from step {best.onset_step}" if best.onset_step is not None else ""
    explanation = f" {best.explanation}" if best.explanation else ""
    return f"{best.title} (probability {best.probability:.2f}){where}{since}.{explanation}{ending}"


def _after_diagnosis(run: Run, hypotheses: Sequence[CausalHypothesis]) -> tuple[str, ...]:
    if not hypotheses:
        return ("Call get_run_status to see how the run stands.",)
    best = hypotheses[0]
    if best.code == "healthy":
        return ("Nothing needs mending. Call wait_for_event to be told when that changes.",)
    if best.fixes and run.state is RunState.RUNNING:
        return (f"Call apply_autofix with fix={best.fixes[0].fix} and mode=dry_run.",)
    return ("Follow `advice` in the source before the next start.",) if best.advice else ()
