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
    parameters: tuple[ParameterInfo, ...] = ()
    mends: tuple[Name, ...] = Field(default=(), description="Cause codes that it mends.")


class Change(Record):
    """One value that a fix changes."""

    target: Name = Field(description="What is changed, e.g. `optimizer.param_groups[0].lr`.")
    old: ParameterScalar
    new: ParameterScalar


class InterventionState(str, Enum):
    """The life of an intervention."""

    PENDING = "pending"
    PREVIEWED = "previewed"
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
    outcome: Text = Field(default="", description="How it ended, in one sentence.")
