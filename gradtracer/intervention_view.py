"""What was done to a run, for a terminal: fixes to choose from, one intervention, the audit trail."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradtracer.records import (
    AuditTrail,
    AutofixPolicy,
    FixList,
    Intervention,
    InterventionState,
    ParameterInfo,
    TrialResult,
)
from gradtracer.report import called, number, trial_rows

_STATE_STYLE = {
    InterventionState.PENDING: "yellow",
    InterventionState.PREVIEWED: "dim",
    InterventionState.TRIED: "dim",
    InterventionState.APPLIED: "cyan",
    InterventionState.KEPT: "green",
    InterventionState.REVERTED: "magenta",
    InterventionState.REFUSED: "red",
    InterventionState.FAILED: "bold red",
}
_VERDICT_STYLE = {"better": "green", "worse": "red", "failed": "bold red"}


def intervention_view(intervention: Intervention) -> RenderableType:
    """One intervention: who asked for what, what it changed, and how it stands."""
    parts: list[RenderableType] = [
        Text.assemble(
            (f"{intervention.id}  {called(intervention.fix, intervention.parameters)}", "bold"),
            f"  {intervention.mode}  ",
            _state(intervention),
            f"  asked by {intervention.requester}",
        )
    ]
    details = [f"{c.target}: {number(c.old)} → {number(c.new)}" for c in intervention.changes]
    details += [f"applied at step {intervention.applied_step}"] if intervention.applied_step is not None else []
    details += [intervention.outcome] if intervention.outcome else []
    parts += [Padding(Text(line), (0, 0, 0, 2)) for line in details]
    if intervention.trial is not None:
        parts += [Text(), _trial_table(intervention.trial)]
    return Group(*parts)


def _trial_table(trial: TrialResult) -> Table:
    table = _table("branch", "verdict")
    for heading in ("final loss", "against the control"):
        table.add_column(heading, justify="right")
    table.add_column(f"losses of {trial.num_steps} steps")
    table.add_column("")
    for branch, (name, verdict, loss, against, curve) in zip(trial.branches, trial_rows(trial), strict=True):
        style = _VERDICT_STYLE.get(branch.verdict, "")
        table.add_row(
            Text(name), Text(verdict, style=style), loss, against, Text(curve, style="cyan"), Text(branch.note)
        )
    return table


def audit_view(trail: AuditTrail) -> RenderableType:
    """All entries, oldest first, and whether the chain holds."""
    table = _table()
    table.add_column("entry", justify="right")
    for heading in ("time", "who", "id", "what", "mode", "state", "why and how it ended"):
        table.add_column(heading)
    for entry in trail.entries:
        done = entry.intervention
        unsure = trail.broken_at is not None and entry.seq >= trail.broken_at
        table.add_row(
            Text(str(entry.seq), style="bold red" if unsure else ""),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time_s)),
            Text(done.requester),
            Text(done.id),
            Text(called(done.fix, done.parameters)),
            Text(done.mode),
            _state(done),
            Text(" ".join("; ".join(filter(None, (done.reason, done.outcome))).split())),
        )
    if trail.broken_at is not None:
        verdict = Text(f"The chain breaks at entry {trail.broken_at}: {trail.problem}.", style="bold red")
    else:
        count = len(trail.entries)
        verdict = Text(f"The chain holds: {count} {'entry' if count == 1 else 'entries'}.", style="green")
    return Group(table, Text(), verdict) if trail.entries else verdict


def fixes_view(found: FixList) -> RenderableType:
    """The fixes with their parameters, those that the run's diagnosis suggests first."""
    table = _table("fix", "safety", "parameters", "what it does")
    for info in found.fixes:
        parameters = ", ".join(map(_parameter, info.parameters))
        table.add_row(Text(info.code), Text(info.safety.value), Text(parameters), Text(info.title))
    parts: list[RenderableType] = [table]
    if found.suggestions:
        parts.append(Text())
    for ranked in found.suggestions:
        fix = ranked.suggestion
        line = f"{ranked.cause} ({ranked.probability:.0%}): {called(fix.fix, fix.parameters)}  {fix.expected_effect}"
        parts.append(Text.assemble(("suggested  ", "dim"), line.rstrip()))
    return Group(*parts)


def _parameter(parameter: ParameterInfo) -> str:
    if parameter.required:
        return parameter.name
    default = "" if parameter.default is None else f"={number(parameter.default)}"
    return f"[{parameter.name}{default}]"


def policy_line(policy: AutofixPolicy) -> str:
    """A policy in a line."""
    if policy.mode.value == "off":
        return "autofix off"
    return (
        f"autofix {policy.mode.value}: at most {policy.max_interventions} interventions in {policy.within_steps} "
        f"steps, {policy.cooldown_steps} steps apart, {policy.max_per_fix} of one fix"
    )


def _state(intervention: Intervention) -> Text:
    return Text(intervention.state.value, style=_STATE_STYLE[intervention.state])


def _table(*headings: str) -> Table:
    return Table(*headings, box=None, header_style="bold", pad_edge=False)
