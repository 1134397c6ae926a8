"""The report of a run: put together from manifest and journal, as a document, as Markdown, and for a terminal."""

from __future__ import annotations

import io
import re
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradtracer import curves
from gradtracer.diagnosis import HEALTHY, UNKNOWN, diagnose
from gradtracer.fixes import FIXES
from gradtracer.records import (
    CaptureNotice,
    CausalHypothesis,
    DiagnosticReport,
    GradientHealth,
    GradientThresholds,
    Intervention,
    InterventionState,
    LayerStat,
    LayerStats,
    Measure,
    MetricSeries,
    OptimizerDescription,
    ParameterValue,
    Point,
    RunManifest,
    RunState,
    SemanticEvent,
    Severity,
    TrialBranch,
    TrialResult,
    finite,
)
from gradtracer.samples import LayerTable
from gradtracer.series import Series, reduce_keeping_extremes
from gradtracer.signals import RUN_SIGNALS

NO_GRADIENT = "no_gradient"
"""Health of a layer that has parameters and no gradient."""
NO_PARAMETERS = "no_parameters"
"""Health of a layer that has none, an activation say, or the loss."""

# A curve of 200 points fills a wide plot, and as JSON takes about a quarter of the budget of an answer.
_MAX_LOSS_POINTS = 200
_MAX_LAYER_ROWS = 20
_MAX_HYPOTHESES = 5
_MAX_EVENTS = 100
_MAX_TERMINAL_EVENTS = 8
_MAX_TERMINAL_CAUSES = 3
_TRIAL_WIDTH = 30
_BLOCKS = "▁▂▃▄▅▆▇█"
# Worst first; what has no gradient at all may be meant so.
HEALTH_ORDER = (
    GradientHealth.NON_FINITE.value,
    GradientHealth.EXPLODING.value,
    GradientHealth.VANISHING.value,
    NO_GRADIENT,
    GradientHealth.SATURATED.value,
    GradientHealth.HEALTHY.value,
    NO_PARAMETERS,
)
_STANDS = {
    RunState.RUNNING: "is running",
    RunState.PAUSED: "is paused",
    RunState.FINISHED: "has finished",
    RunState.CRASHED: "has crashed",
    RunState.HUNG: "hangs",
}
_LAYER_COLUMNS = ("grad_norm", "weight_norm", "update_ratio", "dead_unit_fraction", "saturated_fraction")


def build_report(
    manifest: RunManifest, series: Series, state: RunState, *, now_s: float | None = None
) -> DiagnosticReport:
    """Everything about a run in one document.

    Args:
        manifest: The run's manifest.
        series: All that its journal holds.
        state: How the run stands, as the caller found out.
        now_s: Unix time of the report, seconds; now by default.
    """
    now_s = time.time() if now_s is None else now_s
    hypotheses = diagnose(series) if _holds_anything(series) else ()
    loss = _loss(series)
    model = series.model
    optimizers = dict.fromkeys(o.type for o in series.observations if isinstance(o, OptimizerDescription))
    found = series.table_at()
    return DiagnosticReport(
        run_id=manifest.run_id,
        name=manifest.name,
        state=state,
        generated_at_s=now_s,
        started_at_s=manifest.started_at_s,
        duration_s=_duration_s(manifest, series, state, now_s),
        num_steps=len(series.steps),
        model_type=model.type if model else "",
        num_parameters=model.num_parameters if model else 0,
        optimizer=", ".join(optimizers),
        summary=_summary(manifest, series, state, loss, hypotheses),
        loss=loss,
        layers=_layers(series),
        layers_step=found[0] if found else None,
        events=tuple(sorted(series.events, key=lambda e: e.step)),
        hypotheses=hypotheses,
        interventions=series.interventions,
        needed_by_saved_model=tuple(i.id for i in series.interventions if _changes_function(i)),
        notices=tuple(dict.fromkeys(o.message for o in series.observations if isinstance(o, CaptureNotice))),
        error=manifest.error,
    )


def _changes_function(intervention: Intervention) -> bool:
    """Whether it is in force and the model computes another function with it."""
    in_force = intervention.mode == "apply" and intervention.state in (
        InterventionState.APPLIED,
        InterventionState.KEPT,
    )
    return in_force and intervention.fix in FIXES and FIXES[intervention.fix].changes_function


def _holds_anything(series: Series) -> bool:
    return bool(len(series.steps) or series.events or series.observations)


