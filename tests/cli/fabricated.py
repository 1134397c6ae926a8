"""Runs that no training made: manifest and journal written as a tracker would."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import psutil

from gradtracer.home import new_run_directory, write_manifest
from gradtracer.journal import JournalWriter
from gradtracer.records import (
    LayerInfo,
    Measure,
    ModelDescription,
    RunManifest,
    SemanticEvent,
    Severity,
)
from gradtracer.samples import LayerTable, Layout, Sample

LAYERS = ("first", "second", "last")
SPIKE_STEP = 60


def make_run(
    home: Path,
    name: str = "fabricated",
    *,
    state: str = "finished",
    num_steps: int = 100,
    layers: tuple[str, ...] = LAYERS,
    error: str | None = None,
) -> str:
    """A run whose loss falls to `SPIKE_STEP`, leaps there, and whose gradients vanish towards the first layer.

    A state of "running" names this very process and serves no socket.
    """
    run_id, directory = new_run_directory(home, name)
    writer = JournalWriter(directory)
    writer.add_observation(
        ModelDescription(
            step=0,
            type="Sequential",
            num_parameters=30,
            num_bytes=120,
            forward_order_known=True,
            layers=tuple(
                LayerInfo(name=layer, type="Linear", num_parameters=10, trainable=True, in_optimizer=True)
                for layer in layers
            ),
        )
    )
    layout = Layout(tuple((layer, "grad_norm") for layer in layers))
    norms = np.asarray([10.0 ** -(3 * (len(layers) - 1 - i)) / 10 for i in range(len(layers))], dtype=np.float32)
    for step in range(num_steps):
        table = LayerTable(layout, norms) if step % 20 == 0 else None
        loss = 2.3 * 0.97**step if step < SPIKE_STEP else 40.0
        writer.add_sample(
            Sample(
                step=step,
                time_s=1_700_000_000 + 0.1 * step,
                loss=loss,
                grad_norm=0.1,
                learning_rate=1e-3,
                step_time_s=0.1,
                layers=table,
            )
        )
    if num_steps > SPIKE_STEP:
        writer.put_event(
            SemanticEvent(
                id="e1",
                kind="loss_spike",
                step=SPIKE_STEP,
                last_step=num_steps - 1,
                layer=None,
                signal="loss",
                from_state="healthy",
                to_state="spike",
                severity=Severity.CRITICAL,
                confidence=0.99,
                evidence=(Measure(name="loss", value=40.0, baseline=0.4),),
                message="The loss leapt to 100 times its baseline.",
            )
        )
    writer.close()
    process = psutil.Process()
    write_manifest(
        directory,
        RunManifest.model_validate(
            {
                "run_id": run_id,
                "name": name,
                "pid": os.getpid(),
                "pid_created_s": process.create_time(),
                "started_at_s": 1_700_000_000.0,
                "ended_at_s": None if state == "running" else 1_700_000_010.0,
                "state": state,
                "error": error,
                "track_interval": 20,
            }
        ),
    )
    return run_id
