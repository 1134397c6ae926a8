"""``python -m benchmarks.faults``: how often cause, layer and step are named, and healthy runs left alone."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.faults import corpus, ours, peers
from benchmarks.faults.score import score


def main(
    cases: Annotated[Path | None, typer.Option(help="Folder of cases in the corpus's interface.")] = corpus.CASES,
    healthy: Annotated[Path | None, typer.Option(help="Folder of healthy runs.")] = corpus.HEALTHY,
    scenarios: Annotated[Path | None, typer.Option(help="Scenario file; none by default.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds for the scenarios, comma-separated.")] = "0",
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets; also the variable FAULT_DATA.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only runs of this id; may be repeated.")] = None,
    no_twins: Annotated[bool, typer.Option(help="Leave the healthy runs out.")] = False,
    interval: Annotated[int, typer.Option(help="track_interval of the tracker.")] = 100,
    home: Annotated[Path | None, typer.Option(help="Keep the recorded runs here.")] = None,
    with_peers: Annotated[bool, typer.Option("--peers", help="Ask gradtracer 0.9.0 and neuraldbg 1.3.2 too.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    """Score the diagnosis on runs with known faults, and count alarms on healthy ones."""
    if data is not None:
        os.environ["FAULT_DATA"] = str(data.resolve())
    warnings.filterwarnings("ignore")  # the cases' own
    folders = {"cases": cases, "healthy": healthy, "scenarios": scenarios}
    chosen = {"seeds": [int(s) for s in seeds.split(",")], "ids": only or []}
    runs = corpus.load_runs(**folders, **chosen)
    runs = [r for r in runs if r.truth is not None or not no_twins]
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch:
        answers = [
            ours.ask(run, home or Path(scratch), track_interval=interval)
            for run in track(runs, "Runs", console=console, transient=True)
        ]
    result = score(runs, answers)
    if with_peers:
        options = {k: str(v.resolve()) if v else None for k, v in folders.items()} | chosen
        result["peers"] = {name: score(runs, peers.ask(name, runs, options)) for name in peers.NAMES}
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1))
    _print(result)


def _print(result: dict[str, Any]) -> None:
    console = Console(width=150)
    table = Table("case", "truth", "top hypotheses", "found", "@1", "@3", "layer", "onset", title="Faulty runs")
    mark = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}
    for case in result["cases"]:
        truth = case["truth"]
        table.add_row(
            case["id"],
            f"{truth['category']} {truth['layer'] or ''} @{truth['step']}",
            ", ".join(f"{t['code']} {t['probability']:.2f} {t['layer'] or ''}" for t in case["top"]),
            *(mark[case[k]] for k in ("detected", "cause_at_1", "cause_at_3", "layer_ok", "onset_ok")),
        )
        if case.get("error"):
            console.print(f"[red]{case['id']}[/]: {case['error']}", markup=True)
    console.print(table)
    for run in result["healthy"]:
        if run.get("error"):
            console.print(f"[red]{run['id']}[/]: {run['error']}")
        if run["alarms"]:
            console.print(f"[red]false alarm[/] {run['id']}: {', '.join(run['alarms'][:6])}")
    summaries = {"this package": result["summary"], **{n: p["summary"] for n, p in result.get("peers", {}).items()}}
    table = Table("", *summaries, title="Summary")
    for row in result["summary"]:
        table.add_row(row, *("-" if s[row] is None else f"{s[row]:g}" for s in summaries.values()))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
