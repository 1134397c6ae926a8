"""The serving side of `gradtracer.control`: a thread of the training process that answers whoever holds the token.

The thread never touches the model. It answers `status` itself, also while a step hangs; whatever acts is handed to the
training thread, which carries it out at its next step boundary, and the reply waits for that.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import hmac
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ValidationError
from pydantic_core import from_json

from gradtracer.control import (
    ENVELOPE,
    MAX_LINE_BYTES,
    ActingRequest,
    Done,
    FlushRequest,
    InterventionReply,
    LiveStatus,
    Refusal,
    Reply,
    StatusRequest,
)
from gradtracer.errors import BadParameter, RunUnavailable, UnknownFix, UnknownIntervention
from gradtracer.records import Address, Intervention, TcpAddress, UnixAddress

log = logging.getLogger("gradtracer")

SOCKET_NAME = "control.sock"
MAX_CONNECTIONS = 64

# sun_path holds 108 bytes on Linux and 104 on macOS and the BSDs, the closing NUL included.
_MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
# For a reply that is ready when the server closes, and for a client to take a refusal while it is still sending.
_GRACE_S = 0.5
_CLOSE_TIMEOUT_S = 5.0
_BACKLOG = 128


@dataclass(frozen=True)
class Submission:
    """A request on its way to the training thread."""

    future: concurrent.futures.Future[Reply]
    """Resolved by the training thread once the request is carried out or refused."""
    pending: Intervention
    """What the client is told where the step boundary does not come within its `wait_s`."""

    def pending_reply(self) -> InterventionReply:
        """The reply for now."""
        return InterventionReply(intervention=self.pending)


class ControlHandler(Protocol):
    """What answers requests.

    `UnknownFix`, `BadParameter`, `UnknownIntervention` and `RunUnavailable` become refusals with their text, whether
    a method raises them or the future holds them. Any other exception is logged, and the client learns no more of it.
    """

    def status(self) -> LiveStatus:
        """How the training stands. Called in the server's thread: it must return at once."""
        ...

    def flush(self) -> None:
        """Make the journal current. Called in a thread where it may block."""
        ...

    def submit(self, request: ActingRequest) -> Submission:
        """Queue a request for the training thread. Called in the server's thread: it must return at once."""
        ...


