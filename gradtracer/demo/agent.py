"""The scripted agent: it waits, asks, previews, tries, applies, watches and reports, by MCP tool calls alone.

It knows nothing of the fault. Which fixes with which parameters may help is what `explain_failure` suggests, which of
them does is what a trial on a fork of the run shows, and whether it worked is what the recorded loss says.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters
from mcp_types import TextContent
from rich.console import Console
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from gradtracer import schemas
from gradtracer.control import MAX_ALTERNATIVES, Candidate
from gradtracer.curves import sparkline
from gradtracer.demo.clients import snippets
from gradtracer.errors import GradtracerError, InvalidDocument, UsageError
from gradtracer.home import HOME_VARIABLE
from gradtracer.records import (
    CausalHypothesis,
    Diagnosis,
    Intervention,
    InterventionState,
    MetricsAnswer,
    ParameterValue,
    ReportAnswer,
    RunList,
    RunState,
    RunStatus,
    TrialBranch,
    TrialResult,
    WaitAnswer,
)
from gradtracer.report import called, trial_rows

MENDED, UNMENDED = "digits", "digits-without-agent"
GOOD_ACCURACY, BAD_ACCURACY = 0.9, 0.5
# The last steps by which a fix is judged: enough that one batch does not decide.
NUM_JUDGED = 40
# The run's own watch of a fix is over after 100 steps at most.
NUM_WATCHED = 110
DEADLINE_S = 120.0


class DemoFailed(GradtracerError):
    """The demo could not show what it is there to show."""


@dataclass(frozen=True)
class Outcome:
    """How the demo ended."""

    cause: str
    fixes: tuple[str, ...]
    accuracy_with: float
    accuracy_without: float
    valid_json: bool
    valid_xml: bool
    num_tool_calls: int
    seconds: float
    home: str

    @property
    def mended(self) -> bool:
        """Whether the agent saved a run that was lost without it."""
        good = self.accuracy_with > GOOD_ACCURACY and self.accuracy_without < BAD_ACCURACY
        return good and self.valid_json and self.valid_xml

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"mended": self.mended, **asdict(self)}


class Conversation:
    """Calls tools, and prints each call and the gist of its answer as it happens."""

    def __init__(self, client: Client, console: Console) -> None:
        self._client = client
        self._console = console
        self._started = time.monotonic()
        self.num_calls = 0

    async def call(self, tool: str, *, show: bool = True, **arguments: Any) -> dict[str, Any]:
        """One tool call; returns the structured answer.

        Raises:
            DemoFailed: If the tool answers with an error.
        """
        self.num_calls += 1
        called = time.monotonic()
        if show:
            # Every call names the run; once is enough to read.
            shown = ", ".join(f"{name}={_brief(value)}" for name, value in arguments.items() if name != "run_id")
            call = Text.assemble((tool, "bold cyan"), f"({shown})")
            self._line(Text(f"{called - self._started:5.1f} s", "dim"), call)
        result = await self._client.call_tool(tool, arguments)
        if show and (took := time.monotonic() - called) > 1:
            self.answer(Text(f"after {took:.1f} s", "dim"))
        if result.is_error:
            text = " ".join(block.text for block in result.content if isinstance(block, TextContent))
            raise DemoFailed(f"{tool} failed: {text}")
        return dict(result.structured_content or {})

    def answer(self, text: str | Text) -> None:
        """Print the gist of the last answer."""
        self._line(Text("↳", "dim"), text)

    def trial(self, trial: TrialResult) -> None:
        """Print the branches of a trial, a line each."""
        table = Table.grid(padding=(0, 2, 0, 0))
        losses = [loss for branch in trial.branches for loss in branch.losses]
        for branch, (name, verdict, loss, *_) in zip(trial.branches, trial_rows(trial), strict=True):
            colour = {"better": "green", "worse": "red", "failed": "red"}.get(branch.verdict, "")
            verdict = "" if branch.verdict == "control" else verdict
            curve = sparkline(branch.losses, 10, among=losses)
            table.add_row(
                Text(curve, "cyan"), loss, Text(verdict, colour), Text(": ".join(filter(None, (name, branch.note))))
            )
        self.answer(f"loss over {trial.num_steps} steps; the training stood still for {trial.seconds:.1f} s")
        self._line("", table)

    def think(self, text: str) -> None:
        """Print what the agent makes of it."""
        self._console.print()
        self._line("", Text(text, "italic"))

    def _line(self, left: str | Text, right: str | Text | Table) -> None:
        grid = Table.grid(Column(width=8, justify="right"), Column(), padding=(0, 1))
        # A str would be read as markup, and the right side holds what came from the run.
        grid.add_row(left, Text(right) if isinstance(right, str) else right)
        self._console.print(grid)


class Trainings:
    """The training processes: the one that the agent mends, and its twin that nobody helps."""

    def __init__(self, home: Path, options: Sequence[str]) -> None:
        self._home = home
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in (MENDED, UNMENDED):
            command = [sys.executable, "-m", "gradtracer.demo.train", "--name", name, "--result", self._result(name)]
            with (home / f"{name}.log").open("wb") as log:
                self._processes[name] = subprocess.Popen(
                    [*map(str, command), *options],
                    env={**os.environ, HOME_VARIABLE: str(home)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def check(self) -> None:
        """Raises:
        DemoFailed: If a training process failed.
        """
        for name, process in self._processes.items():
            if process.poll() not in (None, 0):
                log = (self._home / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip()
                raise DemoFailed(f"the training process {name} ended with code {process.returncode}:\n{log[-2000:]}")

    async def accuracy(self, name: str) -> float:
        """Accuracy on the test images, once the training is done."""
        while self._processes[name].poll() is None:
            await anyio.sleep(0.1)
        self.check()
        return float(json.loads(self._result(name).read_text(encoding="utf-8"))["accuracy"])

    def stop(self) -> None:
        """End what still runs."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
            process.wait()

    def _result(self, name: str) -> Path:
        return self._home / f"{name}.json"


