"""Hypotheses: what may have caused what was seen."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradtracer.records.base import Answer, Name, Record, Text
from gradtracer.records.event import Measure
from gradtracer.records.fix import ParameterValue


class Evidence(Record):
    """One thing that was seen, or was expected and not seen, and what it says about a cause."""

    statement: Text = Field(description="What was seen, in one sentence.")
    log_likelihood_ratio: float = Field(
        description="log P(seen | this cause) - log P(seen | not this cause), in nats; positive speaks for it."
    )
    measures: tuple[Measure, ...] = ()
    event_ids: tuple[Name, ...] = ()


class SourceLocation(Record):
    """Where in the user's program the cause can be mended."""

    file: Text
    line: int = Field(ge=1)
    what: Text = Field(default="", description="What stands there: the module's class, the loss call.")


class FixSuggestion(Record):
    """A fix that would mend a cause, with the parameters to use."""

    fix: Name = Field(description="Code of a fix, as apply_autofix takes it.")
    parameters: tuple[ParameterValue, ...] = ()
    rollback_first: bool = Field(
        default=False,
        description="Whether the newest snapshot from before the trouble is to be restored first: the weights are "
        "damaged already.",
    )
    expected_effect: Text = ""


class CausalHypothesis(Record):
    """A possible cause with what speaks for and against it."""

    code: Name = Field(description="Cause code, e.g. `learning_rate_too_high`; `healthy` where nothing is wrong.")
    title: Text = Field(description="The cause in a few words.")
    probability: float = Field(ge=0, le=1, description="Posterior over all causes and `healthy`.")
    layer: Name | None = Field(default=None, description="Module path of the root, where one is at fault.")
    onset_step: int | None = Field(default=None, ge=0, description="First step at which it shows.")
    explanation: Text = Field(default="", description="What happened, in two or three sentences.")
    evidence_for: tuple[Evidence, ...] = ()
    evidence_against: tuple[Evidence, ...] = ()
    causal_chain: tuple[Name, ...] = Field(
        default=(), description="Event ids in the order in which one led to another."
    )
    affected_layers: tuple[Name, ...] = Field(default=(), description="Layers dragged along, root first.")
    source: SourceLocation | None = None
    advice: Text = Field(default="", description="What to change in the source, where code must change.")
    fixes: tuple[FixSuggestion, ...] = Field(default=(), description="Best first.")
    verified: bool | None = Field(
        default=None, description="Outcome of a counterfactual trial; null where none was run."
    )


class Diagnosis(Answer):
    """The ranked answer to: why does this run fail?"""

    kind: Literal["diagnosis"] = "diagnosis"
    run_id: Name
    step: int = Field(ge=0, description="Last recorded step when the diagnosis was made.")
    summary: Text = Field(description="The answer in one or two sentences.")
    hypotheses: tuple[CausalHypothesis, ...] = Field(description="Most probable first.")
