"""Asking a training that runs in this process, over its real socket."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from gradtracer import FlowTracker
from gradtracer.control import ControlClient, FixRequest, InterventionReply, Refusal, Reply, Request, RevertRequest
from gradtracer.home import read_manifest
from gradtracer.records import Intervention, ParameterScalar
from tests.training.models import Training


def train(training: Training, tracker: FlowTracker, steps: int) -> list[float]:
    return training.run(steps, lambda loss: tracker.step(loss.item()))


def ask(training: Training, tracker: FlowTracker, request: Request) -> Reply:
    """The reply, which a step boundary of the training gives."""
    client = ControlClient(read_manifest(tracker.directory))
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(client.ask, request, 30.0)
        while not reply.done():
            train(training, tracker, 1)
        return reply.result()


def fix(
    training: Training, tracker: FlowTracker, code: str, mode: str = "apply", **parameters: ParameterScalar
) -> Intervention:
    request = FixRequest(fix=code, mode=mode, parameters=parameters, requester="test")  # type: ignore[arg-type]
    reply = ask(training, tracker, request)
    assert isinstance(reply, InterventionReply), reply
    return reply.intervention


def refused(training: Training, tracker: FlowTracker, code: str, **parameters: ParameterScalar) -> Refusal:
    reply = ask(training, tracker, FixRequest(fix=code, mode="apply", parameters=parameters, requester="test"))
    assert isinstance(reply, Refusal), reply
    return reply


def revert(training: Training, tracker: FlowTracker, intervention: Intervention) -> Reply:
    return ask(training, tracker, RevertRequest(intervention_id=intervention.id, requester="test"))