def _duration_s(manifest: RunManifest, series: Series, state: RunState, now_s: float) -> float | None:
    if manifest.ended_at_s is not None:
        end_s: float | None = manifest.ended_at_s
    elif state in (RunState.FINISHED, RunState.CRASHED):
        # The process is gone and could not say when; its last step is the last sign of life.
        end_s = float(series.columns.times[-1]) if len(series.columns.times) else None
    else:
        end_s = now_s
    return None if end_s is None else max(0.0, end_s - manifest.started_at_s)


def _shortest(value: float) -> float | None:
    """The float32 that was recorded, in the fewest digits that tell it apart; None where it is not finite."""
    return finite(float(str(np.float32(value))))


def _loss(series: Series) -> MetricSeries:
    values = series.run("loss")
    recorded = ~np.isnan(values)
    steps, values = series.steps[recorded], values[recorded]
    kept_steps, kept = reduce_keeping_extremes(steps, values, _MAX_LOSS_POINTS)
    return MetricSeries(
        signal="loss",
        unit=RUN_SIGNALS["loss"].unit,
        num_recorded=len(values),
        num_non_finite=int(np.count_nonzero(np.isinf(values))),
        points=tuple(
            Point(step=s, value=_shortest(v)) for s, v in zip(kept_steps.tolist(), kept.tolist(), strict=True)
        ),
    )


def _layers(series: Series) -> tuple[LayerStats, ...]:
    found = series.table_at()
    if found is None:
        return ()
    _, table = found
    types = {layer.name: layer.type for layer in series.model.layers} if series.model else {}
    stats: dict[str, list[LayerStat]] = {layer: [] for layer in series.layers if layer in set(table.layers)}
    for (layer, signal), value in zip(table.layout.columns, table.values.tolist(), strict=True):
        if not np.isnan(value):
            stats.setdefault(layer, []).append(LayerStat(signal=signal, value=_shortest(value)))
    return tuple(
        LayerStats(
            layer=layer,
            type=types.get(layer, ""),
            health=layer_health(table, layer),
            stats=tuple(found),
        )
        for layer, found in stats.items()
    )


def layer_health(table: LayerTable, layer: str) -> str:
    """State of a layer by its gradient norm, or why it has none."""
    if not any((layer, signal) in table.layout.index for signal in ("grad_norm", "weight_norm")):
        return NO_PARAMETERS
    norm = table.get(layer, "grad_norm")
    return NO_GRADIENT if np.isnan(norm) else GradientThresholds().classify(norm).value


def _summary(
    manifest: RunManifest,
    series: Series,
    state: RunState,
    loss: MetricSeries,
    hypotheses: Sequence[CausalHypothesis],
) -> str:
    if not _holds_anything(series):
        course = f"The run {_STANDS[state]} and has recorded nothing."
    else:
        course = f"The run {_STANDS[state]} after {_count(len(series.steps), 'step')}{_loss_course(loss)}"
        course += f", with {manifest.error.splitlines()[0]}." if manifest.error else "."
    return " ".join(filter(None, (course, _finding(hypotheses, series.events))))


def _loss_course(loss: MetricSeries) -> str:
    values = [p.value for p in loss.points]
    finite_values = [v for v in values if v is not None]
    if not values:
        return ""
    if not finite_values:
        return ", its loss never finite"
    end = "not finite" if values[-1] is None else number(values[-1])
    return f", loss {number(finite_values[0])} → {end}"


def _finding(hypotheses: Sequence[CausalHypothesis], events: Sequence[SemanticEvent]) -> str:
    serious = [e for e in events if e.severity.rank >= Severity.WARNING.rank]
    if hypotheses and (best := hypotheses[0]).code != HEALTHY:
        where = f" in {best.layer}" if best.layer is not None else ""
        onset = f" from step {best.onset_step}" if best.onset_step is not None else ""
        if best.code == UNKNOWN:
            return f"Something is wrong{where}{onset}, and none of the known causes explains it."
        return f"Most probable cause: {best.title} ({best.code}, {best.probability:.0%}){where}{onset}."
    if serious:
        return f"{_count(len(serious), 'event')} of severity warning or above, no cause stands out."
    return "Nothing is wrong as far as was recorded." if hypotheses else ""


# --- words shared by both renderings ---------------------------------------------------------------------------------


def number(value: bool | int | float | str | None) -> str:
    """A value for a reader: floats with four significant digits, a dash where there is none."""
    match value:
        case None:
            return "–"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.4g}"
        case _:
            return str(value)


