"""Fabricates what a training leaves behind, without torch: a run directory with manifest and journal."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from gradtracer.home import new_run_directory, write_manifest
from gradtracer.journal import JournalWriter
from gradtracer.records import (
    Address,
    Change,
    Intervention,
    InterventionState,
    LayerInfo,
    Measure,
    ModelDescription,
    OptimizerDescription,
    OptimizerGroup,
    ParameterValue,
    RunManifest,
    SemanticEvent,
    Severity,
)
from gradtracer.samples import LayerTable, Layout, Sample

LAYERS = ("features.0", "features.2", "features.4", "head")
SIGNALS = ("grad_norm", "weight_norm", "update_ratio", "activation_std")
TRACK_INTERVAL = 10


def event(
    number: int, step: int, severity: Severity = Severity.WARNING, layer: str | None = "features.0"
) -> SemanticEvent:
    return SemanticEvent(
        id=f"e{number}",
        kind="gradient_health",
        step=step,
        last_step=step + 5,
        layer=layer,
        signal="grad_norm",
        from_state="healthy",
        to_state="vanishing",
        severity=severity,
        confidence=0.9,
        evidence=(Measure(name="grad_norm", value=1e-8, baseline=0.1, threshold=1e-6),),
        message=f"The gradient of {layer} vanished.",
    )


@dataclass(frozen=True)
class RecordedRun:
    """A run that was trained for `num_steps` steps; its gradients vanish towards the input.

    By default this very process is the one that trained it, so it is live by its pid, and serves no socket.
    """

    home: Path
    name: str = "digits"
    num_steps: int = 100
    state: str = "finished"
    pid: int = field(default_factory=os.getpid)
    pid_created_s: float = field(default_factory=lambda: psutil.Process().create_time())
    address: Address | None = None
    error: str | None = None
    layers: tuple[str, ...] = LAYERS
    events: tuple[SemanticEvent, ...] = (
        event(1, 20, Severity.INFO, "head"),
        event(2, 40),
        event(3, 60, Severity.CRITICAL, "features.2"),
    )

    def write(self) -> tuple[str, Path]:
        """Write it; returns the run id and the directory."""
        run_id, directory = new_run_directory(self.home, self.name)
        write_manifest(
            directory,
            RunManifest.model_validate(
                {
                    "run_id": run_id,
                    "name": self.name,
                    "pid": self.pid,
                    "pid_created_s": self.pid_created_s,
                    "started_at_s": time.time() - 60,
                    "ended_at_s": None if self.state == "running" else time.time(),
                    "state": self.state,
                    "error": self.error,
                    "track_interval": TRACK_INTERVAL,
                    "address": self.address,
                    "token": "secret-token",
                }
            ),
        )
        writer = JournalWriter(directory)
        self._record(writer, run_id)
        writer.close()
        return run_id, directory

    def _record(self, writer: JournalWriter, run_id: str) -> None:
        writer.add_observation(
            ModelDescription(
                step=0,
                type="Net",
                num_parameters=100 * len(self.layers),
                num_bytes=400 * len(self.layers),
                forward_order_known=True,
                layers=tuple(
                    LayerInfo(name=name, type="Linear", num_parameters=100, trainable=True, in_optimizer=True)
                    for name in self.layers
                ),
            )
        )
        group = OptimizerGroup(num_parameters=8, hyperparameters=(ParameterValue(name="lr", value=0.1),))
        writer.add_observation(OptimizerDescription(step=0, type="SGD", groups=(group,)))
        layout = Layout(tuple((layer, signal) for layer in self.layers for signal in SIGNALS))
        random = np.random.default_rng(0)
        for step in range(self.num_steps):
            table = None
            if step % TRACK_INTERVAL == 0:
                # The last layer's gradient has norm 1, each before it a hundredth of the next.
                norms = [0.01 ** (len(self.layers) - 1 - i) for i in range(len(self.layers))]
                values = [v for norm in norms for v in (norm, 5.0, 1e-3, float(random.uniform(0.5, 1)))]
                table = LayerTable(layout, np.asarray(values, dtype=np.float32))
            loss = math.inf if step == 50 else 2.3 * math.exp(-step / 50)
            writer.add_sample(Sample(step, 1_700_000_000 + step * 0.1, loss, 1.5, 0.1, 0.1, 0.0, table))
        for found in self.events:
            writer.put_event(found)
        writer.put_intervention(
            Intervention(
                id="i1",
                run_id=run_id,
                fix="set_learning_rate",
                mode="apply",
                requester="agent",
                state=InterventionState.KEPT,
                requested_at_s=1_700_000_005.0,
                applied_step=70,
                changes=(Change(target="optimizer.param_groups[0].lr", old=0.1, new=0.01),),
            )
        )
