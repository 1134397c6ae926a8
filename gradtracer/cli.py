"""The command line: the questions of `gradtracer.workspace.Workspace`, answered for a person or as JSON.

Whatever comes from a recorded run (layer names, exception text) is printed as data: records strip its control
characters, and here it is only ever a `rich.text.Text` or escaped, never markup.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from gradtracer import __version__
from gradtracer.control import MAX_ALTERNATIVES, MAX_TRIAL_STEPS, Candidate
from gradtracer.curves import is_log_scale, sparkline
from gradtracer.errors import (
    AmbiguousRun,
    GradtracerError,
    InvalidDocument,
    UnknownRun,
    Untrusted,
    UsageError,
)
from gradtracer.home import home_directory
from gradtracer.intervention_view import audit_view, fixes_view, intervention_view, policy_line
from gradtracer.records import (
    CausalHypothesis,
    Diagnosis,
    Evidence,
    FixSuggestion,
    Intervention,
    InterventionState,
    MetricSeries,
    ParameterScalar,
    PolicyMode,
    RunState,
    RunStatus,
    RunSummary,
    SemanticEvent,
    Severity,
)
from gradtracer.workspace import Workspace

_POLL_S = 0.5
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_SUCH_RUN = 3
EXIT_UNTRUSTED = 4
EXIT_INVALID = 5

# The workspace speaks to agents, so its messages name tools; a person at a shell has these commands instead.
_COMMAND_OF_TOOL = {
    "list_runs": "gradtracer runs",
    "get_run_status": "gradtracer status",
    "get_health_events": "gradtracer watch",
    "explain_failure": "gradtracer explain",
    "get_report": "gradtracer report",
    "list_fixes": "gradtracer fixes",
    "apply_autofix": "gradtracer fix",
    "get_intervention": "gradtracer audit",
    "revert_intervention": "gradtracer revert",
    "set_autofix_policy": "gradtracer policy",
}
_TOOL = re.compile(r"\b(" + "|".join(_COMMAND_OF_TOOL) + r")\b")
_ENDED = (RunState.FINISHED, RunState.CRASHED)
_STATE_STYLE = {
    RunState.RUNNING: "green",
    RunState.PAUSED: "yellow",
    RunState.FINISHED: "dim",
    RunState.CRASHED: "red",
    RunState.HUNG: "red",
}
_SEVERITY_STYLE = {Severity.INFO: "dim", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}
_HEALTH_STYLE = {
    "healthy": "green",
    "saturated": "yellow",
    "vanishing": "magenta",
    "exploding": "red",
    "non_finite": "bold red",
}


class _Commands(TyperGroup):
    """Turns the package's own errors into one line on stderr and an exit code; any other keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GradtracerError as error:
            line = _TOOL.sub(lambda match: _COMMAND_OF_TOOL[match.group()], " ".join(str(error).split()))
            print(f"gradtracer: {line}", file=sys.stderr)
            raise typer.Exit(_exit_code(error)) from error


def _exit_code(error: GradtracerError) -> int:
    if isinstance(error, UnknownRun | AmbiguousRun):
        return EXIT_NO_SUCH_RUN
    if isinstance(error, InvalidDocument):
        return EXIT_INVALID
    if isinstance(error, UsageError):
        return EXIT_USAGE
    return EXIT_UNTRUSTED if isinstance(error, Untrusted) else EXIT_FAILED


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class FixMode(str, Enum):
    """How far a fix goes."""

    DRY_RUN = "dry_run"
    TRIAL = "trial"
    APPLY = "apply"


class ReportFormat(str, Enum):
    """How a report is written."""

    JSON = "json"
    XML = "xml"
    MD = "md"


RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Id of the run, as `gradtracer runs` shows it; not needed where one is live."),
]
RunToChange = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, as `gradtracer runs` shows it.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why, for the record.")]
HomeOption = Annotated[
    Path | None,
    typer.Option("--home", metavar="DIR", help="Where runs are kept; GRADTRACER_HOME or your state folder by default."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"gradtracer-mcp {__version__}")
        raise typer.Exit


@app.callback()
def _gradtracer(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """See how PyTorch training runs stand, why they fail, and let an agent mend them.

    Runs record themselves once gradtracer.FlowTracker is put around the training loop.

    \b
    Exit codes:
      0  done
      1  the run refused, `audit` found a break, or `demo` did not mend its run
      2  the command line is wrong
      3  no such run, or more than one to choose from
      4  what lies on disk cannot be trusted or read
      5  `validate`: the document is not valid
    """


@app.command()
def runs(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 20,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first."""
    found = _workspace(home).list_runs(limit=limit)
    if as_json:
        _print_json(found)
        return
    if found.runs:
        _console().print(_runs_table(found.runs))
    elif not found.notices:
        _console().print(Text(f"No runs in {found.home}. A run appears once a FlowTracker is open."))
    for notice in found.notices:
        _console().print(Text(f"{notice.run_id}: not read. {notice.reason}", style="yellow"))
    if found.total > limit:
        _console().print(Text(f"{found.total - limit} older runs are not shown: --limit", style="dim"))


@app.command()
def status(run: RunArgument = None, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show step, loss, layers by health, newest events."""
    found = _workspace(home).get_run_status(run)
    if as_json:
        _print_json(found)
    else:
        _console().print(_status_view(found, None, found.events))


@app.command()
def watch(
    run: RunArgument = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and stop.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=60, metavar="SECONDS", help="Between two looks.")] = 1.0,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follow a run until it ends or Ctrl-C.

    Loss, layers by health, and events as they come. With --json, one JSON line a look, with `status` and new `events`.
    """
    watched = _Watched(_workspace(home), run)
    try:
        if as_json:
            while True:
                fresh = watched.look()
                line = {
                    "status": watched.status.model_dump(mode="json"),
                    "events": [event.model_dump(mode="json") for event in fresh],
                }
                print(json.dumps(line, allow_nan=False), flush=True)
                if once or watched.ended:
                    return
                time.sleep(interval)
        watched.look()
        if once:
            _console().print(watched.view())
            return
        with Live(watched.view(), console=_console(), auto_refresh=False) as live:
            while not watched.ended:
                time.sleep(interval)
                watched.look()
                live.update(watched.view(), refresh=True)
    except KeyboardInterrupt:
        return


@app.command()
def explain(
    run: RunArgument = None,
    redetect: Annotated[
        bool, typer.Option("--redetect", help="Run today's rules over the recorded steps, for runs of older versions.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a run fails, and what would mend it."""
    found = _workspace(home).explain_failure(run, redetect=redetect)
    if as_json:
        _print_json(found)
    else:
        _console().print(_diagnosis_view(found))


@app.command()
def report(
    run: RunArgument = None,
    format: Annotated[ReportFormat | None, typer.Option("--format", "-f", help="Markdown by default.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there instead of stdout.")
    ] = None,
    home: HomeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
) -> None:
    """Write the report of a run.

    JSON and XML follow the published schemas; Markdown is for people.
    """
    if as_json and format not in (None, ReportFormat.JSON):
        raise UsageError(f"--json and --format {format.value} contradict each other: give one of them")
    document = _workspace(home).get_report(run)
    match ReportFormat.JSON if as_json else format or ReportFormat.MD:
        case ReportFormat.JSON:
            text = document.model_dump_json(indent=2)
        case ReportFormat.XML:
            from gradtracer.xml import to_xml

            text = to_xml(document)
        case ReportFormat.MD:
            from gradtracer.report import to_markdown

            text = to_markdown(document)
    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from error


@app.command()
def fixes(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Also say what the diagnosis of this run suggests.")
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the fixes that `fix` knows, with their parameters."""
    found = _workspace(home).list_fixes(run)
    if as_json:
        _print_json(found)
    else:
        _console().print(fixes_view(found))


@app.command()
def fix(
    run: RunToChange,
    code: Annotated[str, typer.Argument(metavar="CODE", help="Code of the fix, as `gradtracer fixes` shows it.")],
    parameters: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter; once for each.")
    ] = None,
    mode: Annotated[
        FixMode, typer.Option(help="Show what would change, try it on a fork of the live state, or do it.")
    ] = FixMode.DRY_RUN,
    rollback_first: Annotated[
        bool, typer.Option("--rollback-first", help="Restore the newest snapshot from before the trouble first.")
    ] = False,
    alternatives: Annotated[
        list[str] | None,
        typer.Option("--or", metavar="'CODE NAME=VALUE ...'", help="For a trial: a further fix to rank with it."),
    ] = None,
    trial_steps: Annotated[
        int | None, typer.Option(min=1, max=MAX_TRIAL_STEPS, help="For a trial: steps of each branch.")
    ] = None,
    reason: ReasonOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Preview, try or apply a fix on a live run.

    It waits until the run has done it; Ctrl-C leaves it to the run.
    """
    if len(alternatives or ()) > MAX_ALTERNATIVES:
        raise UsageError(f"--or: expected at most {MAX_ALTERNATIVES}, got {len(alternatives or ())}")
    workspace = _workspace(home)
    asked = workspace.apply_autofix(
        run,
        fix=code,
        parameters=_parameters(parameters or ()),
        mode=mode.value,
        rollback_first=rollback_first,
        alternatives=[_candidate(alternative) for alternative in alternatives or ()],
        trial_steps=trial_steps,
        reason=reason,
    )
    _show_outcome(workspace, asked, as_json)


@app.command()
def revert(
    run: RunToChange,
    intervention: Annotated[str, typer.Argument(metavar="ID", help="Id of the intervention, e.g. i3.")],
    reason: ReasonOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a fix back."""
    workspace = _workspace(home)
    _show_outcome(workspace, workspace.revert_intervention(run, intervention, reason=reason), as_json)


@app.command()
def policy(
    run: RunToChange,
    mode: Annotated[PolicyMode, typer.Argument(metavar="MODE", help="off, safe or guarded.")],
    max_interventions: Annotated[
        int | None, typer.Option(min=0, max=1000, help="At most this many within --within-steps.")
    ] = None,
    within_steps: Annotated[int | None, typer.Option(min=1, max=10_000_000, help="See --max-interventions.")] = None,
    cooldown_steps: Annotated[
        int | None, typer.Option(min=0, max=1_000_000, help="Steps between two interventions.")
    ] = None,
    max_per_fix: Annotated[int | None, typer.Option(min=1, max=1000, help="At most this many of one fix.")] = None,
    reason: ReasonOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a live run may mend by itself; what is left out stays as it is."""
    workspace = _workspace(home)
    asked = workspace.set_autofix_policy(
        run,
        mode=mode,
        max_interventions=max_interventions,
        within_steps=within_steps,
        cooldown_steps=cooldown_steps,
        max_per_fix=max_per_fix,
        reason=reason,
    )
    _show_outcome(workspace, asked, as_json)


@app.command()
def audit(run: RunArgument = None, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List all that was asked of a run and done to it, and check that the list is whole and unchanged.

    Exit code 1 where it is not.
    """
    trail = _workspace(home).get_audit(run)
    if as_json:
        _print_json(trail)
    else:
        _console().print(audit_view(trail))
    if not trail.intact:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def validate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A JSON or XML document; - reads stdin.")],
    as_json: JsonOption = False,
) -> None:
    """Check a document against the published schemas."""
    from gradtracer.schemas import validate as check
    from gradtracer.xml import root_name

    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidDocument(f"{file} is not UTF-8 text, so it is no document of this package") from error
    document = check(text)
    if as_json:
        print(json.dumps({"valid": True, "kind": root_name(type(document)), "schema_version": document.schema_version}))
    else:
        _console().print(Text(f"{file}: valid {root_name(type(document))}, schema version {document.schema_version}"))


@app.command()
def mcp(
    home: HomeOption = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Leave out the tools that change training.")] = False,
) -> None:
    """Serve MCP over stdio: the same as `gradtracer-mcp`."""
    from mcp_server.__main__ import main as serve

    arguments = [] if home is None else ["--home", str(home)]
    serve([*arguments, "--read-only"] if read_only else arguments)


@app.command()
def demo(
    home: Annotated[
        Path | None,
        typer.Option("--home", metavar="DIR", help="Where its runs are kept; a temporary folder by default."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the outcome as JSON, the conversation to stderr.")
    ] = False,
) -> None:
    """Watch an agent mend a real training run.

    It takes under a minute and needs the extra `demo`.
    """
    try:
        from gradtracer.demo.agent import run_demo
    except ModuleNotFoundError as error:
        raise UsageError(f"the demo needs {error.name}: pip install 'gradtracer-mcp[demo]'") from error
    outcome = run_demo(home, Console(highlight=False, stderr=as_json))
    if as_json:
        print(json.dumps(outcome.as_dict(), indent=2, allow_nan=False))
    if not outcome.mended:
        raise typer.Exit(EXIT_FAILED)


def main() -> None:
    """Entry point of the command `gradtracer`."""
    app(prog_name="gradtracer")


class _Watched:
    """What `watch` shows: the newest status, the loss so far, and the events since it began."""

    def __init__(self, workspace: Workspace, run_id: str | None) -> None:
        self._workspace = workspace
        self._cursor = 0
        self._events: dict[str, SemanticEvent] = {}
        self.status = workspace.get_run_status(run_id)
        # From here on the same run, also when another one starts.
        self._run_id = self.status.run_id
        self._loss: MetricSeries | None = None

    @property
    def ended(self) -> bool:
        return self.status.state in _ENDED

    def look(self) -> list[SemanticEvent]:
        """Read everything anew; returns the events announced since the last look."""
        self.status = self._workspace.get_run_status(self._run_id)
        series = self._workspace.get_metrics(self._run_id, signals=("loss",), max_points=200).series
        self._loss = series[0] if series else None
        fresh: list[SemanticEvent] = []
        more = True
        while more:
            page = self._workspace.get_health_events(self._run_id, cursor=self._cursor, limit=100)
            fresh += page.events
            self._cursor, more = page.cursor, page.more
        # An escalated event comes again under its id and goes to the end.
        for event in fresh:
            self._events.pop(event.id, None)
            self._events[event.id] = event
        return fresh

    def view(self) -> RenderableType:
        """One frame."""
        return _status_view(self.status, self._loss, list(self._events.values())[::-1][:10])


def _workspace(home: Path | None) -> Workspace:
    return Workspace(home_directory(home), requester="cli")


def _candidate(text: str) -> Candidate:
    code, *parameters = text.split() or [""]
    return Candidate(fix=code, parameters=_parameters(parameters))


def _parameters(settings: Iterable[str]) -> dict[str, ParameterScalar]:
    """``name=value`` pairs; a value is a number, true, false or null where it reads as one, else text."""
    found: dict[str, ParameterScalar] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not name or not equals:
            raise UsageError(f"expected NAME=VALUE, got {setting!r}")
        found[name] = _scalar(text)
    return found


def _scalar(text: str) -> ParameterScalar:
    try:
        value: Any = json.loads(text, parse_constant=str)
    except ValueError:
        return text
    if isinstance(value, float) and not math.isfinite(value):
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text


def _show_outcome(workspace: Workspace, asked: Intervention, as_json: bool) -> None:
    """Wait for the end of what was asked, and show it."""
    if asked.state is InterventionState.PENDING:
        print(f"gradtracer: {asked.id} waits for the run; Ctrl-C leaves it to the run", file=sys.stderr)
    try:
        while asked.state is InterventionState.PENDING and workspace.summary(asked.run_id).state not in _ENDED:
            time.sleep(_POLL_S)
            asked = workspace.get_intervention(asked.run_id, asked.id)
    except KeyboardInterrupt:
        pass
    if as_json:
        _print_json(asked)
    else:
        _console().print(intervention_view(asked))
    if asked.state in (InterventionState.REFUSED, InterventionState.FAILED):
        raise typer.Exit(EXIT_FAILED)


def _console() -> Console:
    console = Console(highlight=False)
    # A pipe has no width of its own; 80 would cut ids and layer names that a script or a log wants whole.
    return console if console.is_terminal else Console(highlight=False, width=140)


def _print_json(document: BaseModel) -> None:
    print(document.model_dump_json(indent=2))


def _runs_table(found: Sequence[RunSummary]) -> Table:
    table = Table("run", "state", box=None, header_style="bold", pad_edge=False)
    for heading in ("step", "loss", "warnings"):
        table.add_column(heading, justify="right")
    table.add_column("started")
    table.add_column("ended by")
    for run in found:
        table.add_row(
            Text(run.run_id, overflow="fold"),
            _state(run.state),
            "-" if run.step is None else str(run.step),
            _number(run.loss),
            Text(str(run.num_warnings), style="yellow" if run.num_warnings else ""),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_at_s)),
            Text(_one_line(run.error or ""), style="red"),
        )
    return table


def _status_view(status: RunStatus, loss: MetricSeries | None, events: Sequence[SemanticEvent]) -> RenderableType:
    parts: list[RenderableType] = [_headline(status), _numbers(status)]
    if loss is not None and loss.points:
        parts.append(_loss_line(loss))
    if status.stall is not None:
        usual = "" if status.stall.usual_s is None else f", usually {_number(status.stall.usual_s)} s"
        parts.append(Text(f"no step for {status.stall.seconds:.0f} s{usual}", style="bold red"))
        parts.append(Padding(Text(status.stall.stack, style="dim"), (0, 0, 0, 2)))
    if status.error:
        parts.append(Text(status.error, style="red"))
    if status.health:
        parts += [Text(), _health_table(status)]
    parts += [Text(), _events_table(events)] if events else [Text("no events", style="dim")]
    if status.active_fixes:
        parts.append(Text(f"fixes in force: {', '.join(status.active_fixes)}", style="cyan"))
    if status.policy is not None and status.policy.mode is not PolicyMode.OFF:
        parts.append(Text(policy_line(status.policy), style="cyan"))
    return Group(*parts)


def _headline(status: RunStatus) -> Text:
    line = Text.assemble((status.name, "bold"), f"  {status.run_id}  ", _state(status.state))
    return line if status.live or status.state in _ENDED else line.append("  (cannot be steered)", style="yellow")


def _numbers(status: RunStatus) -> Text:
    step = "-" if status.step is None else str(status.step)
    rates = ", ".join(f"{rate:.3g}" for rate in status.learning_rates)
    parts = [f"step {step}", f"loss {_number(status.loss)}"]
    parts += [f"best {_number(status.loss_best)}"] if status.loss_best is not None else []
    parts += [f"gradient norm {_number(status.grad_norm)}"] if status.grad_norm is not None else []
    parts += [f"learning rate {rates}"] if rates else []
    parts += [f"{status.steps_per_s:.3g} steps/s"] if status.steps_per_s is not None else []
    return Text("  ".join(parts))


def _loss_line(loss: MetricSeries) -> Text:
    values = [point.value for point in loss.points]
    line = Text.assemble(("loss ", "dim"), (sparkline(values), "cyan"))
    finite = [value for value in values if value is not None]
    if finite:
        line.append(f"  {min(finite):.3g} to {max(finite):.3g}{', log scale' if is_log_scale(finite) else ''}", "dim")
    return line.append(f"  {loss.num_non_finite} not finite", "bold red") if loss.num_non_finite else line


def _health_table(status: RunStatus) -> Table:
    table = Table("layers", "gradient", "which", box=None, header_style="bold", pad_edge=False)
    table.columns[0].justify = "right"
    for group in status.health:
        names = ", ".join(group.layers)
        more = group.num_layers - len(group.layers)
        table.add_row(
            str(group.num_layers),
            Text(group.state, style=_HEALTH_STYLE.get(group.state, "")),
            Text(f"{names}, and {more} more" if more > 0 else names),
        )
    return table


def _events_table(events: Iterable[SemanticEvent]) -> Table:
    table = Table("event", "step", "severity", "kind", "layer", "", box=None, header_style="bold", pad_edge=False)
    table.columns[1].justify = "right"
    for event in events:
        steps = str(event.step) if event.step == event.last_step else f"{event.step}-{event.last_step}"
        table.add_row(
            Text(event.id),
            steps,
            Text(event.severity.value, style=_SEVERITY_STYLE[event.severity]),
            Text(event.kind),
            Text(event.layer or "-"),
            Text(_one_line(event.message or f"{event.from_state} -> {event.to_state}")),
        )
    return table


def _diagnosis_view(diagnosis: Diagnosis) -> RenderableType:
    if not diagnosis.hypotheses:
        return Text(diagnosis.summary)
    table = Table("", "probability", "cause", "layer", "since step", box=None, header_style="bold", pad_edge=False)
    for rank, hypothesis in enumerate(diagnosis.hypotheses, start=1):
        bar = "█" * round(hypothesis.probability * 10)
        table.add_row(
            str(rank),
            f"{hypothesis.probability:4.0%} {bar:<10}",
            Text(hypothesis.code),
            Text(hypothesis.layer or "-"),
            "-" if hypothesis.onset_step is None else str(hypothesis.onset_step),
        )
    return Group(
        Text(diagnosis.summary, style="bold"), Text(), table, Text(), *_hypothesis_view(diagnosis.hypotheses[0])
    )


def _hypothesis_view(hypothesis: CausalHypothesis) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(hypothesis.title, style="bold")]
    lines += [_indented(Text(hypothesis.explanation))] if hypothesis.explanation else []
    for heading, evidence in (("for", hypothesis.evidence_for), ("against", hypothesis.evidence_against)):
        lines += _evidence_view(heading, evidence)
    if hypothesis.causal_chain:
        lines.append(_indented(Text.assemble(("chain    ", "dim"), " -> ".join(hypothesis.causal_chain))))
    if hypothesis.source is not None:
        place = f"{hypothesis.source.file}:{hypothesis.source.line}"
        lines.append(_indented(Text.assemble(("source   ", "dim"), f"{place}  {hypothesis.source.what}")))
    lines += [_indented(Text.assemble(("advice   ", "dim"), hypothesis.advice))] if hypothesis.advice else []
    lines += [_indented(Text.assemble(("fix      ", "dim"), _fix_line(fix))) for fix in hypothesis.fixes]
    return lines


def _evidence_view(heading: str, evidence: Sequence[Evidence]) -> list[RenderableType]:
    return [
        _indented(Text.assemble((f"{heading:<8} ", "dim"), (f"{e.log_likelihood_ratio:+.1f}  ", "cyan"), e.statement))
        for e in evidence
    ]


def _fix_line(fix: FixSuggestion) -> str:
    parameters = ", ".join(f"{p.name}={p.value}" for p in fix.parameters)
    return f"{fix.fix}({parameters})  {fix.expected_effect}".rstrip()


def _indented(text: Text) -> RenderableType:
    return Padding(text, (0, 0, 0, 2))


def _state(state: RunState) -> Text:
    return Text(state.value, style=_STATE_STYLE[state])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