def headline(report: DiagnosticReport) -> str:
    """The verdict in a few words."""
    best = report.hypotheses[0] if report.hypotheses else None
    if best is not None and best.code != HEALTHY:
        return f"{best.title} ({best.probability:.0%})"
    if report.state is RunState.CRASHED:
        return "crashed"
    if best is None:
        return "no cause found" if report.num_steps else "nothing recorded"
    return "healthy"


def sparkline(series: MetricSeries, width: int = 60) -> str:
    """A curve as one line of block characters, with × where a value is missing or not finite.

    A column stands for an equal range of steps and shows the mean of its values. The scale is logarithmic where all
    values are positive and span more than three decades, so that an explosion does not flatten what came before.
    """
    if not series.points:
        return ""
    first, last = series.points[0].step, series.points[-1].step
    width = max(1, min(width, last - first + 1))
    columns: list[list[float | None]] = [[] for _ in range(width)]
    for point in series.points:
        columns[(point.step - first) * width // (last - first + 1)].append(point.value)
    values = [p.value for p in series.points if p.value is not None]
    log = bool(values) and min(values) > 0 and max(values) / min(values) > 1e3
    scaled = [[None if v is None else np.log(v) if log else v for v in column] for column in columns]
    known = [v for column in scaled for v in column if v is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    marks: list[str] = []
    for column in scaled:
        if not column:
            # Steps that the reduction left out lie between their neighbours.
            marks.append(marks[-1])
        elif None in column:
            marks.append("×")
        else:
            mean = float(np.mean([v for v in column if v is not None]))
            level = (mean - low) / (high - low) if high > low else 0.0
            marks.append(_BLOCKS[min(len(_BLOCKS) - 1, int(level * len(_BLOCKS)))])
    return "".join(marks)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 60:
        return f"{number(float(seconds))} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _facts(report: DiagnosticReport) -> list[tuple[str, str]]:
    size = f", {_count(report.num_parameters, 'parameter')}" if report.num_parameters else ""
    facts = [
        ("Run", f"{report.run_id}, {report.state.value}"),
        ("Started", f"{_time(report.started_at_s)}, lasted {_duration(report.duration_s)}"),
        ("Steps", f"{report.num_steps:,}"),
        ("Model", f"{report.model_type}{size}" if report.model_type else ""),
        ("Optimizer", report.optimizer),
        ("Ended with", report.error or ""),
    ]
    return [(label, value) for label, value in facts if value]


def _loss_facts(loss: MetricSeries) -> str:
    finite_points = [p for p in loss.points if p.value is not None]
    if not finite_points:
        return f"{_count(loss.num_recorded, 'value')}, none finite" if loss.num_recorded else "none recorded"
    best = min(finite_points, key=lambda p: p.value or 0.0)
    last = loss.points[-1].value
    text = f"{number(finite_points[0].value)} → {'not finite' if last is None else number(last)}"
    text += f", lowest {number(best.value)} at step {best.step}"
    return text + (f", {loss.num_non_finite:,} not finite" if loss.num_non_finite else "")


def _span(event: SemanticEvent) -> str:
    span = f"step {event.step}" if event.step == event.last_step else f"steps {event.step} to {event.last_step}"
    return f"{span}, still so" if event.open else span


def _what(event: SemanticEvent) -> str:
    where = f" in {event.layer}" if event.layer is not None else ""
    return f"{event.kind}{where}: {event.message or f'{event.from_state} → {event.to_state}'}"


def _likely(report: DiagnosticReport, most: int) -> list[CausalHypothesis]:
    """The first causes, without those that would be shown as 0 %."""
    return [cause for cause in report.hypotheses[:most] if cause.probability >= 0.005] or list(report.hypotheses[:1])


def _where(cause: CausalHypothesis) -> str:
    parts = [
        f"in {cause.layer}" if cause.layer is not None else "",
        f"from step {cause.onset_step}" if cause.onset_step is not None else "",
        {True: "verified by a trial", False: "refuted by a trial", None: ""}[cause.verified],
    ]
    return ", ".join(filter(None, parts))


def _reasons(cause: CausalHypothesis) -> list[tuple[str, str]]:
    """What speaks for and against a cause and what to do about it, labelled, strongest first."""
    rows: list[tuple[str, str]] = []
    for label, found in (("for", cause.evidence_for), ("against", cause.evidence_against)):
        for evidence in sorted(found, key=lambda x: -abs(x.log_likelihood_ratio)):
            measures = "; ".join(map(_measure, evidence.measures))
            rows.append((label, f"{evidence.statement}{f' ({measures})' if measures else ''}"))
    if len(cause.causal_chain) > 1:
        rows.append(("chain", " → ".join(cause.causal_chain)))
    if cause.source is not None:
        what = f" ({cause.source.what})" if cause.source.what else ""
        rows.append(("source", f"{cause.source.file}:{cause.source.line}{what}"))
    if cause.advice:
        rows.append(("advice", cause.advice))
    for fix in cause.fixes:
        effect = f": {fix.expected_effect}" if fix.expected_effect else ""
        rows.append(("fix", f"{called(fix.fix, fix.parameters)}{effect}"))
    return rows


def _measure(measure: Measure) -> str:
    unit = f" {measure.unit}" if measure.unit else ""
    value = "not finite" if measure.value is None else f"{number(measure.value)}{unit}"
    beside = [
        f"{label} {number(bound)}{unit}"
        for label, bound in (("baseline", measure.baseline), ("threshold", measure.threshold))
        if bound is not None
    ]
    return f"{measure.name} {value}" + (f", {', '.join(beside)}" if beside else "")


def _deed(intervention: Intervention) -> str:
    step = f" at step {intervention.applied_step}" if intervention.applied_step is not None else ""
    until = f", ended at step {intervention.ended_step}" if intervention.ended_step is not None else ""
    why = f", because: {intervention.reason}" if intervention.reason else ""
    return (
        f"{intervention.id} {intervention.fix} ({intervention.mode}){step}{until}: {intervention.state.value}; "
        f"asked by {intervention.requester}{why}"
    )


def _effects(intervention: Intervention) -> list[str]:
    rows = [f"{c.target}: {number(c.old)} → {number(c.new)}" for c in intervention.changes]
    if intervention.loss_before is not None or intervention.loss_after is not None:
        rows.append(f"loss: {number(intervention.loss_before)} → {number(intervention.loss_after)}")
    rows += [intervention.outcome] if intervention.outcome else []
    return rows if intervention.trial is None else [*rows, *_branches(intervention.trial)]


def trial_rows(trial: TrialResult) -> list[tuple[str, str, str, str, str]]:
    """A trial for a reader: each branch's fix, verdict, final loss, how far that is from the control's, and curve."""
    losses = [loss for branch in trial.branches for loss in branch.losses]
    return [
        (
            _branch_name(branch),
            branch.verdict.replace("_", " "),
            number(branch.final_loss),
            _against_control(branch),
            curves.sparkline(branch.losses, _TRIAL_WIDTH, among=losses),
        )
        for branch in trial.branches
    ]


def _branch_name(branch: TrialBranch) -> str:
    if branch.verdict == "control":
        return branch.fix
    return f"{'rollback, then ' if branch.rollback_first else ''}{called(branch.fix, branch.parameters)}"


def _against_control(branch: TrialBranch) -> str:
    if branch.difference is None or branch.verdict == "control":
        return number(None)
    error = f" ± {branch.standard_error:.2g}" if branch.standard_error is not None else ""
    return f"{branch.difference:+.4g}{error}"


def _branches(trial: TrialResult) -> list[str]:
    rows = [
        f"{name}{'' if branch.verdict == 'control' else f': {verdict}'}, final loss {loss}"
        + (f" ({against} against the control)" if against != number(None) else "")
        + (f", {_count(branch.num_non_finite, 'step')} not finite" if branch.num_non_finite else "")
        + (f", {branch.note}" if branch.note else "")
        + (f", losses {curve}" if curve else "")
        for branch, (name, verdict, loss, against, curve) in zip(trial.branches, trial_rows(trial), strict=True)
    ]
    batches = "1 batch" if trial.num_batches == 1 else f"{trial.num_batches} batches"
    # The conclusion is in the outcome.
    return [f"trial of {_count(trial.num_steps, 'step')} on {batches}, in {trial.seconds:.2g} s", *rows]


def called(fix: str, parameters: Sequence[ParameterValue]) -> str:
    """A fix with its parameters, as a call; those that are left to their default are left out."""
    return f"{fix}({', '.join(f'{p.name}={number(p.value)}' for p in parameters if p.value is not None)})"


def _saved_model_needs(report: DiagnosticReport) -> str:
    """What to know before the model is saved; empty where there is nothing."""
    needed = [i for i in report.interventions if i.id in report.needed_by_saved_model]
    if not needed:
        return ""
    fixes = ", ".join(f"{i.id} {called(i.fix, i.parameters)}" for i in needed)
    return (
        f"The saved model needs {fixes}: with it the model computes another function, which its state dict alone does "
        "not hold."
    )


def _worst_first(layers: Sequence[LayerStats]) -> list[LayerStats]:
    return sorted(layers, key=lambda layer: HEALTH_ORDER.index(layer.health) if layer.health in HEALTH_ORDER else 0)


def _health_counts(layers: Sequence[LayerStats]) -> list[tuple[str, int]]:
    return list(Counter(layer.health for layer in _worst_first(layers)).items())


def _layer_rows(layers: Sequence[LayerStats]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the layer table, worst first, without columns that no row fills."""
    shown = _worst_first(layers)[:_MAX_LAYER_ROWS]
    stats = [{s.signal: s.value for s in layer.stats} for layer in shown]
    columns = [c for c in _LAYER_COLUMNS if any(c in row for row in stats)]
    rows = [
        [layer.layer, layer.type or number(None), layer.health]
        + [("not finite" if row[c] is None else number(row[c])) if c in row else number(None) for c in columns]
        for layer, row in zip(shown, stats, strict=True)
    ]
    return ["layer", "type", "health", *columns], rows


def _left_out(total: int, shown: int, noun: str) -> list[str]:
    return [f"and {_count(total - shown, f'more {noun}')}"] if total > shown else []


# --- Markdown --------------------------------------------------------------------------------------------------------

# An underscore inside a word is no emphasis, and layer names are full of them.
_MARKDOWN_SPECIAL = re.compile(r"[\\`*\[\]|~$#]|(?<![^\W_])_|_(?![^\W_])|(?<=:)/(?=/)|(?<=www)\.|^[-+=]", re.IGNORECASE)
_MARKDOWN_NUMBER = re.compile(r"^(\d+)([.)])(?=\s|$)")
_HTML_SPECIAL = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def escape_markdown(text: str) -> str:
    """The text on one line, so that a Markdown reader shows it as it is: no markup, HTML, link or table cell in it."""
    line = _MARKDOWN_SPECIAL.sub(lambda m: f"\\{m.group()}", " ".join(text.split()))
    return _MARKDOWN_NUMBER.sub(r"\1\\\2", line).translate(_HTML_SPECIAL)


def to_markdown(report: DiagnosticReport) -> str:
    """The report for a person to read: the verdict first, then what happened, why, and what was done about it."""
    e = escape_markdown
    lines = [f"# {e(report.name or report.run_id)}: {e(headline(report))}", "", e(report.summary), ""]
    lines += [f"- {label}: {e(value)}" for label, value in _facts(report)]
    lines += [f"- Loss: {e(_loss_facts(report.loss))}", ""]
    if report.loss.points:
        lines += ["```text", sparkline(report.loss), "```", ""]

    lines += ["## What happened", ""]
    lines += [
        f"- {event.id and f'{e(event.id)}, '}{_span(event)}: **{event.severity.value}** {e(_what(event))}"
        for event in report.events[:_MAX_EVENTS]
    ] or ["Nothing was reported."]
    lines += [f"- {text}" for text in _left_out(len(report.events), _MAX_EVENTS, "event")]

    lines += ["", "## Why", ""]
    for rank, cause in enumerate(_likely(report, _MAX_HYPOTHESES), start=1):
        where = f", {e(_where(cause))}" if _where(cause) else ""
        lines.append(f"{rank}. **{e(cause.title)}** ({e(cause.code)}), {cause.probability:.0%}{where}")
        if cause.explanation:
            lines += ["", f"   {e(cause.explanation)}", ""]
        lines += [f"   - {label}: {e(text)}" for label, text in _reasons(cause)]
    if not report.hypotheses:
        lines.append("There is nothing to explain yet.")

    lines += ["", "## What was done", ""]
    for intervention in report.interventions:
        lines.append(f"- {e(_deed(intervention))}")
        lines += [f"   - {e(text)}" for text in _effects(intervention)]
    if not report.interventions:
        lines.append("Nothing: no fix was asked for.")
    if needed := _saved_model_needs(report):
        lines += ["", f"**{e(needed)}**"]

    if report.layers:
        header, rows = _layer_rows(report.layers)
        counts = ", ".join(f"{n} {state}" for state, n in _health_counts(report.layers))
        lines += ["", f"## Layers at step {report.layers_step}", "", f"{e(counts)}; worst first.", ""]
        lines += [f"| {' | '.join(header)} |", "|---|---|---|" + "---:|" * (len(header) - 3)]
        lines += [f"| {' | '.join(map(e, row))} |" for row in rows]
        lines += ["", *_left_out(len(report.layers), _MAX_LAYER_ROWS, "layer")]

    if report.notices:
        lines += ["", "## Not recorded", "", *(f"- {e(notice)}" for notice in report.notices)]
    return "\n".join(lines).rstrip("\n") + "\n"


# --- terminal --------------------------------------------------------------------------------------------------------

_STYLES = {
    "healthy": "green",
    "info": "cyan",
    "saturated": "yellow",
    "warning": "yellow",
    "vanishing": "magenta",
    "exploding": "red",
    "non_finite": "bold red",
    "critical": "bold red",
    "crashed": "bold red",
}


def to_text(report: DiagnosticReport, *, width: int = 100, color: bool = False) -> str:
    """The report for a terminal: loss, layers by health, events, the most probable causes and what was done.

    Args:
        report: The report.
        width: Columns of the terminal.
        color: Whether to use colours; leave it off where the text goes to a file.
    """
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        legacy_windows=False,
    )
    # Text objects throughout: a layer named "[red]" is a name, not markup.
    console.print(
        Text.assemble(
            (_line(report.name or report.run_id), "bold"),
            ": ",
            (_line(headline(report)), _STYLES.get(headline(report), "bold yellow")),
        )
    )
    console.print(Text(_line(report.summary)))
    console.print()
    rows = [(label, Text(_line(value))) for label, value in _facts(report)]
    rows.append(("Loss", Text(_loss_facts(report.loss))))
    if report.loss.points:
        rows.append(("", Text(sparkline(report.loss, max(10, width - 16)), style="cyan")))
    if report.layers:
        counts = [Text(f"{n} {state}", style=_STYLES.get(state, "dim")) for state, n in _health_counts(report.layers)]
        rows.append((f"Layers @{report.layers_step}", Text(", ").join(counts)))
    console.print(_grid(rows))

    _section(console, "What happened", bool(report.events))
    shown = _most_telling(report.events)
    console.print(_grid([(e.severity.value, Text(f"{_span(e)}: {_line(_what(e))}")) for e in shown], styled=True))
    for text in _left_out(len(report.events), len(shown), "event"):
        console.print(Text(f"  {text}", style="dim"))

    _section(console, "Why", bool(report.hypotheses))
    for cause in _likely(report, _MAX_TERMINAL_CAUSES):
        where = f"  {_line(_where(cause))}" if _where(cause) else ""
        console.print(Text.assemble(f"{cause.probability:>5.0%}  ", (_line(cause.title), "bold"), (where, "dim")))
        details = [("", Text(_line(cause.explanation)))] if cause.explanation else []
        details += [(label, Text(_line(text))) for label, text in _reasons(cause)]
        console.print(Padding(_grid(details), (0, 0, 0, 5)))

    _section(console, "What was done", bool(report.interventions))
    for intervention in report.interventions:
        console.print(Text(f"  {_line(_deed(intervention))}"))
        for text in _effects(intervention):
            console.print(Text(f"     {_line(text)}", style="dim"))
    if needed := _saved_model_needs(report):
        console.print(Text(f"  {_line(needed)}", style="bold yellow"))

    _section(console, "Not recorded", bool(report.notices))
    for notice in report.notices:
        console.print(Text(f"  {_line(notice)}"))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _line(text: str) -> str:
    return " ".join(text.split())


def _section(console: Console, title: str, present: bool) -> None:
    if present:
        console.print()
        console.print(Text(title, style="bold underline"))


def _grid(rows: Sequence[tuple[str, Text]], *, styled: bool = False) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(Text(f"  {label}", style=_STYLES.get(label, "") if styled else "dim"), text)
    return grid


def _most_telling(events: Sequence[SemanticEvent]) -> list[SemanticEvent]:
    """The gravest events, as many as a screen holds, in order of time."""
    gravest = sorted(events, key=lambda event: -event.severity.rank)[:_MAX_TERMINAL_EVENTS]
    return sorted(gravest, key=lambda event: event.step)
