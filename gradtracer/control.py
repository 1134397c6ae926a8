"""The live channel: messages between a training process and those who steer it, and the client side.

One JSON object a line over a local socket, request and reply in turn, each line at most 1 MiB. The first thing checked
is the token of `run.json`. Facts do not travel here (they are in the journal); requests do.
"""

from __future__ import annotations

import socket
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from gradtracer.errors import RunDidNotAnswer, RunNotLive, RunRefused
from gradtracer.records import (
    AutofixPolicy,
    Intervention,
    Name,
    ParameterScalar,
    Record,
    RunManifest,
    Stall,
    Text,
    UnixAddress,
)

MAX_LINE_BYTES = 1 << 20
PROTOCOL_VERSION = 1


class StatusRequest(Record):
    """How does the training stand? Answered at once by the channel's thread, also while a step hangs."""

    kind: Literal["status"] = "status"


class FlushRequest(Record):
    """Write everything captured so far to the journal now."""

    kind: Literal["flush"] = "flush"


class Candidate(Record):
    """A fix with its parameters, as a trial compares them."""

    fix: Name
    parameters: dict[str, ParameterScalar] = Field(default_factory=dict)
    rollback_first: bool = Field(
        default=False, description="Restore the newest snapshot from before the trouble, then apply."
    )


DEFAULT_TRIAL_STEPS, MAX_TRIAL_STEPS = 20, 200
MAX_ALTERNATIVES = 5


class Asked(Record):
    """What all requests that act say about who asks."""

    seen: int | None = Field(
        default=None,
        ge=0,
        description="How many interventions had changed the run when the requester last looked; where others have "
        "changed it since, the request is refused.",
    )
    requester: Name
    reason: Text = ""
    wait_s: float = Field(default=20.0, ge=0, le=50, description="How long to wait for the step boundary.")


class FixRequest(Candidate, Asked):
    """Preview, try or apply a fix at the next step boundary."""

    kind: Literal["fix"] = "fix"
    mode: Literal["dry_run", "trial", "apply"]
    alternatives: tuple[Candidate, ...] = Field(
        default=(), max_length=MAX_ALTERNATIVES, description="For a trial: further candidates, ranked with the first."
    )
    trial_steps: int = Field(
        default=DEFAULT_TRIAL_STEPS, ge=1, le=MAX_TRIAL_STEPS, description="For a trial: steps of each branch."
    )


class RevertRequest(Asked):
    """Take an intervention back at the next step boundary."""

    kind: Literal["revert"] = "revert"
    intervention_id: Name


class TrainingRequest(Asked):
    """Pause, resume, checkpoint, roll back or stop the training at the next step boundary."""

    kind: Literal["training"] = "training"
    action: Literal["pause", "resume", "checkpoint", "rollback", "stop"]
    snapshot: Name | None = Field(
        default=None, description="For rollback: which snapshot; the newest healthy by default."
    )


class PolicyRequest(Asked):
    """Change what the run may do by itself, at the next step boundary."""

    kind: Literal["policy"] = "policy"
    policy: AutofixPolicy


ActingRequest = FixRequest | RevertRequest | TrainingRequest | PolicyRequest
"""What changes the run, or asks to."""

Request = Annotated[
    StatusRequest | FlushRequest | FixRequest | RevertRequest | TrainingRequest | PolicyRequest,
    Field(discriminator="kind"),
]


class Envelope(Record):
    """One line from a client."""

    version: Literal[1] = PROTOCOL_VERSION
    token: str = Field(max_length=256)
    request: Request


class LiveStatus(Record):
    """Answer to a status request."""

    kind: Literal["live_status"] = "live_status"
    step: int = Field(description="Last finished step; -1 before the first.")
    paused: bool
    seconds_since_step: float = Field(ge=0)
    usual_step_s: float | None = Field(description="Median wall time of the last steps.")
    stall: Stall | None = Field(description="Present where the step takes far longer than usual and is not paused.")
    active_interventions: tuple[Name, ...] = ()
    pending: int = Field(ge=0, description="Requests that wait for the step boundary.")
    snapshots: tuple[Name, ...] = ()
    policy: AutofixPolicy = AutofixPolicy()
    num_changes: int = Field(default=0, ge=0, description="Interventions that have changed the run so far.")


class Done(Record):
    """Answer to a flush request."""

    kind: Literal["done"] = "done"
    num_changes: int = Field(default=0, ge=0, description="Interventions that had changed the run before the flush.")


class InterventionReply(Record):
    """Answer to whatever acts: its intervention, `pending` where the boundary was not reached within `wait_s`."""

    kind: Literal["intervention"] = "intervention"
    intervention: Intervention
    num_changes: int | None = Field(
        default=None, ge=0, description="Interventions that had changed the run then; null while this one is pending."
    )


class Refusal(Record):
    """The request was understood, or not, and is not carried out."""

    kind: Literal["refusal"] = "refusal"
    code: Literal["bad_token", "bad_message", "unknown_fix", "bad_parameter", "unknown_intervention", "not_now"]
    message: Text


Reply = Annotated[LiveStatus | Done | InterventionReply | Refusal, Field(discriminator="kind")]

ENVELOPE: TypeAdapter[Envelope] = TypeAdapter(Envelope)
REPLY: TypeAdapter[Reply] = TypeAdapter(Reply)


class ControlClient:
    """Asks one run; a connection a request, so that there is no state to lose when either side restarts.

    Args:
        manifest: A manifest that was read with `gradtracer.home.read_manifest`.
    """

    def __init__(self, manifest: RunManifest) -> None:
        self._manifest = manifest

    def ask(self, request: Request, timeout_s: float = 5.0) -> Reply:
        """Send a request and wait for the reply.

        Args:
            request: What to ask.
            timeout_s: For the whole exchange; add the request's `wait_s` where it has one.

        Raises:
            RunNotLive: If nobody listens.
            RunDidNotAnswer: If no reply came in time.
            RunRefused: If the reply is no message of this protocol.
        """
        manifest, address = self._manifest, self._manifest.address
        if address is None:
            raise RunNotLive(f"run {manifest.run_id} serves no control socket (serve=False), so it cannot be steered")
        line = Envelope(token=manifest.token, request=request).model_dump_json().encode() + b"\n"
        family = socket.AF_UNIX if isinstance(address, UnixAddress) else socket.AF_INET
        target = address.path if isinstance(address, UnixAddress) else (address.host, address.port)
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(timeout_s)
                connection.connect(target)
                connection.sendall(line)
                with connection.makefile("rb") as stream:
                    answer = stream.readline(MAX_LINE_BYTES + 1)
        except (TimeoutError, BlockingIOError) as error:  # The latter where its backlog is full.
            raise RunDidNotAnswer(
                f"run {manifest.run_id} did not answer within {timeout_s:g} s. Its process may be stopped or swapped "
                "out; get_run_status shows what it last recorded"
            ) from error
        except OSError as error:
            raise RunNotLive(
                f"run {manifest.run_id} is gone: nobody listens on its socket. What it recorded can still be read"
            ) from error
        if not answer.endswith(b"\n"):
            raise RunNotLive(f"run {manifest.run_id} closed the connection; call get_run_status to see how it ended")
        try:
            return REPLY.validate_json(answer)
        except ValidationError as error:
            raise RunRefused(
                f"run {manifest.run_id} answered in another protocol: training and server use different versions of "
                "gradtracer-mcp"
            ) from error
