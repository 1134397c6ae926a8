"""The tools that only read: they answer for live, finished and dead runs. Their docstrings are what agents read."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from gradtracer.records import (
    Diagnosis,
    DiagnosticReport,
    EventPage,
    FixList,
    Intervention,
    LayerStatsAnswer,
    MetricsAnswer,
    ReportAnswer,
    RunList,
    RunStatus,
)
from gradtracer.report import to_markdown
from gradtracer.workspace import Workspace
from gradtracer.xml import to_xml
from mcp_server.answering import MAX_CHARACTERS, fit
from mcp_server.arguments import Cursor, FirstStep, InterventionId, LastStep, LayerName, Limit, MinSeverity, RunId

_MIN_POINTS = 8
# What an answer holds besides its report or its points.
_FRAME_CHARACTERS = 1_000


def list_runs(workspace: Workspace, limit: Limit = 20) -> RunList:
    """List training runs, newest first, with state, last step, loss and number of warnings.

    Call this first, and whenever a tool says that the run is ambiguous or unknown. `state` is running, paused,
    finished, crashed (its process died) or hung. `notices` names run folders that were not read, and why.
    Next: get_run_status with a run_id.
    """
    return workspace.list_runs(limit)


def get_run_status(workspace: Workspace, run_id: RunId = None) -> RunStatus:
    """Show how one run stands now: step, loss, gradient norm, learning rate, speed, layers by health, latest events.

    Call it to begin with a run, and after a fix to see what it did. A hung run carries `stall`: how long the step
    takes and where the training thread stands. A crashed run carries `error`. `policy` is what it may mend by itself.
    Next: explain_failure where events are warnings or worse, else wait_for_event; `next_steps` says which.
    """
    return workspace.get_run_status(run_id)


def get_health_events(
    workspace: Workspace,
    run_id: RunId = None,
    cursor: Cursor = 0,
    first_step: FirstStep = 0,
    last_step: LastStep = None,
    layer: Annotated[
        LayerName | None, Field(description="Only events of this layer.", examples=["encoder.0.fc1"])
    ] = None,
    kind: Annotated[
        str | None,
        Field(max_length=128, description="Only events of this detector.", examples=["gradient_health", "loss_spike"]),
    ] = None,
    min_severity: MinSeverity = "info",
    limit: Limit = 20,
) -> EventPage:
    """List what happened to a run: episodes such as vanishing gradients, loss spikes, non-finite values, dead units.

    One event is one episode, with first and last step, layer, evidence (value, baseline, threshold) and severity.
    Use it to see what was detected and when; filter by layer, step or severity. Pages: pass `cursor` on while `more`.
    Next: explain_failure for the cause behind the events; get_metrics for the curve around an event's step.
    """
    return workspace.get_health_events(
        run_id,
        cursor=cursor,
        first_step=first_step,
        last_step=last_step,
        layer=layer,
        kind=kind,
        min_severity=min_severity,
        limit=limit,
    )


def get_metrics(
    workspace: Workspace,
    run_id: RunId = None,
    signals: Annotated[
        list[str],
        Field(
            min_length=1,
            max_length=10,
            description="Of the run: loss, grad_norm, learning_rate, step_time_s, num_non_finite_grads. Of layers: "
            "grad_norm, grad_mean, grad_std, grad_growth_rate, step_cosine, zero_grad_fraction, weight_norm, "
            "update_ratio, num_non_finite_grad, num_non_finite_weight, activation_mean, activation_std, "
            "activation_zero_fraction, dead_unit_fraction, saturated_fraction, effective_rank, "
            "num_non_finite_activation.",
            examples=[["loss", "grad_norm"]],
        ),
    ] = ["loss"],  # noqa: B006
    layers: Annotated[
        list[LayerName] | None,
        Field(
            min_length=1,
            max_length=50,
            description="Layers of layer signals. Left out, grad_norm is that of the whole run, and signals that only "
            "layers have are shown for layers spread over the depth.",
        ),
    ] = None,
    first_step: FirstStep = 0,
    last_step: LastStep = None,
    max_points: Annotated[
        int, Field(ge=4, le=1000, description="Points a series; it is reduced so that its extremes stay.")
    ] = 100,
) -> MetricsAnswer:
    """Get recorded curves: signals of the run (every step) or of layers (sampled steps), reduced to few points.

    Use it to see a trend, to compare before and after a fix, or to look closely around an event's step.
    A null value is one that was not finite. Next: get_layer_stats for all layers at one step.
    """
    points = max_points
    while True:
        answer = workspace.get_metrics(
            run_id, signals=signals, layers=layers, first_step=first_step, last_step=last_step, max_points=points
        )
        length = len(answer.model_dump_json())
        # Fewer points of every curve say more than some curves whole, so this comes before `fit` cuts any.
        if length <= MAX_CHARACTERS - _FRAME_CHARACTERS or points <= _MIN_POINTS:
            break
        points = max(_MIN_POINTS, min(points - 1, int(points * (MAX_CHARACTERS - _FRAME_CHARACTERS) / length)))
    if points == max_points:
        return answer
    note = f"max_points was lowered from {max_points} to {points}; narrow the steps or name fewer layers for more."
    return answer.model_copy(update={"left_out": (*answer.left_out, note)})


def get_layer_stats(
    workspace: Workspace,
    run_id: RunId = None,
    step: Annotated[
        int | None, Field(ge=0, description="The newest sampled step at or before this one; the newest if left out.")
    ] = None,
    layers: Annotated[
        list[LayerName] | None, Field(min_length=1, max_length=100, description="Only these layers.")
    ] = None,
) -> LayerStatsAnswer:
    """Get a table of all layers at one sampled step: gradient, weight, update and activation statistics, and health.

    Layers are in forward order, so a profile over the depth can be read off: gradients that shrink towards the input
    vanish, those that grow explode. Use it to find the layer to look at, and for the names of layers.
    Next: get_metrics with `layers` for curves over time.
    """
    return workspace.get_layer_stats(run_id, step=step, layers=layers)


def explain_failure(workspace: Workspace, run_id: RunId = None) -> Diagnosis:
    """Explain why a run fails: ranked causes with probability, evidence for and against, root layer, onset, fixes.

    Use it once there are events of severity warning or above, or when a run crashed; it works on dead runs too.
    `healthy` competes with the causes: where it leads, nothing needs mending. `verified` is null: no cause was tried.
    Next: apply_autofix with mode=dry_run and a suggested fix; or change the source as `advice` and `source` say.
    """
    return workspace.explain_failure(run_id)


def list_fixes(
    workspace: Workspace,
    run_id: Annotated[
        str | None,
        Field(max_length=128, description="Also say which fixes the diagnosis of this run suggests; optional."),
    ] = None,
    cause: Annotated[
        str | None,
        Field(max_length=128, description="Only fixes that mend this cause.", examples=["learning_rate_too_high"]),
    ] = None,
    fix: Annotated[str | None, Field(max_length=128, description="Only this fix.", examples=["clip_grad_norm"])] = None,
) -> FixList:
    """List the fixes that apply_autofix knows: what they do, safety, parameters with bounds, causes that they mend.

    With run_id those that fit the run come first, with parameters; the others by name alone. cause or fix tell all of
    some.

    safe cannot hurt a healthy run; guarded is watched and needs judgement; manual is for display only. A standing
    fix stays in force until revert_intervention; with one that changes_function the saved model needs it too.
    Next: apply_autofix with mode=dry_run, then mode=trial, which proves a fix, or ranks several, on a fork.
    """
    answer = workspace.list_fixes(run_id, cause, fix)
    if cause is not None or fix is not None:
        return answer
    causes = {s.cause for s in answer.suggestions}
    suggested = {s.suggestion.fix for s in answer.suggestions}
    listed = tuple(
        f
        if f.code in suggested or not causes.isdisjoint(f.mends)
        else f.model_copy(update={"description": "", "parameters": ()})
        for f in answer.fixes
    )
    note = "What the others do, and their parameters: list_fixes with fix= or cause=."
    return answer.model_copy(update={"fixes": listed, "left_out": (*answer.left_out, note)})


def get_intervention(workspace: Workspace, intervention_id: InterventionId, run_id: RunId = None) -> Intervention:
    """Show one intervention: who asked, what changed (old and new values), its state and how it ended.

    Call it while an intervention is `pending` (the step boundary was not reached yet, or a trial runs: ask every few
    seconds), and some steps after an `applied` one for its outcome: loss before and after. `trial` holds the branches
    of a trial. Next: apply_autofix with the winner of a trial; revert_intervention if a fix did harm.
    """
    return workspace.get_intervention(run_id, intervention_id)


def get_report(
    workspace: Workspace,
    run_id: RunId = None,
    format: Annotated[
        Literal["json", "xml", "markdown"],
        Field(
            description="json and xml hold the same and validate against the published schemas; markdown is to read."
        ),
    ] = "markdown",
) -> ReportAnswer:
    """Get the whole story of a run as one document: loss, layers, events, causes, interventions, what was not recorded.

    Use it to hand the result to a person or to a file, at the end of a run or of your work on it; for questions of
    your own the other tools are shorter. A long report is cut, and its `notices` say where; the command
    `gradtracer report` writes all of it.
    """
    report = fit(
        workspace.get_report(run_id),
        lambda r: len(json.dumps(_rendered(r, format), ensure_ascii=False)),
        MAX_CHARACTERS - _FRAME_CHARACTERS,
    )
    return ReportAnswer(run_id=report.run_id, format=format, text=_rendered(report, format))


def _rendered(report: DiagnosticReport, format: Literal["json", "xml", "markdown"]) -> str:
    if format == "json":
        return report.model_dump_json()
    return to_xml(report) if format == "xml" else to_markdown(report)
