"""The client of the control channel, against peers that do not keep to the protocol."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gradtracer.control import MAX_LINE_BYTES, ControlClient, Done, StatusRequest
from gradtracer.errors import RunDidNotAnswer, RunNotLive, RunRefused
from gradtracer.records import Address, RunManifest, TcpAddress, UnixAddress


def client_of(address: Address | None) -> ControlClient:
    manifest = RunManifest(
        run_id="digits", name="digits", pid=1, pid_created_s=0.0, started_at_s=0.0, track_interval=1, address=address
    )
    return ControlClient(manifest)


@contextmanager
def peer(answer: bytes | None) -> Iterator[ControlClient]:
    """A peer that takes one connection, reads one line and sends these bytes; None says nothing, until the end."""
    over = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as stream:
            stream.readline()
            if answer is None:
                over.wait(30)
            else:
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield client_of(TcpAddress(port=listener.getsockname()[1]))
        finally:
            over.set()
            thread.join()


def test_a_reply_is_parsed() -> None:
    with peer(b'{"kind":"done"}\n') as client:
        assert client.ask(StatusRequest()) == Done()


@pytest.mark.parametrize("answer", [b"", b"half a li", b'{"kind":"done"}', b"x" * (MAX_LINE_BYTES + 2)])
def test_a_connection_that_ends_within_the_reply_means_a_run_that_ended(answer: bytes) -> None:
    with peer(answer) as client, pytest.raises(RunNotLive, match="run digits"):
        client.ask(StatusRequest())


@pytest.mark.parametrize("answer", [b"\n", b"HTTP/1.1 400 Bad Request\r\n", b'{"kind":"new"}\n', b"\xff\n"])
def test_a_reply_of_another_protocol_says_that_versions_differ(answer: bytes) -> None:
    with peer(answer) as client, pytest.raises(RunRefused, match="different versions of gradtracer-mcp"):
        client.ask(StatusRequest())


def test_silence_is_told_from_death() -> None:
    with peer(None) as client, pytest.raises(RunDidNotAnswer, match=r"did not answer within 0.05 s.*get_run_status"):
        client.ask(StatusRequest(), timeout_s=0.05)


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets here")
def test_a_process_whose_queue_of_connections_is_full_did_not_answer_and_is_not_dead(tmp_path: Path) -> None:
    path = str(tmp_path / "c.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        client = client_of(UnixAddress(path=path))
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(path)
            with pytest.raises(RunDidNotAnswer):
                client.ask(StatusRequest(), timeout_s=0.05)


def test_a_run_that_serves_nothing_or_is_gone_cannot_be_steered(tmp_path: Path) -> None:
    with pytest.raises(RunNotLive, match="serve=False"):
        client_of(None).ask(StatusRequest())
    gone = UnixAddress(path=str(tmp_path / "c.sock"))
    with pytest.raises(RunNotLive, match="nobody listens"):
        client_of(gone).ask(StatusRequest())
