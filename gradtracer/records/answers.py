"""Answers: what the questions of `gradtracer.workspace` come back with, where it is no document of its own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradtracer.records.base import Answer, LongText, Name, Record, Text
from gradtracer.records.event import SemanticEvent
from gradtracer.records.fix import FixInfo
from gradtracer.records.hypothesis import FixSuggestion
from gradtracer.records.report import LayerStats, MetricSeries
from gradtracer.records.run import RunState, RunSummary


class RunNotice(Record):
    """A run directory that is there and cannot be read, and why."""

    run_id: Name
    reason: Text


class RunList(Answer):
    """The runs of a home, newest first."""

    kind: Literal["run_list"] = "run_list"
    home: Text = Field(description="The folder that was looked in.")
    runs: tuple[RunSummary, ...]
    total: int = Field(ge=0, description="Run directories in this home, those not shown included.")
    notices: tuple[RunNotice, ...] = Field(default=(), description="Runs that were not read, and why.")


class EventPage(Answer):
    """Events of a run, in the order in which they were announced."""

    kind: Literal["event_page"] = "event_page"
    run_id: Name
    events: tuple[SemanticEvent, ...]
    cursor: int = Field(ge=0, description="Pass it as `cursor` to get only what comes after this page.")
    more: bool = Field(description="Whether more events that match wait behind this page.")
    total: int = Field(ge=0, description="Events that match the filter, on all pages.")


class MetricsAnswer(Answer):
    """Recorded signals over steps."""

    kind: Literal["metrics_answer"] = "metrics_answer"
    run_id: Name
    series: tuple[MetricSeries, ...]


class LayerStatsAnswer(Answer):
    """All signals of the layers at one sampled step, in forward order where that is known."""

    kind: Literal["layer_stats_answer"] = "layer_stats_answer"
    run_id: Name
    step: int = Field(ge=0, description="The sampled step at or before the one asked for.")
    layers: tuple[LayerStats, ...]


class RankedSuggestion(Record):
    """A fix that the diagnosis of a run suggests."""

    cause: Name = Field(description="Code of the hypothesis that it would mend.")
    probability: float = Field(ge=0, le=1, description="Probability of that hypothesis.")
    suggestion: FixSuggestion


class FixList(Answer):
    """Fixes, and which of them the diagnosis of a run suggests."""

    kind: Literal["fix_list"] = "fix_list"
    run_id: Name | None = None
    cause: Name | None = None
    fixes: tuple[FixInfo, ...]
    suggestions: tuple[RankedSuggestion, ...] = Field(
        default=(), description="With the parameters to use, most probable cause first; empty where no run was named."
    )


class WaitAnswer(Answer):
    """What came while waiting, and how the run stands now."""

    kind: Literal["wait_answer"] = "wait_answer"
    run_id: Name
    events: tuple[SemanticEvent, ...] = Field(description="Events newer than the cursor; empty after a timeout.")
    cursor: int = Field(ge=0, description="Pass it to the next call.")
    more: bool = False
    timed_out: bool = Field(description="Whether the time ran out with no event, the run still going.")
    state: RunState
    step: int | None
    loss: float | None


class ReportAnswer(Answer):
    """A report as text."""

    kind: Literal["report_answer"] = "report_answer"
    run_id: Name
    format: Literal["json", "xml", "markdown"]
    text: LongText = Field(description="The whole report in that format.")
