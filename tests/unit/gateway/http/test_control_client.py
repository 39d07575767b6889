"""The client of a control socket survives whatever answers there: root asks the sockets of other users."""

import gzip
import socket
from pathlib import Path

import msgspec
import pytest

from gateway.http import control_client
from gateway.http.control_client import ControlClient, ControlRefusedError, ControlUnreachableError
from tests.support.canned_socket import answer_with


class Greeting(msgspec.Struct):
    """An answer."""

    text: str


def response(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields])
    return f"{head}\r\n\r\n".encode() + body


async def test_answer_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with answer_with(path, response(b'{"text": "hello"}')):
        assert await ControlClient(path, "agent").call("GET", "/status", Greeting) == Greeting("hello")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200_001, "longer than 200000 bytes"),
        (response(gzip.compress(b"x" * 500_000), "Content-Encoding: gzip"), "of another version"),
        (response(b"", "Location: http://elsewhere/", status="302 Found"), "agent at"),
        (response(b'{"other": ' + b"[" * 100_000), "of another version"),
    ],
    ids=["giant", "bomb", "redirection", "deep"],
)
async def test_answer_of_a_hostile_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, problem: str
) -> None:
    monkeypatch.setattr(control_client, "_MOST_BYTES", 200_000)
    path = tmp_path / "s"
    with answer_with(path, answer) as calls, pytest.raises(ControlRefusedError, match=problem):
        await ControlClient(path, "agent").call("GET", "/status", Greeting)
    assert len(calls) == 1


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{"], ids=["never", "half"])
async def test_answer_that_never_comes_is_not_awaited_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(control_client, "_TIMEOUT_SECONDS", 0.2)
    path = tmp_path / "s"
    client = ControlClient(path, "agent")
    with answer_with(path, answer, ends=False), pytest.raises(ControlUnreachableError, match=r"within 0\.2 s"):
        await client.call("GET", "/status", Greeting)


class SuspiciousClient(ControlClient):
    """A client that trusts nobody."""

    def check_peer(self, connection: socket.socket) -> None:
        assert connection.family == socket.AF_UNIX
        raise ControlRefusedError("not that one")


async def test_process_that_is_not_trusted_is_sent_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with answer_with(path, response(b"{}")) as calls, pytest.raises(ControlRefusedError, match="not that one"):
        await SuspiciousClient(path, "agent").call("POST", "/stop", Greeting)
    assert calls == [b""], "it was connected, and sent nothing"
