"""The control channel: requests are answered, and nothing a client does reaches the training or ends the thread."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest

from gradtracer.control import (
    MAX_LINE_BYTES,
    REPLY,
    ControlClient,
    Done,
    Envelope,
    FixRequest,
    FlushRequest,
    InterventionReply,
    LiveStatus,
    Refusal,
    Reply,
    Request,
    RevertRequest,
    StatusRequest,
    TrainingRequest,
)
from gradtracer.errors import BadParameter, RunDidNotAnswer, RunNotLive, RunUnavailable, UnknownFix, UnknownIntervention
from gradtracer.records import Intervention, InterventionState, RunManifest, Stall, TcpAddress, UnixAddress
from gradtracer.training.control_server import MAX_CONNECTIONS, ControlServer, Submission
from gradtracer.training.stack import training_stack
from tests.deadline import wait_until

FIX = FixRequest(fix="clip_grad_norm", mode="apply", parameters={"max_norm": 1.0}, requester="agent")
Acting = FixRequest | RevertRequest | TrainingRequest


def intervention(state: InterventionState) -> Intervention:
    return Intervention(
        id="i1", run_id="r", fix="clip_grad_norm", mode="apply", requester="agent", state=state, requested_at_s=1.0
    )


class Training:
    """A training loop as the server sees it: a thread that carries requests out at its step boundaries."""

    def __init__(self) -> None:
        self.requests: queue.Queue[tuple[Acting, Future[Reply]] | None] = queue.Queue()
        self.carried_out: list[Acting] = []
        self.num_flushes = 0
        self.hang = threading.Event()
        self.hang.set()
        self.refuse_with: Exception | None = None
        self.fail_with: Exception | None = None
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def loop(self) -> None:
        while (item := self.requests.get()) is not None:
            self.hang_in_a_step()
            request, future = item
            self.carried_out.append(request)
            if self.fail_with is not None:
                future.set_exception(self.fail_with)
            else:
                future.set_result(InterventionReply(intervention=intervention(InterventionState.APPLIED)))

    def hang_in_a_step(self) -> None:
        assert self.hang.wait(60)

    def status(self) -> LiveStatus:
        if self.fail_with is not None:
            raise self.fail_with
        stall = None
        if not self.hang.is_set():
            assert self.thread.ident is not None
            stall = Stall(seconds=12.5, usual_s=0.1, stack=training_stack(self.thread.ident))
        return LiveStatus(step=7, paused=False, seconds_since_step=0.1, usual_step_s=0.1, stall=stall, pending=0)

    def flush(self) -> None:
        if self.fail_with is not None:
            raise self.fail_with
        self.hang_in_a_step()
        self.num_flushes += 1

    def submit(self, request: Acting) -> Submission:
        if self.refuse_with is not None:
            raise self.refuse_with
        submission = Submission(Future(), intervention(InterventionState.PENDING))
        self.requests.put((request, submission.future))
        return submission


Start = Callable[..., tuple[Training, ControlServer, ControlClient]]


def manifest_of(server: ControlServer, *, token: str | None = None) -> RunManifest:
    return RunManifest(
        run_id="r", name="r", pid=os.getpid(), pid_created_s=0.0, started_at_s=0.0, track_interval=100,
        address=server.address, token=server.token if token is None else token,
    )  # fmt: skip


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> Literal["unix", "tcp"]:
    if request.param == "unix" and not hasattr(socket, "AF_UNIX"):
        pytest.skip("no Unix sockets here")
    return request.param


@pytest.fixture
def start(tmp_path: Path, transport: Literal["unix", "tcp"]) -> Iterator[Start]:
    """Starts a server; ends all that were started."""
    started: list[tuple[Training, ControlServer]] = []

    def start_one(idle_timeout_s: float = 30.0) -> tuple[Training, ControlServer, ControlClient]:
        training = Training()
        server = ControlServer(training, tmp_path, transport=transport, idle_timeout_s=idle_timeout_s)
        server.start()
        started.append((training, server))
        return training, server, ControlClient(manifest_of(server))

    yield start_one
    for training, server in started:
        training.hang.set()
        training.requests.put(None)
        server.close()
        training.thread.join(10)
        assert not training.thread.is_alive()
    assert [t.name for t in threading.enumerate() if t.name == "gradtracer-control"] == []


def connect(server: ControlServer) -> socket.socket:
    address = server.address
    if isinstance(address, UnixAddress):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address.path)
    else:
        connection = socket.create_connection((address.host, address.port))
    connection.settimeout(20)
    return connection


def line_of(server: ControlServer, request: Request) -> bytes:
    return Envelope(token=server.token, request=request).model_dump_json().encode() + b"\n"


def answer_to(server: ControlServer, sent: bytes) -> Reply | None:
    """What the server says to these bytes, then the end of the connection; None where it says nothing."""
    with connect(server) as connection, connection.makefile("rb") as stream:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = stream.readline()
        assert stream.read() == b""
    return REPLY.validate_json(answer) if answer else None


# What is answered


def test_status_is_answered(start: Start) -> None:
    training, _, client = start()
    assert client.ask(StatusRequest()) == training.status()


def test_a_flush_is_done_when_it_is_answered(start: Start) -> None:
    training, _, client = start()
    assert client.ask(FlushRequest()) == Done()
    assert training.num_flushes == 1


@pytest.mark.parametrize(
    "request_",
    [FIX, RevertRequest(intervention_id="i1", requester="cli"), TrainingRequest(action="pause", requester="agent")],
)
def test_what_acts_is_carried_out_by_the_training_thread(start: Start, request_: Acting) -> None:
    training, _, client = start()
    reply = client.ask(request_)
    assert reply == InterventionReply(intervention=intervention(InterventionState.APPLIED))
    assert training.carried_out == [request_]


def test_a_boundary_that_does_not_come_in_time_is_answered_as_pending(start: Start) -> None:
    training, _, client = start()
    training.hang.clear()
    reply = client.ask(FIX.model_copy(update={"wait_s": 0.05}))
    assert reply == InterventionReply(intervention=intervention(InterventionState.PENDING))
    training.hang.set()
    wait_until(lambda: training.carried_out)


def test_status_tells_where_a_step_hangs_while_other_requests_wait(start: Start) -> None:
    training, _, client = start()
    training.hang.clear()
    with ThreadPoolExecutor() as others:
        waiting = [others.submit(client.ask, FIX, 30), others.submit(client.ask, FlushRequest(), 30)]
        wait_until(lambda: "hang_in_a_step" in training_stack(training.thread.ident or 0))
        status = client.ask(StatusRequest())
        training.hang.set()
        assert [type(reply.result()) for reply in waiting] == [InterventionReply, Done]
    assert isinstance(status, LiveStatus)
    assert status.stall is not None
    assert "in hang_in_a_step\n    assert self.hang.wait(60)" in status.stall.stack


def test_one_connection_may_ask_many_times(start: Start) -> None:
    training, server, _ = start()
    with connect(server) as connection, connection.makefile("rb") as stream:
        for _ in range(20):
            connection.sendall(line_of(server, StatusRequest()) + line_of(server, FlushRequest()))
            assert REPLY.validate_json(stream.readline()) == training.status()
            assert REPLY.validate_json(stream.readline()) == Done()


@pytest.mark.parametrize(
    ("error", "code"),
    [(UnknownFix("no fix 'x'; list_fixes shows them"), "unknown_fix"), (BadParameter("max_norm: > 0"), "bad_parameter"),
     (UnknownIntervention("no i9"), "unknown_intervention"), (RunUnavailable("the budget is spent"), "not_now")],
)  # fmt: skip
def test_errors_of_the_package_become_refusals_with_their_text(start: Start, error: Exception, code: str) -> None:
    training, _, client = start()
    expected = Refusal.model_validate({"code": code, "message": str(error)})
    training.refuse_with = error
    assert client.ask(FIX) == expected
    training.refuse_with, training.fail_with = None, error
    assert client.ask(FIX) == expected


@pytest.mark.parametrize("request_", [StatusRequest(), FlushRequest(), FIX])
def test_a_bug_behind_the_channel_is_logged_and_the_channel_stays(
    start: Start, request_: Request, caplog: pytest.LogCaptureFixture
) -> None:
    training, _, client = start()
    training.fail_with = ZeroDivisionError("secret detail")
    reply = client.ask(request_)
    assert isinstance(reply, Refusal)
    assert (reply.code, "secret" in reply.message, "its log has the traceback" in reply.message) == (
        "not_now", False, True,
    )  # fmt: skip
    assert "secret detail" in caplog.text
    training.fail_with = None
    assert isinstance(client.ask(StatusRequest()), LiveStatus)


def test_a_request_that_the_training_withdraws_is_refused(start: Start) -> None:
    training, _, client = start()
    training.hang.clear()
    with ThreadPoolExecutor() as others:
        first = others.submit(client.ask, FIX, 30)
        wait_until(lambda: "hang_in_a_step" in training_stack(training.thread.ident or 0))
        second = others.submit(client.ask, FIX, 30)
        wait_until(lambda: not training.requests.empty())
        item = training.requests.get()
        assert item is not None
        item[1].cancel()
        reply = second.result()
        training.hang.set()
        first.result()
    assert isinstance(reply, Refusal)
    assert "withdrawn" in reply.message


# What is refused


@pytest.mark.parametrize("token", ["", "wrong", "é", "x" * 256])
def test_a_bad_token_is_refused_before_the_request_is_looked_at(start: Start, token: str) -> None:
    training, server, _ = start()
    reply = ControlClient(manifest_of(server, token=token)).ask(FIX)
    assert isinstance(reply, Refusal)
    assert reply.code == "bad_token"
    nonsense = answer_to(server, json.dumps({"token": token, "request": {"kind": "explode"}}).encode() + b"\n")
    assert nonsense == reply
    assert training.carried_out == []


@pytest.mark.parametrize(
    "line",
    [b"\n", b"hello\n", b"{\n", b"null\n", b"[]\n", b"{}\n", b'{"token":null}\n', b'{"token":7}\n', b"\xff\xfe\x00\n",
     b'{"token":"\\ud800"}\n', b"[" * 100_000 + b"\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"no end of line"],
)  # fmt: skip
def test_a_malformed_line_is_refused_and_the_connection_closed(start: Start, line: bytes) -> None:
    _, server, client = start()
    reply = answer_to(server, line)
    assert isinstance(reply, Refusal)
    assert reply.code == "bad_message"
    assert isinstance(client.ask(StatusRequest()), LiveStatus)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"version": 2}, "version: Input should be 1"), ({"request": {"kind": "explode"}}, "request: Input tag 'explode'"),
     ({"request": FIX.model_dump() | {"wait_s": 51}}, "request.fix.wait_s: Input should be less than or equal to 50"),
     ({"request": {"kind": "status", "extra": 1}}, "request.status.extra: Extra inputs"), ({"more": 1}, "more: Extra")],
)  # fmt: skip
def test_a_message_of_another_form_is_told_what_is_wrong(
    start: Start, changes: dict[str, object], problem: str
) -> None:
    _, server, _ = start()
    message = json.loads(line_of(server, StatusRequest())) | changes
    reply = answer_to(server, json.dumps(message).encode() + b"\n")
    assert isinstance(reply, Refusal)
    assert reply.code == "bad_message"
    assert reply.message.startswith(problem)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_an_oversized_line_is_refused_while_it_is_still_being_sent(start: Start, end: bytes) -> None:
    _, server, client = start()
    reply = answer_to(server, b'{"token":"' + b"x" * (4 * MAX_LINE_BYTES) + end)
    assert reply == Refusal(code="bad_message", message="a line is at most 1,048,576 bytes")
    assert isinstance(client.ask(StatusRequest()), LiveStatus)


def test_a_client_of_the_package_is_told_that_its_request_is_too_long(start: Start) -> None:
    _, _, client = start()
    request = FIX.model_copy(update={"parameters": {"note": "x" * (2 * MAX_LINE_BYTES)}})
    reply = client.ask(request)
    assert isinstance(reply, Refusal)
    assert reply.code == "bad_message"


# Clients that behave badly


def test_a_connection_that_says_nothing_is_closed_and_disturbs_nobody(start: Start) -> None:
    _, server, client = start(idle_timeout_s=0.2)
    with connect(server) as silent, connect(server) as slow:
        slow.sendall(b'{"token":')
        assert isinstance(client.ask(StatusRequest()), LiveStatus)
        assert (silent.recv(1), slow.recv(1)) == (b"", b"")


def test_clients_that_vanish_at_any_point_disturb_nobody(start: Start) -> None:
    training, server, client = start()
    training.hang.clear()
    line = line_of(server, FIX)
    for length in (0, 1, len(line) // 2, len(line) - 1, len(line)):
        with connect(server) as connection:
            connection.sendall(line[:length])
    assert isinstance(client.ask(StatusRequest()), LiveStatus)
    training.hang.set()
    wait_until(lambda: training.carried_out == [FIX])
    assert isinstance(client.ask(FIX), InterventionReply)


def test_fifty_clients_at_once_are_all_answered(start: Start) -> None:
    training, _, client = start()
    requests = [(StatusRequest(), FlushRequest(), FIX)[i % 3] for i in range(50)]
    with ThreadPoolExecutor(50) as clients:
        replies = list(clients.map(lambda request: client.ask(request, 30), requests))
    expected = [LiveStatus, Done, InterventionReply]
    assert [type(reply) for reply in replies] == [expected[i % 3] for i in range(50)]
    assert len(training.carried_out) == 16


def test_a_crowd_beyond_the_cap_is_refused_until_someone_leaves(start: Start) -> None:
    _, server, client = start()
    crowd = [connect(server) for _ in range(MAX_CONNECTIONS)]
    for connection in crowd:
        connection.sendall(line_of(server, StatusRequest()))
        assert connection.recv(1) == b"{"
    reply = client.ask(StatusRequest())
    assert reply == Refusal(code="not_now", message="64 clients are connected; ask again")
    more = [connect(server) for _ in range(2 * MAX_CONNECTIONS)]
    for connection in (*crowd, *more):
        connection.close()
    wait_until(lambda: isinstance(ask_or_nothing(client), LiveStatus))


def ask_or_nothing(client: ControlClient) -> Reply | None:
    try:
        return client.ask(StatusRequest())
    except (RunNotLive, RunDidNotAnswer):
        return None


# Life and death


def test_after_the_close_nobody_listens_and_the_socket_is_gone(start: Start, tmp_path: Path) -> None:
    _, server, client = start()
    server.close()
    server.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunNotLive, match="nobody listens"):
        client.ask(StatusRequest())


def test_a_server_that_never_started_can_be_closed(tmp_path: Path) -> None:
    training = Training()
    ControlServer(training, tmp_path).close()
    training.requests.put(None)


def test_a_reply_that_is_ready_at_the_close_still_arrives(start: Start) -> None:
    training, server, client = start()
    training.hang.clear()
    with ThreadPoolExecutor() as others:
        waiting = others.submit(client.ask, FIX, 30)
        wait_until(lambda: "hang_in_a_step" in training_stack(training.thread.ident or 0))
        training.hang.set()
        training.requests.put(None)
        training.thread.join()
        server.close()
        assert isinstance(waiting.result(), InterventionReply)


def test_a_request_still_open_at_the_close_is_refused_and_may_be_resolved_later(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    training, server, client = start()
    training.hang.clear()
    with ThreadPoolExecutor() as others, connect(server):
        waiting = [others.submit(client.ask, request, 30) for request in (FIX, FIX)]
        wait_until(lambda: "hang_in_a_step" in training_stack(training.thread.ident or 0))
        wait_until(lambda: training.requests.qsize() == 1)
        server.close()
        refused = Refusal(code="not_now", message="the training ended before the request was carried out")
        assert [reply.result() for reply in waiting] == [refused, refused]
    training.hang.set()
    wait_until(lambda: len(training.carried_out) == 2)
    assert caplog.records == []


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets here")
def test_the_socket_is_the_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    training = Training()
    server = ControlServer(training, tmp_path)
    before = os.umask(0)
    try:
        server.start()
    finally:
        os.umask(before)
    assert server.address == UnixAddress(path=str(tmp_path / "control.sock"))
    assert stat.S_IMODE((tmp_path / "control.sock").stat().st_mode) == 0o600
    server.close()
    training.requests.put(None)


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets here")
def test_a_path_too_long_for_a_socket_gives_one_in_a_private_folder(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    training = Training()
    server = ControlServer(training, deep)
    server.start()
    assert isinstance(server.address, UnixAddress)
    path = Path(server.address.path)
    assert len(os.fsencode(path)) <= 107
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert ControlClient(manifest_of(server)).ask(StatusRequest()) == training.status()
    server.close()
    assert not path.parent.exists()
    training.requests.put(None)


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets here")
def test_where_no_socket_file_can_be_made_the_loopback_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    training = Training()
    with pytest.raises(OSError, match="too long"):
        ControlServer(training, deep, transport="unix").start()
    server = ControlServer(training, deep)
    server.start()
    assert isinstance(server.address, TcpAddress)
    assert ControlClient(manifest_of(server)).ask(StatusRequest()) == training.status()
    server.close()
    assert list(deep.iterdir()) == []
    training.requests.put(None)


def test_two_servers_make_up_different_tokens_and_a_given_one_is_kept(tmp_path: Path) -> None:
    training = Training()
    one, other = ControlServer(training, tmp_path), ControlServer(training, tmp_path)
    assert one.token != other.token
    assert len(one.token) >= 32
    assert ControlServer(training, tmp_path, token="given").token == "given"
    training.requests.put(None)


@pytest.mark.slow
def test_the_socket_is_removed_when_the_interpreter_ends_and_stays_with_the_parent_of_a_fork(tmp_path: Path) -> None:
    code = """
