"""``python -m benchmarks.repair``: faulty runs that mend themselves, and healthy ones that must be left alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.faults import corpus
from benchmarks.repair.pool import train_all
from benchmarks.repair.runs import Corpus, Outcome, Task
from benchmarks.repair.score import case_result, healthy_result, summary

NUM_SEEDS = 10


def main(
    cases: Annotated[Path | None, typer.Option(help="Folder of cases in the corpus's interface.")] = corpus.CASES,
    healthy: Annotated[Path | None, typer.Option(help="Folder of healthy runs.")] = corpus.HEALTHY,
    scenarios: Annotated[Path | None, typer.Option(help="Scenario file; none by default.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds for the scenarios, comma-separated.")] = "0",
    ids: Annotated[str, typer.Option(help="Only these runs, comma-separated; CASE stands for CASE/twin too.")] = "",
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets; also the variable FAULT_DATA.")] = None,
    workers: Annotated[int | None, typer.Option(help="Trainings at a time; one a core by default.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    """Train faulty runs with autofix="guarded", and compare with their twins; and healthy runs, with themselves."""
    if data is not None:
        os.environ["FAULT_DATA"] = str(data.resolve())
    chosen = Corpus(
        *(p.resolve() if p else None for p in (cases, healthy, scenarios)), tuple(int(s) for s in seeds.split(","))
    )
    result = measure(chosen, [i for i in ids.split(",") if i], workers)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1))
    _print(result)


def measure(chosen: Corpus, ids: Sequence[str] = (), num_workers: int | None = None) -> dict[str, Any]:
    """Train all that is needed, and score it.

    Args:
        chosen: The corpus.
        ids: Runs to leave it at; all where empty.
        num_workers: Trainings at a time.

    Returns:
        The result document: `cases`, `healthy` and `summary`.
    """
    runs = chosen.runs(ids)
    faulty = [r for r in runs if r.truth is not None]
    sound = [r for r in runs if r.truth is None]
    twins = [f"{r.id}/twin" for r in faulty]
    alone = list(dict.fromkeys([*(r.id for r in runs), *twins]))
    found = _train([Task(chosen, i, None) for i in alone] + [Task(chosen, r.id, "guarded") for r in runs], num_workers)

    def of(run_id: str, autofix: Any = None, offset: int = 0) -> Outcome:
        return found[Task(chosen, run_id, autofix, offset)]

    changed = [r for r in sound if of(r.id).fingerprint != of(r.id, "guarded").fingerprint]
    more = [Task(chosen, r.id, None, offset) for r in changed for offset in range(1, NUM_SEEDS)]
    found |= _train(more, num_workers)
    offsets = {r.id: range(1, NUM_SEEDS) if r in changed else () for r in sound}
    results = [case_result(r, of(r.id), of(r.id, "guarded"), of(f"{r.id}/twin")) for r in faulty]
    spared = [
        healthy_result(r, of(r.id), of(r.id, "guarded"), [of(r.id, None, k) for k in offsets[r.id]]) for r in sound
    ]
    return {"cases": results, "healthy": spared, "summary": summary(results, spared)}


def _train(tasks: Sequence[Task], num_workers: int | None) -> dict[Task, Outcome]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    found: dict[Task, Outcome] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("Trainings", total=len(tasks))
        for task, outcome in train_all(tasks, num_workers=num_workers):
            found[task] = outcome
            progress.update(bar, advance=1, description=task.id)
    return found


def _print(result: dict[str, Any]) -> None:
    console = Console(width=170)
    mark = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}
    headings = "run", "code", "faulty", "repaired", "twin", "gap closed", "recovered", "applied"
    table = Table(*headings, title="Faults that can be repaired live")
    for case in result["cases"]:
        if case["repairable"]:
            metric, closed = case["metric"], case["gap_closed"]
            share = "no gap" if not case["has_gap"] else "-" if closed is None else f"{closed:.0%}"
            table.add_row(
                case["id"], case["code"], *(_number(metric[k]) for k in ("faulty", "repaired", "twin")), share,
                mark[case["recovered"]], _fixes(case["applied"]),
            )  # fmt: skip
    console.print(table)
    table = Table("run", "code", "first hypothesis", "right, with advice", title="Faults of the source")
    for case in result["cases"]:
        if not case["repairable"]:
            top = case["top"][0] if case["top"] else {"code": "-", "probability": 0.0}
            table.add_row(
                case["id"], case["code"], f"{top['code']} {top['probability']:.2f}", mark[case["advice_first"]]
            )
    console.print(table)
    headings = "run", "without", "with", "spread", "harmed", "applied"
    table = Table(*headings, title="Healthy runs that were changed")
    for run in result["healthy"]:
        if not run["identical"]:
            numbers = (_number(n) for n in (run["metric"]["untracked"], run["metric"]["tracked"], run["spread"]))
            table.add_row(run["id"], *numbers, "[red]yes[/]" if run["harmed"] else "no", _fixes(run["applied"]))
    console.print(table)
    for entry in (*result["cases"], *result["healthy"]):
        for which, error in entry.get("errors", {}).items():
            console.print(f"{entry['id']}, {which}: {error.strip().splitlines()[-1]}", style="red", markup=False)
    table = Table("", "", title="Summary", show_header=False)
    for name, value in result["summary"].items():
        table.add_row(name, ", ".join(value) or "none" if isinstance(value, list) else str(value))
    console.print(table)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _fixes(applied: Sequence[dict[str, Any]]) -> str:
    # The standing protection is in every run.
    shown = [a for a in applied if a["fix"] != "skip_nonfinite_step"]
    return ", ".join(
        f"{a['fix']}({', '.join(f'{k}={v}' for k, v in a['parameters'].items())}) @{a['step']} {a['state']}"
        for a in shown
    )


if __name__ == "__main__":
    typer.run(main)
