"""Runs: who they are and how they stand."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gradtracer.records.audit import AuditHead
from gradtracer.records.base import Answer, Document, Name, Record, Text
from gradtracer.records.event import SemanticEvent
from gradtracer.records.fix import AutofixPolicy


class RunState(str, Enum):
    """How a run stands, as far as its manifest and its process tell."""

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    CRASHED = "crashed"
    HUNG = "hung"


class UnixAddress(Record):
    """A Unix socket."""

    transport: Literal["unix"] = "unix"
    path: str


class TcpAddress(Record):
    """A port on this machine."""

    transport: Literal["tcp"] = "tcp"
    host: Literal["127.0.0.1"] = "127.0.0.1"
    port: int = Field(ge=1, le=65535)


Address = Annotated[UnixAddress | TcpAddress, Field(discriminator="transport")]


class RunManifest(Document):
    """`run.json`: what a reader needs before it opens the journal. It holds the token, so it stays on the machine."""

    published: ClassVar[bool] = False

    kind: Literal["run_manifest"] = "run_manifest"
    run_id: Name
    name: Name
    pid: int = Field(ge=1)
    pid_created_s: float = Field(description="When the process started, Unix seconds: tells a reused pid apart.")
    started_at_s: float
    ended_at_s: float | None = None
    state: Literal["running", "finished", "crashed"] = "running"
    error: Text | None = Field(default=None, description="The exception that ended the run, with file and line.")
    track_interval: int = Field(ge=1)
    address: Address | None = Field(default=None, description="The control socket; null where the run serves none.")
    token: str = ""
    framework: Name = ""
    command: Text = ""
    audit_head: AuditHead | None = Field(
        default=None, description="End of the audit trail when the run was closed; null until then."
    )


class RunSummary(Record):
    """One line about a run."""

    run_id: Name
    name: Name
    state: RunState
    step: int | None = Field(description="Last recorded step; null before the first.")
    loss: float | None
    started_at_s: float
    num_warnings: int = Field(ge=0, description="Events of severity warning or above.")
    error: Text | None = None


class LayerGroupHealth(Record):
    """How many layers are in which state."""

    state: Name
    num_layers: int = Field(ge=1)
    layers: tuple[Name, ...] = Field(description="At most five of them.")


class Stall(Record):
    """A step that takes far longer than usual."""

    seconds: float
    usual_s: float | None = None
    stack: Text = Field(default="", description="Where the training thread stands, innermost call last.")


class RunStatus(Answer):
    """How a run stands now."""

    kind: Literal["run_status"] = "run_status"
    run_id: Name
    name: Name
    state: RunState
    live: bool = Field(description="Whether its process answers, so that it can be steered.")
    step: int | None
    loss: float | None
    loss_first: float | None = None
    loss_best: float | None = None
    grad_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    steps_per_s: float | None = None
    num_layers: int = Field(default=0, ge=0)
    health: tuple[LayerGroupHealth, ...] = ()
    events: tuple[SemanticEvent, ...] = Field(default=(), description="Newest first, at most five.")
    num_events: int = Field(default=0, ge=0)
    active_fixes: tuple[Name, ...] = Field(default=(), description="Ids of interventions in force.")
    policy: AutofixPolicy | None = Field(
        default=None, description="What the run may do by itself; null where its process does not answer."
    )
    stall: Stall | None = None
    error: Text | None = None
