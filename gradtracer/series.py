"""A read-only view of what a run recorded: signals over steps, by layer, with observations and events at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gradtracer.journal import RUN_COLUMNS, Journal, StepColumns
from gradtracer.records import (
    AuditFinding,
    Intervention,
    ModelDescription,
    NonFiniteOrigin,
    Observation,
    OptimizerDescription,
    SemanticEvent,
    Severity,
)
from gradtracer.samples import LayerTable, Layout, Sample

O = TypeVar("O", ModelDescription, OptimizerDescription, NonFiniteOrigin)  # noqa: E741


@dataclass(frozen=True)
class Series:
    """Everything a diagnosis reads about a run.

    Run signals are arrays over all steps, layer signals arrays over the steps that have a table. Both are coded as in
    `gradtracer.signals`: NaN is missing, infinity is not finite.
    """

    columns: StepColumns
    tables: tuple[tuple[int, LayerTable], ...]
    events: tuple[SemanticEvent, ...] = ()
    observations: tuple[Observation, ...] = ()
    interventions: tuple[Intervention, ...] = ()

    @classmethod
    def from_journal(cls, journal: Journal, first: int = 0, last: int | None = None) -> Series:
        """Load a run, or the steps `first` to `last` of it."""
        return cls(
            columns=journal.steps(first, last),
            tables=tuple(journal.tables(first, last)),
            events=tuple(event for _, event in journal.events()),
            observations=tuple(journal.observations()),
            interventions=tuple(journal.interventions()),
        )

    @property
    def steps(self) -> NDArray[np.int64]:
        """All recorded steps, ascending, `[n]`."""
        return self.columns.steps

    @property
    def last_step(self) -> int:
        """The newest recorded step; -1 before the first."""
        return int(self.steps[-1]) if len(self.steps) else -1

    def run(self, signal: str) -> NDArray[np.float64]:
        """A run signal at `steps`, `[n]`."""
        return self.columns.column(signal).astype(np.float64)

    def layer(self, layer: str, signal: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """A layer signal where it was recorded: ascending steps and values, each `[m]`."""
        column = (layer, signal)
        found = [(s, v[:, i]) for layout, s, v in self._stacks if (i := layout.index.get(column)) is not None]
        if not found:
            return np.empty(0, np.int64), np.empty(0)
        steps, values = (np.concatenate(parts) for parts in zip(*found, strict=True))
        recorded = ~np.isnan(values)
        steps, values = steps[recorded], values[recorded].astype(np.float64)
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        # Of a step that has two tables the later one in the order of `_stacks`, its own, speaks.
        newest = np.diff(steps, append=-1) != 0
        return steps[newest], values[newest]

    @cached_property
    def _stacks(self) -> tuple[tuple[Layout, NDArray[np.int64], NDArray[np.float32]], ...]:
        # One matrix a layout, so that a layer's curve is one column of it and not a search through every table.
        # By identity: the tables of a run share their layouts, and hashing one costs as much as reading its table.
        groups: dict[tuple[bool, int], list[tuple[int, LayerTable]]] = {}
        for step, table in self.tables:
            groups.setdefault((not table.look_back, id(table.layout)), []).append((step, table))
        return tuple(
            (group[0][1].layout, np.asarray([s for s, _ in group]), np.stack([t.values for _, t in group]))
            for _, group in sorted(groups.items())
        )

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """All layers, in forward order where that is known."""
        model = self.model
        known = [layer.name for layer in model.layers] if model else []
        seen = [layer for _, table in self.tables[-1:] for layer in table.layers]
        return tuple(dict.fromkeys([*known, *seen]))

    def table_at(self, step: int | None = None) -> tuple[int, LayerTable] | None:
        """The newest full layer table at or before `step` (the newest of all by default)."""
        widest = max((len(table.layout.columns) for _, table in self.tables), default=0)
        for found, table in reversed(self.tables):
            # Look-back tables hold one signal a layer; a full one holds most of the widest one's columns.
            if (step is None or found <= step) and 2 * len(table.layout.columns) > widest:
                return found, table
        return None

    def last_observation(self, kind: type[O]) -> O | None:
        """The newest observation of a kind."""
        return next((o for o in reversed(self.observations) if isinstance(o, kind)), None)

    @property
    def model(self) -> ModelDescription | None:
        """The newest description of the model."""
        return self.last_observation(ModelDescription)

    def audit(self, *codes: str) -> list[AuditFinding]:
        """What audits found under these codes, in order."""
        return [o for o in self.observations if isinstance(o, AuditFinding) and o.code in codes]

    def events_of(self, *kinds: str, min_severity: Severity = Severity.INFO) -> list[SemanticEvent]:
        """Events of these detectors (all where none is named), by first step."""
        chosen = [e for e in self.events if (not kinds or e.kind in kinds) and e.severity.rank >= min_severity.rank]
        return sorted(chosen, key=lambda e: e.step)

    def samples(self) -> Iterator[Sample]:
        """The run again, sample by sample, as detectors saw it: without look-back tables, in float32."""
        tables = {step: table for step, table in self.tables if not table.look_back}
        for step, time_s, numbers in zip(
            self.steps.tolist(), self.columns.times.tolist(), self.columns.numbers.tolist(), strict=True
        ):
            yield Sample(
                step=step, time_s=time_s, layers=tables.get(step), **dict(zip(RUN_COLUMNS, numbers, strict=True))
            )


def reduce_keeping_extremes(
    steps: Sequence[int] | NDArray[np.int64], values: Sequence[float] | NDArray[np.float64], max_points: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """At most `max_points` of the points, so that no extreme and no non-finite value is lost from sight.

    The points are cut into equal buckets; of each, the smallest and the largest finite value stay, and the first
    non-finite one (min-max downsampling). First and last point always stay.

    Args:
        steps: Ascending steps, `[n]`.
        values: Values, `[n]`.
        max_points: At least 5: the two ends, and three of a bucket.

    Raises:
        ValueError: If `max_points` is below 5.
    """
    if max_points < 5:
        raise ValueError(f"expected max_points of at least 5, got {max_points}")
    s, v = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    if len(s) <= max_points:
        return s, v
    keep = {0, len(s) - 1}
    buckets = np.array_split(np.arange(1, len(s) - 1), (max_points - 2) // 3)
    for bucket in buckets:
        finite = bucket[np.isfinite(v[bucket])]
        if len(finite):
            keep.update((int(finite[np.argmin(v[finite])]), int(finite[np.argmax(v[finite])])))
        if len(finite) < len(bucket):
            keep.add(int(bucket[~np.isfinite(v[bucket])][0]))
    chosen = np.asarray(sorted(keep))
    return s[chosen], v[chosen]