class ControlServer:
    """Serves one run, in a daemon thread.

    Args:
        handler: What answers.
        directory: The run directory, where the socket is made. Where its path is too long for a socket, or its file
            system has none, the socket is made in a private temporary folder.
        transport: `unix`, `tcp` (a free port of 127.0.0.1, guarded by the token alone), or `auto`: `unix` where the
            system has it.
        token: What clients must show; made up by default.
        idle_timeout_s: A connection that sends no whole line for this long is closed.
    """

    def __init__(
        self,
        handler: ControlHandler,
        directory: Path,
        *,
        transport: Literal["auto", "unix", "tcp"] = "auto",
        token: str | None = None,
        idle_timeout_s: float = 30.0,
    ) -> None:
        self._token = secrets.token_urlsafe(32) if token is None else token
        self._handler = handler
        self._directory = directory.absolute()
        self._transport = transport
        self._idle_timeout_s = idle_timeout_s
        self._address: Address | None = None
        self._private_directory: str | None = None
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def token(self) -> str:
        """What clients must show."""
        return self._token

    @property
    def address(self) -> Address:
        """Where it listens, once started."""
        assert self._address is not None, "start() comes first"
        return self._address

    def start(self) -> None:
        """Listen. Connections are taken as soon as this returns.

        Raises:
            OSError: If no socket can be had.
        """
        assert self._thread is None, "a server starts once"
        listener = self._listen()
        # Not new_event_loop(): the program may have set a policy for loops of its own kind.
        self._loop = asyncio.SelectorEventLoop()
        self._stopping = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="gradtracer-control", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Answer what is under way, stop listening and remove the socket. Call it after the futures are resolved."""
        if self._thread is None or os.getpid() != self._pid:  # A forked child does not own the socket.
            return
        atexit.unregister(self.close)
        self._wake(self._stopping)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if isinstance(self._address, UnixAddress):
            Path(self._address.path).unlink(missing_ok=True)
        self._remove_private_directory()

    def _wake(self, waiting: asyncio.Future[None]) -> None:
        """Resolve a future of the loop from any thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits.
            self._loop.call_soon_threadsafe(lambda: waiting.done() or waiting.set_result(None))

    def _listen(self) -> socket.socket:
        if self._transport == "unix" or (self._transport == "auto" and hasattr(socket, "AF_UNIX")):
            try:
                return self._listen_unix()
            except OSError:
                self._remove_private_directory()
                if self._transport == "unix":
                    raise
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self._address = TcpAddress(port=listener.getsockname()[1])
        return listener

    def _listen_unix(self) -> socket.socket:
        path = self._directory / SOCKET_NAME
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
            with contextlib.suppress(OSError):  # Some network file systems have no sockets.
                return self._bind(path)
        self._private_directory = tempfile.mkdtemp(prefix="gradtracer-")  # mode 0700
        return self._bind(Path(self._private_directory) / SOCKET_NAME)

    def _bind(self, path: Path) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(os.fspath(path))
            os.chmod(path, 0o600)  # Before listen(): until then nobody can connect.
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        self._address = UnixAddress(path=os.fspath(path))
        return listener

    def _remove_private_directory(self) -> None:
        if self._private_directory is not None:
            shutil.rmtree(self._private_directory, ignore_errors=True)
            self._private_directory = None

    # What follows runs in the server's thread.

    def _run(self, listener: socket.socket) -> None:
        self._loop.set_exception_handler(_log_loop_error)
        try:
            self._loop.run_until_complete(self._serve(listener))
        except Exception:
            log.warning("the control channel is off for the rest of this run, training goes on", exc_info=True)
        finally:
            self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        start = asyncio.start_server if isinstance(self._address, TcpAddress) else asyncio.start_unix_server
        server = await start(self._converse, sock=listener, limit=MAX_LINE_BYTES, backlog=_BACKLOG)
        await self._stopping
        server.close()
        for task in self._connections - self._answering:
            task.cancel()
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=_GRACE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        num_others = len(self._connections)
        if num_others >= 2 * MAX_CONNECTIONS:  # Not even time for a refusal.
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            if num_others >= MAX_CONNECTIONS:
                await self._send(writer, _refusal("not_now", f"{MAX_CONNECTIONS} clients are connected; ask again"))
                await _await_end(reader)
                return
            while not self._stopping.done():
                reply = None
                try:
                    line = await asyncio.wait_for(reader.readuntil(b"\n"), self._idle_timeout_s)
                except asyncio.IncompleteReadError as error:
                    if not error.partial:
                        return
                    reply = _refusal("bad_message", "the connection ended within a line")
                except asyncio.LimitOverrunError:
                    reply = _refusal("bad_message", f"a line is at most {MAX_LINE_BYTES:,} bytes")
                else:
                    self._answering.add(task)
                    reply = await self._answer(line)
                await self._send(writer, reply)
                self._answering.discard(task)
                if isinstance(reply, Refusal) and reply.code in ("bad_message", "bad_token"):
                    await _await_end(reader)
                    return
        except (ConnectionError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # The client went away, fell silent, or the server closes: nobody is left to tell.
        finally:
            self._connections.discard(task)
            self._answering.discard(task)
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        writer.write(reply.model_dump_json().encode() + b"\n")
        await asyncio.wait_for(writer.drain(), self._idle_timeout_s)

    async def _answer(self, line: bytes) -> Reply:
        try:
            opening = from_json(line)
            token = opening["token"].encode()
        except (ValueError, TypeError, LookupError, AttributeError):
            return _refusal("bad_message", "expected one JSON object a line, with version, token and request")
        # Before anything else is looked at: who does not know the token learns nothing else.
        if not hmac.compare_digest(token, self._token.encode()):
            return _refusal("bad_token", "the token is not that of this run; read run.json again")
        try:
            request = ENVELOPE.validate_json(line).request
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"])) or "message"
            return _refusal("bad_message", f"{where}: {problem['msg']}")
        try:
            if isinstance(request, StatusRequest):
                return self._handler.status()
            if isinstance(request, FlushRequest):
                # Counted first: what changes while the journal is written may not be in it.
                num_changes = self._handler.status().num_changes
                await self._in_thread(self._handler.flush)
                return Done(num_changes=num_changes)
            return await self._outcome(self._handler.submit(request), request.wait_s)
        except Exception as error:
            for kind, code in _REFUSALS.items():
                if isinstance(error, kind):
                    return _refusal(code, str(error))
            log.warning("a %s request failed", request.kind, exc_info=True)
            return _refusal("not_now", "the request failed inside the training process; its log has the traceback")

    async def _outcome(self, submission: Submission, wait_s: float) -> Reply:
        future = submission.future
        await asyncio.wait({self._arrival(future), self._stopping}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if future.cancelled():
            return _refusal("not_now", "the request was withdrawn before it was carried out")
        if future.done():
            return future.result()
        if self._stopping.done():
            return _refusal("not_now", "the training ended before the request was carried out")
        return submission.pending_reply()

    async def _in_thread(self, function: Callable[[], None]) -> None:
        """Run what may block. Not in an executor: its threads are joined when the interpreter ends."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            try:
                function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, name="gradtracer-flush", daemon=True).start()
        await self._arrival(future)
        future.result()

    def _arrival(self, future: concurrent.futures.Future[Any]) -> asyncio.Future[None]:
        """Done when `future` is. Not wrap_future(), which would cancel a request together with its connection."""
        arrival: asyncio.Future[None] = self._loop.create_future()
        future.add_done_callback(lambda _: self._wake(arrival))
        return arrival


_RefusalCode = Literal["bad_token", "bad_message", "unknown_fix", "bad_parameter", "unknown_intervention", "not_now"]
_REFUSALS: dict[type[Exception], _RefusalCode] = {
    UnknownFix: "unknown_fix",
    BadParameter: "bad_parameter",
    UnknownIntervention: "unknown_intervention",
    RunUnavailable: "not_now",
}


def _refusal(code: _RefusalCode, message: str) -> Refusal:
    return Refusal(code=code, message=message)


async def _await_end(reader: asyncio.StreamReader) -> None:
    """Let the client finish sending: closing with unread input resets the connection, and the refusal is lost."""

    async def discard() -> None:
        while await reader.read(MAX_LINE_BYTES):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(discard(), _GRACE_S)


def _log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    log.warning("the control channel: %s", context["message"], exc_info=context.get("exception"))
