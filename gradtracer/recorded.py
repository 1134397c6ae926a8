"""What a journal holds, as records: a run's status, curves and layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gradtracer.candidates import closest, few
from gradtracer.errors import UnknownLayer
from gradtracer.journal import Journal
from gradtracer.records import (
    LayerGroupHealth,
    LayerInfo,
    MetricSeries,
    ModelDescription,
    Point,
    RunStatus,
    finite,
)
from gradtracer.report import HEALTH_ORDER, layer_health
from gradtracer.samples import LayerTable
from gradtracer.series import reduce_keeping_extremes
from gradtracer.signals import LAYER_SIGNALS, RUN_SIGNALS


def with_recorded(status: RunStatus, journal: Journal) -> RunStatus:
    """The status of a run with what its journal tells: numbers, health by layer, latest events."""
    columns = journal.steps()
    losses = columns.column("loss").astype(np.float64)
    finite_losses = losses[np.isfinite(losses)]
    update: dict[str, object] = {"num_events": journal.count_events()}
    if len(columns.steps):
        rate, norm = (float(columns.column(s)[-1]) for s in ("learning_rate", "grad_norm"))
        # The median of the last steps: an evaluation or a pause between two of them does not count.
        times = columns.column("step_time_s")[-50:]
        times = times[np.isfinite(times) & (times > 0)]
        update |= {
            "step": max(int(columns.steps[-1]), status.step or 0),
            "loss": number(losses[-1]),
            "loss_first": number(finite_losses[0]) if len(finite_losses) else None,
            "loss_best": number(finite_losses.min()) if len(finite_losses) else None,
            "grad_norm": number(norm),
            "learning_rates": (number(rate),) if np.isfinite(rate) else (),
            "steps_per_s": number(1 / np.median(times)) if len(times) else None,
        }
    if found := journal.newest_table():
        groups: dict[str, list[str]] = {}
        for layer in found[1].layers:
            groups.setdefault(layer_health(found[1], layer), []).append(layer)
        update |= {
            "num_layers": sum(map(len, groups.values())),
            "health": tuple(
                LayerGroupHealth(state=state, num_layers=len(groups[state]), layers=tuple(groups[state][:5]))
                for state in HEALTH_ORDER
                if state in groups
            ),
        }
    newest = [event for _, event in journal.events(after_seq=max(0, journal.last_seq() - 50))][-5:]
    update["events"] = tuple(reversed(newest))
    return status.model_copy(update=update)


def layer_column(
    tables: Iterable[tuple[int, LayerTable]], layer: str, signal: str
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """One signal of one layer: ascending steps and values, each `[n]`."""
    # Look-back tables are recorded after the step that they belong to, so the order is restored here.
    values: dict[int, float] = {}
    for step, table in tables:
        value = table.get(layer, signal)
        if not np.isnan(value):
            values[step] = value
    steps = sorted(values)
    return np.asarray(steps, dtype=np.int64), np.asarray([values[s] for s in steps], dtype=np.float64)


def metric(
    signal: str,
    layer: str | None,
    steps: NDArray[np.int64],
    values: NDArray[np.floating],
    max_points: int,
) -> MetricSeries:
    """A signal as a record.

    Args:
        signal: Its name.
        layer: The layer of a layer signal; None for a signal of the run.
        steps: Ascending steps, `[n]`.
        values: Values coded as in `gradtracer.signals`, `[n]`.
        max_points: How many points stay.
    """
    recorded = ~np.isnan(values)
    steps, values = steps[recorded], values[recorded].astype(np.float64)
    kept_steps, kept = reduce_keeping_extremes(steps, values, max_points)
    known = RUN_SIGNALS[signal] if layer is None else LAYER_SIGNALS[signal]
    return MetricSeries(
        signal=signal,
        layer=layer,
        unit=known.unit,
        num_recorded=len(values),
        num_non_finite=int(np.count_nonzero(~np.isfinite(values))),
        points=tuple(
            Point(step=step, value=number(value))
            for step, value in zip(kept_steps.tolist(), kept.tolist(), strict=True)
        ),
    )


def model_layers(journal: Journal) -> Sequence[LayerInfo]:
    """The layers of the newest description of the model."""
    models = [o for o in journal.observations("model") if isinstance(o, ModelDescription)]
    return models[-1].layers if models else ()


def recorded_layers(journal: Journal) -> tuple[str, ...]:
    """All layers that have a table, in forward order where that is known; before the first table, all of the model."""
    known = [layer.name for layer in model_layers(journal)]
    found = journal.newest_table()
    if found is None:
        return tuple(known)
    in_table = found[1].layers
    return tuple(dict.fromkeys([*(n for n in known if n in set(in_table)), *in_table]))


def check_layers(journal: Journal, layers: Iterable[str]) -> tuple[str, ...]:
    """The layers of the run, once it is sure that these are among them.

    Raises:
        UnknownLayer: If one is not.
    """
    known = recorded_layers(journal)
    every = {*known, *(layer.name for layer in model_layers(journal))}
    for layer in layers:
        if layer not in every:
            raise UnknownLayer(
                f"the run has no layer {layer[:256]!r}; close to it: {few(closest(layer, known)) or 'none'}. "
                "get_layer_stats shows all of them"
            )
    return known


def number(value: float) -> float | None:
    """A finite number at the seven digits that float32 holds, else None."""
    return finite(float(f"{value:.7g}"))
