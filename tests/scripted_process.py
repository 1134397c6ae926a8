"""Stands in for a training process on the other end of the control channel, where a test needs it to answer badly.

Tests that need a training take a real one; this one paused, hangs, refuses or keeps silent on demand.
"""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Any

from gradtracer.control import ENVELOPE, Done, InterventionReply, LiveStatus, Refusal, Request
from gradtracer.records import Intervention, InterventionState, TcpAddress

TOKEN = "secret-token"
RUNNING = LiveStatus(step=120, paused=False, seconds_since_step=0.1, usual_step_s=0.1, stall=None, pending=0)


def intervention(state: InterventionState = InterventionState.PREVIEWED) -> Intervention:
    return Intervention(
        id="i7",
        run_id="r",
        fix="clip_grad_norm",
        mode="dry_run",
        requester="agent",
        state=state,
        requested_at_s=1_700_000_000.0,
    )


class ScriptedProcess:
    """Answers each kind of request with the reply that the script holds for it; silent where it holds None."""

    def __init__(self, **script: LiveStatus | Done | InterventionReply | Refusal | None) -> None:
        acts = dict.fromkeys(("fix", "revert", "training", "policy"), InterventionReply(intervention=intervention()))
        self.script: dict[str, Any] = {"status": RUNNING, "flush": Done(), **acts, **script}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._silent: list[socket.socket] = []
        self.requests: list[Request] = []
        self.address = TcpAddress(port=self._listener.getsockname()[1])

    def __enter__(self) -> ScriptedProcess:
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._silent:
            connection.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed: the test is over
            with connection.makefile("rb") as stream:
                envelope = ENVELOPE.validate_json(stream.readline())
            assert envelope.token == TOKEN
            self.requests.append(envelope.request)
            reply = self.script[envelope.request.kind]
            if reply is None:
                self._silent.append(connection)
                continue
            with connection:
                connection.sendall(reply.model_dump_json().encode() + b"\n")