class Agent:
    """Mends one run.

    Args:
        talk: Where it calls its tools.
        trainings: Only to notice that one died; everything else it learns from tools.
    """

    def __init__(self, talk: Conversation, trainings: Trainings) -> None:
        self._talk = talk
        self._trainings = trainings
        self.run_id = ""

    async def find_run(self) -> None:
        """Wait until the run is listed."""
        answer = await self._talk.call("list_runs")
        while not (found := {run.name: run for run in RunList.model_validate(answer).runs}).keys() >= {
            MENDED,
            UNMENDED,
        }:
            self._trainings.check()
            await anyio.sleep(0.2)
            answer = await self._talk.call("list_runs", show=False)
        self.run_id = found[MENDED].run_id
        self._talk.answer(", ".join(f"{run.run_id} ({run.state.value})" for run in found.values()))

    async def diagnose(self) -> CausalHypothesis:
        """Wait for trouble until the server can name a cause that it knows how to mend."""
        cursor = 0
        while True:
            answer = await self._talk.call(
                "wait_for_event", run_id=self.run_id, cursor=cursor, min_severity="warning", timeout_s=40
            )
            self._trainings.check()
            waited = WaitAnswer.model_validate(answer)
            cursor = waited.cursor
            if not waited.events:
                if waited.state in (RunState.FINISHED, RunState.CRASHED):
                    raise DemoFailed("the run ended before any event of severity warning")
                continue
            for event in waited.events:
                where = f" in {event.layer}" if event.layer else ""
                self._talk.answer(f"{event.severity.value}: {event.kind}{where} at step {event.step}. {event.message}")
            self._talk.think("Something happened. Why?")
            answer = await self._talk.call("explain_failure", run_id=self.run_id)
            diagnosis = Diagnosis.model_validate(answer)
            top = diagnosis.hypotheses[0]
            for hypothesis in diagnosis.hypotheses[:3]:
                if hypothesis is top or hypothesis.probability >= 0.01:
                    self._talk.answer(f"{hypothesis.probability:.0%} {hypothesis.code}: {hypothesis.title}")
            if top.fixes:
                for evidence in top.evidence_for[:3]:
                    self._talk.answer(f"because {evidence.statement}")
                return top
            self._talk.think("No cause that a fix would mend yet: keep watching.")

    async def mend(self, cause: CausalHypothesis) -> list[Intervention]:
        """Try what is suggested on a fork of the run, and apply what helps there, best first, until the loss is back.

        Raises:
            DemoFailed: If nothing brings it back.
        """
        candidates = _candidates(cause)
        first = candidates[0]
        self._talk.think(f"{first.fix} may mend it. First only look at what it would change.")
        await self._autofix(first, "dry_run", "what would it change?")
        self._talk.think("Which suggestion helps, and from which weights? Try all, each on a fork of the run.")
        done: list[Intervention] = []
        for branch in await self._try_out(candidates):
            best = Candidate(
                fix=branch.fix,
                parameters={p.name: p.value for p in branch.parameters if p.value is not None},
                rollback_first=branch.rollback_first,
            )
            self._talk.think("That one helps: do it.")
            done.append(await self._apply(best, cause))
            if await self._recovered(cause, done[0], done[-1]):
                return done
            self._talk.think("The loss has not come back: take the next one.")
        raise DemoFailed(f"nothing of {', '.join(_name(c) for c in candidates)} brought the loss back")

    async def report(self) -> tuple[bool, bool]:
        """Fetch the report as JSON and as XML; whether each is valid."""
        return await self._report("json"), await self._report("xml")

    async def _report(self, form: str) -> bool:
        answer = await self._talk.call("get_report", run_id=self.run_id, format=form)
        text = ReportAnswer.model_validate(answer).text
        try:
            document = schemas.validate(text)
        except InvalidDocument as error:
            self._talk.answer(Text(f"not valid: {error}", "red"))
            return False
        self._talk.answer(f"{len(text):,} characters of {form.upper()}: a valid {type(document).__name__}")
        return True

    async def _try_out(self, candidates: Sequence[Candidate]) -> list[TrialBranch]:
        """The branches that were better than the untouched one, best first."""
        tried = await self._autofix(candidates[0], "trial", "which one helps?", alternatives=candidates[1:])
        if tried.trial is None:
            raise DemoFailed(f"nothing could be tried: {tried.outcome}")
        return [branch for branch in tried.trial.branches if branch.verdict == "better"]

    async def _apply(self, best: Candidate, cause: CausalHypothesis) -> Intervention:
        applied = await self._autofix(best, "apply", cause.title)
        if applied.applied_step is None:
            raise DemoFailed(f"{_name(best)} was not applied: {applied.outcome}")
        return applied

    async def _autofix(
        self, candidate: Candidate, mode: str, reason: str, *, alternatives: Sequence[Candidate] = ()
    ) -> Intervention:
        """Ask for a fix, and wait until it is done."""
        arguments: dict[str, Any] = {"mode": mode, **candidate.model_dump(exclude_defaults=True), "reason": reason}
        if alternatives:
            arguments["alternatives"] = [other.model_dump() for other in alternatives]
        answer = await self._talk.call("apply_autofix", run_id=self.run_id, **arguments)
        while (intervention := Intervention.model_validate(answer)).state is InterventionState.PENDING:
            self._trainings.check()
            await anyio.sleep(0.5)
            answer = await self._talk.call("get_intervention", run_id=self.run_id, intervention_id=intervention.id)
        step = "" if intervention.applied_step is None else f" at step {intervention.applied_step}"
        back = f", on the weights of {intervention.rolled_back_to}" if intervention.rolled_back_to else ""
        self._talk.answer(f"{intervention.id}: {intervention.state.value}{step}{back}")
        for change in intervention.changes[:4]:
            self._talk.answer(f"{change.target}: {change.old} -> {change.new}")
        if intervention.trial is not None:
            self._talk.trial(intervention.trial)
        return intervention

    async def _recovered(self, cause: CausalHypothesis, first: Intervention, latest: Intervention) -> bool:
        """Whether the median loss since the fix is nearer to that before the onset than to that before the fix."""
        assert first.applied_step is not None
        assert latest.applied_step is not None
        self._talk.think("Did it take? The run watches it for some steps; so do I.")
        watched = await self._watched(latest)
        onset = first.applied_step if cause.onset_step is None else cause.onset_step
        healthy = statistics.median((await self._losses(max(0, onset - 100), onset - 1)) or [0.0])
        sick = (await self._losses(onset, first.applied_step)) or [float("inf")]
        now = await self._losses(latest.applied_step + 1)
        await self._losses(max(0, onset - 100), show=True)
        if not now:
            return False
        back = statistics.median(now[-NUM_JUDGED:])
        self._talk.answer(
            f"median loss {healthy:.3g} before the fault, {statistics.median(sick):.3g} in it, {back:.3g} now"
        )
        in_force = watched.state in (InterventionState.APPLIED, InterventionState.KEPT)
        return in_force and back < (healthy + statistics.median(sick)) / 2

    async def _watched(self, applied: Intervention) -> Intervention:
        """The intervention once the run has judged it, or has had the steps to do so."""
        assert applied.applied_step is not None
        with anyio.fail_after(DEADLINE_S):
            show = True
            while True:
                status = await self._status()
                answer = await self._talk.call(
                    "get_intervention", show=show, run_id=self.run_id, intervention_id=applied.id
                )
                intervention = Intervention.model_validate(answer)
                if show:
                    self._talk.answer(intervention.outcome)
                over = status.step is not None and status.step >= applied.applied_step + NUM_WATCHED
                if intervention.state is not InterventionState.APPLIED or over or status.state is not RunState.RUNNING:
                    break
                self._trainings.check()
                show = False
                await anyio.sleep(0.5)
        if intervention.outcome != applied.outcome:
            self._talk.answer(intervention.outcome)
        return intervention

    async def _losses(self, first: int, last: int | None = None, *, show: bool = False) -> list[float]:
        """Finite losses of steps `first` to `last`."""
        answer = await self._talk.call(
            "get_metrics",
            show=show,
            run_id=self.run_id,
            signals=["loss"],
            first_step=first,
            **({} if last is None else {"last_step": last}),
            max_points=200,
        )
        series = MetricsAnswer.model_validate(answer).series
        losses = [point.value for one in series for point in one.points]
        if show and losses:
            self._talk.answer(Text.assemble("loss ", (sparkline(losses, 50), "cyan"), f" from step {first} to now"))
        return [loss for loss in losses if loss is not None]

    async def _status(self) -> RunStatus:
        return RunStatus.model_validate(await self._talk.call("get_run_status", show=False, run_id=self.run_id))


