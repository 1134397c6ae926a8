"""Fixes and what became of them."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from pydantic import Field

from gradtracer.records.base import Document, Name, Record, Text

ParameterScalar = bool | int | float | Text | None


class ParameterValue(Record):
    """A named value: what a parameter is, or was."""

    name: Name
    value: ParameterScalar


class ParameterInfo(Record):
    """A parameter of a fix, with its bounds."""

    name: Name
    type: Literal["number", "integer", "boolean", "string"]
    description: Text
    default: ParameterScalar = None
    required: bool = False
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None


class Safety(str, Enum):
    """What a fix may do to a healthy run."""

    SAFE = "safe"
    GUARDED = "guarded"
    MANUAL = "manual"


class FixInfo(Record):
    """What an agent needs to know to use a fix."""

    code: Name
    title: Text
    description: Text
    safety: Safety = Field(
        description="safe: cannot hurt a healthy run; guarded: needs its watch; manual: display only."
    )
    standing: bool = Field(description="Stays in force until reverted; otherwise acts once.")
    changes_function: bool = Field(
        default=False,
        description="Whether the model computes another function with it, so that a saved model needs the fix too.",
    )
    parameters: tuple[ParameterInfo, ...] = ()
    mends: tuple[Name, ...] = Field(default=(), description="Cause codes that it mends.")


class Change(Record):
    """One value that a fix changes."""

    target: Name = Field(description="What is changed, e.g. `optimizer.param_groups[0].lr`.")
    old: ParameterScalar
    new: ParameterScalar


class TrialBranch(Record):
    """One way on from the live state: untouched, or with one fix."""

    fix: Name = Field(description="Code of the fix; `control` for the untouched branch.")
    parameters: tuple[ParameterValue, ...] = ()
    rollback_first: bool = Field(default=False, description="Whether a snapshot was restored before the fix.")
    losses: tuple[float | None, ...] = Field(default=(), description="Loss by step; null where it was not finite.")
    grad_norms: tuple[float | None, ...] = Field(
        default=(), description="Norm of the gradient by step; null where it was not finite."
    )
    num_non_finite: int = Field(default=0, ge=0, description="Steps whose loss or gradient was not finite.")
    final_loss: float | None = Field(
        default=None, description="Mean loss over the second half of the steps, each before its update."
    )
    difference: float | None = Field(
        default=None, description="final_loss minus that of the control, on the same batches; negative is better."
    )
    standard_error: float | None = Field(default=None, description="Of the difference, over the batches.")
    verdict: Literal["control", "better", "worse", "no_difference", "failed"]
    note: Text = ""


class TrialResult(Record):
    """What came of a trial: the live state went on unchanged after it."""

    num_steps: int = Field(ge=1, description="Steps of each branch.")
    num_batches: int = Field(ge=1, description="Different batches among them.")
    seconds: float = Field(ge=0, description="How long the training stood still for it.")
    branches: tuple[TrialBranch, ...] = Field(description="The control first, then the candidates, best first.")
    conclusion: Text = ""


class PolicyMode(str, Enum):
    """Which fixes the run may apply to itself."""

    OFF = "off"
    SAFE = "safe"
    GUARDED = "guarded"


class AutofixPolicy(Record):
    """What the run may do by itself, and how often."""

    mode: PolicyMode = PolicyMode.OFF
    max_interventions: int = Field(default=5, ge=0, le=1000, description="At most this many within `within_steps`.")
    within_steps: int = Field(default=1000, ge=1, le=10_000_000)
    cooldown_steps: int = Field(default=20, ge=0, le=1_000_000, description="Steps between two interventions.")
    max_per_fix: int = Field(default=3, ge=1, le=1000, description="At most this many of one fix in a run.")


class InterventionState(str, Enum):
    """The life of an intervention."""

    PENDING = "pending"
    PREVIEWED = "previewed"
    TRIED = "tried"
    APPLIED = "applied"
    KEPT = "kept"
    REVERTED = "reverted"
    REFUSED = "refused"
    FAILED = "failed"


class Intervention(Document):
    """A fix asked for: by whom, why, what it changed and how it ended."""

    kind: Literal["intervention"] = "intervention"
    id: Name
    run_id: Name
    fix: Name = Field(
        description="Code of the fix, or `training:ACTION` for pause, resume, checkpoint, rollback, stop."
    )
    mode: Literal["dry_run", "trial", "apply"]
    parameters: tuple[ParameterValue, ...] = ()
    requester: Name = Field(description="Who asked, e.g. `agent`, `cli`, `policy`.")
    reason: Text = ""
    state: InterventionState
    requested_at_s: float = Field(description="Unix time of the request, seconds.")
    applied_step: int | None = None
    ended_step: int | None = None
    changes: tuple[Change, ...] = ()
    loss_before: float | None = Field(default=None, description="Median loss before it, over the watch window.")
    loss_after: float | None = Field(default=None, description="Median loss at the end of the watch window.")
    snapshot: Name | None = Field(default=None, description="Snapshot taken before it.")
    rolled_back_to: Name | None = Field(default=None, description="Snapshot restored before the fix was applied.")
    trial: TrialResult | None = Field(default=None, description="The trial, where one was run.")
    report: Text = Field(
        default="", description="What it has done since it was applied, where it tells: which steps were left out."
    )
    outcome: Text = Field(default="", description="How it ended, in one sentence.")
