"""The report: everything about a run that a reader wants, in one document."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradtracer.records.base import Document, Name, Record, Text
from gradtracer.records.event import SemanticEvent
from gradtracer.records.fix import Intervention
from gradtracer.records.hypothesis import CausalHypothesis
from gradtracer.records.run import RunState


class Point(Record):
    """One recorded value; null where it is missing or not finite."""

    step: int = Field(ge=0)
    value: float | None


class MetricSeries(Record):
    """A signal over steps, reduced so that its extremes stay."""

    signal: Name
    layer: Name | None = None
    unit: Name = ""
    num_recorded: int = Field(ge=0, description="Points recorded in the range asked for, before reduction.")
    num_non_finite: int = Field(default=0, ge=0)
    points: tuple[Point, ...]


class LayerStat(Record):
    """One signal of one layer."""

    signal: Name
    value: float | None


class LayerStats(Record):
    """One layer at one step."""

    layer: Name
    type: Name = ""
    health: Name = Field(
        description="State of its gradient norm, see GradientHealth; `no_gradient` where it has none, `no_parameters` "
        "where it needs none."
    )
    stats: tuple[LayerStat, ...]


class DiagnosticReport(Document):
    """A run from start to now: how it went, what happened, why, and what was done about it."""

    kind: Literal["diagnostic_report"] = "diagnostic_report"
    run_id: Name
    name: Name
    state: RunState
    generated_at_s: float
    started_at_s: float
    duration_s: float | None = None
    num_steps: int = Field(ge=0)
    model_type: Name = ""
    num_parameters: int = Field(default=0, ge=0)
    optimizer: Name = ""
    summary: Text
    loss: MetricSeries
    layers: tuple[LayerStats, ...] = ()
    layers_step: int | None = None
    events: tuple[SemanticEvent, ...] = ()
    hypotheses: tuple[CausalHypothesis, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    needed_by_saved_model: tuple[Name, ...] = Field(
        default=(),
        description="Ids of the interventions in force that changed the function which the model computes: a saved "
        "model needs them too, its state dict does not hold them.",
    )
    notices: tuple[Text, ...] = Field(default=(), description="What was not recorded, and why.")
    error: Text | None = None
