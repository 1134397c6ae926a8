"""``python -m benchmarks.explain``: how long explain_failure takes on a long run of a deep model."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from rich.console import Console

from gradtracer.detectors import Episodes, all_detectors
from gradtracer.home import new_run_directory, write_manifest
from gradtracer.journal import JournalWriter
from gradtracer.records import LayerInfo, ModelDescription, RunManifest
from gradtracer.samples import LayerTable, Layout, Sample
from gradtracer.signals import LAYER_SIGNALS
from gradtracer.workspace import Workspace

_SIGNALS = tuple(LAYER_SIGNALS)[:17]


def record(home: Path, steps: int, layers: int) -> str:
    """A made-up run whose loss diverges at its end, with the events that the rules find in it; its id."""
    run_id, directory = new_run_directory(home, "long")
    names = [f"blocks.{i}.linear" for i in range(layers)]
    layout = Layout(tuple((n, s) for s in _SIGNALS for n in names))
    rng = np.random.default_rng(0)
    writer, episodes = JournalWriter(directory), Episodes(all_detectors())
    model = ModelDescription(
        step=0, type="Deep", num_parameters=layers * 1000, num_bytes=layers * 4000, forward_order_known=True,
        layers=tuple(
            LayerInfo(name=n, type="Linear", num_parameters=1000, trainable=True, in_optimizer=True) for n in names
        ),
    )  # fmt: skip
    writer.add_observation(model)
    episodes.observe(model)
    for step in range(steps):
        wild = step > steps - 200
        table = None
        if step < 10 or (step < 100 and step % 10 == 0) or step % 100 == 0 or wild:
            numbers = rng.lognormal(3.0 if wild else -3.0, 1.0, len(layout.columns))
            table = LayerTable(layout, numbers.astype(np.float32))
        loss = math.exp(-step / steps) + 0.01 * rng.standard_normal() + (50.0 if wild else 0.0)
        sample = Sample(step, 1.7e9 + 0.01 * step, loss, 1e4 if wild else 1.0, 1e-1 if wild else 1e-3, 0.01, 0.0, table)
        writer.add_sample(sample)
        for change in episodes.assess(sample):
            writer.put_event(change.event, announce=change.announce)
        if step % 500 == 0:
            writer.commit()
    writer.close()
    manifest = RunManifest(
        run_id=run_id, name="long", pid=os.getpid(), pid_created_s=psutil.Process().create_time(), started_at_s=1.7e9,
        ended_at_s=1.7e9 + 0.01 * steps, state="finished", track_interval=100,
    )  # fmt: skip
    write_manifest(directory, manifest)
    return run_id


def main(
    steps: Annotated[int, typer.Option(min=1000)] = 100_000,
    layers: Annotated[int, typer.Option(min=1)] = 500,
    repeats: Annotated[int, typer.Option(min=1)] = 7,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Time the question as an agent asks it, from opening the journal on."""
    with tempfile.TemporaryDirectory() as folder:
        run_id = record(Path(folder), steps, layers)
        workspace = Workspace(Path(folder))
        seconds = []
        answer = workspace.explain_failure(run_id)
        for _ in range(repeats):
            started = time.perf_counter()
            answer = workspace.explain_failure(run_id)
            seconds.append(time.perf_counter() - started)
        events = workspace.get_health_events(run_id, limit=1).total
    result: dict[str, Any] = {
        "steps": steps, "layers": layers, "events": events, "top": answer.hypotheses[0].code,
        "median_s": statistics.median(seconds), "max_s": max(seconds),
    }  # fmt: skip
    Console().print(result)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)