import os, sys, warnings
from pathlib import Path
from gradtracer.training.control_server import ControlServer
warnings.simplefilter("ignore", DeprecationWarning)
server = ControlServer(None, Path(sys.argv[1]))
server.start()
if os.fork() == 0:
    server.close()
    sys.exit(0)
assert os.wait()[1] == 0
assert Path(server.address.path).exists()
"""
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    command = [sys.executable, "-W", "error", "-c", code, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


# The stack


def descend(depth: int) -> str:
    return descend(depth - 1) if depth else training_stack(threading.get_ident())


def test_the_stack_of_a_thread_that_is_gone_is_empty() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert training_stack(thread.ident) == ""


def test_a_deep_stack_is_cut_at_its_outer_end() -> None:
    stack = descend(500)
    assert len(stack) <= 4_000
    assert stack.startswith("  File ")
    assert "in descend" in stack.splitlines()[0]
    assert "in training_stack" in stack.splitlines()[-2]


def test_a_status_with_the_deepest_stack_can_be_sent(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    training, _, client = start()
    stall = Stall(seconds=1.0, stack=descend(900))
    training.status = lambda: LiveStatus(
        step=0, paused=False, seconds_since_step=1.0, usual_step_s=None, stall=stall, pending=0
    )
    reply = client.ask(StatusRequest())
    assert isinstance(reply, LiveStatus)
    assert reply.stall == stall
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