def _candidates(cause: CausalHypothesis) -> list[Candidate]:
    """The suggestions, best first; each is followed by its twin on the other weights, those now or those before."""
    suggested = [
        Candidate(fix=s.fix, parameters={p.name: p.value for p in s.parameters}, rollback_first=back)
        for s in cause.fixes
        for back in (s.rollback_first, not s.rollback_first)
    ]
    return suggested[: 1 + MAX_ALTERNATIVES]


def _name(candidate: Candidate) -> str:
    values = [ParameterValue(name=name, value=value) for name, value in candidate.parameters.items()]
    return f"{'rollback, then ' if candidate.rollback_first else ''}{called(candidate.fix, values)}"


def _done(applied: Intervention) -> str:
    return f"{'rollback, then ' if applied.rolled_back_to else ''}{called(applied.fix, applied.parameters)}"


def _brief(value: object) -> str:
    """An argument as JSON; a list of objects by its length, since the answer shows them one by one."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"[{len(value)} more]"
    return json.dumps(value)


async def converse(home: Path, console: Console, training_options: Sequence[str]) -> Outcome:
    """Start both trainings and the server, let the agent work, and wait for both accuracies."""
    started = time.monotonic()
    server = StdioServerParameters(command=sys.executable, args=["-m", "mcp_server", "--home", str(home)])
    trainings = Trainings(home, training_options)
    try:
        async with Client(server) as client:
            talk = Conversation(client, console)
            agent = Agent(talk, trainings)
            await agent.find_run()
            talk.think("A run is live. Wait until something goes wrong.")
            cause = await agent.diagnose()
            applied = await agent.mend(cause)
            talk.think("It learns again. Let both runs finish: this one, and its twin that nobody helped.")
            accuracy_with, accuracy_without = [await trainings.accuracy(name) for name in (MENDED, UNMENDED)]
            valid_json, valid_xml = await agent.report()
    finally:
        trainings.stop()
    return Outcome(
        cause=cause.code,
        fixes=tuple(_done(i) for i in applied),
        accuracy_with=accuracy_with,
        accuracy_without=accuracy_without,
        valid_json=valid_json,
        valid_xml=valid_xml,
        num_tool_calls=talk.num_calls,
        seconds=round(time.monotonic() - started, 1),
        home=str(home),
    )


def run_demo(home: Path | None, console: Console, training_options: Sequence[str] = ()) -> Outcome:
    """The whole demo, printed as it happens.

    Args:
        home: Where its runs are kept; a temporary folder by default.
        console: Where to print.
        training_options: Further options of `gradtracer.demo.train`.

    Raises:
        UsageError: If what the training needs is not installed.
        DemoFailed: If a process died, or no suggested fix helped.
    """
    for module in ("torch", "sklearn"):
        if find_spec(module) is None:
            raise UsageError(f"the demo needs {module}: pip install 'gradtracer-mcp[demo]'")
    home = Path(tempfile.mkdtemp(prefix="gradtracer-demo-")) if home is None else home.absolute()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    console.print(Rule("An agent mends a training run", style="cyan"))
    console.print(
        "A small network learns handwritten digits in a process of its own; a mistake in its schedule will ruin it.\n"
        "The agent speaks MCP over stdio with gradtracer-mcp, and knows of the run only what its tools say.\n"
        "A twin trains beside it, same seed and same mistake, and nobody helps it.\n"
    )
    outcome = anyio.run(converse, home, console, training_options)
    _print_outcome(outcome, console)
    _print_snippets(console)
    return outcome


def _print_outcome(outcome: Outcome, console: Console) -> None:
    table = Table("", "with the agent", "without", header_style="bold")
    table.add_row("accuracy on unseen digits", f"{outcome.accuracy_with:.1%}", f"{outcome.accuracy_without:.1%}")
    table.add_row("cause named", outcome.cause, "")
    table.add_row("fixes applied", ", ".join(outcome.fixes), "none")
    console.print()
    console.print(table)
    verdict = "The run is mended." if outcome.mended else "The run is NOT mended."
    console.print(
        Text(
            f"{verdict} {outcome.num_tool_calls} tool calls, {outcome.seconds:.0f} s.",
            "green" if outcome.mended else "red",
        )
    )
    console.print(Text(f"See for yourself: gradtracer runs --home {outcome.home}\n"))


def _print_snippets(console: Console) -> None:
    console.print(Rule("Give your own agent these tools", style="cyan"))
    for snippet in snippets():
        console.print(Text.assemble((snippet.client, "bold"), f", {snippet.where}:"))
        # Not wrapped and not framed: it is there to be copied.
        console.print(Text(snippet.text), soft_wrap=True)
        console.print()
