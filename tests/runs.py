"""Made-up recordings whose every number follows from the step, so that a reader can check what it reads."""

from __future__ import annotations

import math

import numpy as np

from gradtracer.samples import LayerTable, Layout, Sample
from gradtracer.signals import LAYER_SIGNALS, MISSING, NON_FINITE

SIGNALS = tuple(LAYER_SIGNALS)[:17]


def layout(num_layers: int) -> Layout:
    return Layout(tuple((f"blocks.{i}.linear", signal) for i in range(num_layers) for signal in SIGNALS))


def is_sampled(step: int) -> bool:
    """The default schedule: every step at first, then every tenth, then every hundredth."""
    return step < 10 or (step < 100 and step % 10 == 0) or step % 100 == 0


def table(step: int, columns: Layout) -> LayerTable:
    rng = np.random.default_rng(step)
    values = rng.lognormal(-3, 2, len(columns.columns)).astype(np.float32)
    values[:: len(SIGNALS)] = MISSING
    values[1 :: 5 * len(SIGNALS)] = NON_FINITE
    return LayerTable(columns, values)


def sample(step: int, columns: Layout | None = None) -> Sample:
    """The sample of a step; with a layer table where the schedule has one and `columns` are given."""
    rng = np.random.default_rng(10_000_000 + step)
    return Sample(
        step=step,
        time_s=1.79e9 + 0.02 * step + 1e-3 * rng.random(),
        loss=NON_FINITE if step % 97 == 96 else math.exp(-step / 5_000) + 0.02 * rng.standard_normal(),
        grad_norm=MISSING if step % 89 == 88 else float(rng.lognormal(0, 0.3)),
        learning_rate=1e-3,
        step_time_s=0.02 + 1e-3 * rng.standard_normal(),
        num_non_finite_grads=float(step % 97 == 96),
        layers=table(step, columns) if columns is not None and is_sampled(step) else None,
    )


def numbers(recorded: Sample) -> tuple[object, ...]:
    """What of a sample can be compared: its numbers as the journal keeps them, NaN equal to NaN."""
    run = np.asarray(
        [recorded.loss, recorded.grad_norm, recorded.learning_rate, recorded.step_time_s, recorded.num_non_finite_grads]
    ).astype(np.float32)
    layers = recorded.layers
    return (
        recorded.step,
        recorded.time_s,
        run.tobytes(),
        None if layers is None else (layers.layout, layers.look_back, layers.values.tobytes()),
    )
