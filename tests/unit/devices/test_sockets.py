"""The port of a process is read from the kernel, for its descendants too, and only on loopback."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from devices.sockets import loopback_port

LISTEN = """
import socket, sys
with socket.socket() as listener:
    listener.bind((sys.argv[1], 0))
    if sys.argv[2] == "listen":
        listener.listen()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@contextmanager
def started(*argv: str) -> Iterator[tuple[int, int]]:
    """Start a process, and yield its pid and the port that it prints."""
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process.pid, int(process.stdout.readline())
        process.communicate()


def test_port_of_a_process_is_read_from_the_kernel() -> None:
    with started(sys.executable, "-c", LISTEN, "127.0.0.1", "listen") as (pid, port):
        assert loopback_port(pid) == port
    assert loopback_port(pid) is None


def test_port_of_a_child_of_a_wrapper_script_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        psutil.Process, "children", lambda *_, **__: pytest.fail("every process of the machine was looked at")
    )
    # The second command prevents that the shell replaces itself by the first one.
    with started("sh", "-c", '"$0" -c "$1" 127.0.0.1 listen; :', sys.executable, LISTEN) as (pid, port):
        assert loopback_port(pid) == port


@pytest.mark.parametrize(("address", "listens"), [("0.0.0.0", "listen"), ("127.0.0.2", "listen"), ("127.0.0.1", "no")])
def test_socket_that_is_not_open_on_loopback_only_does_not_count(address: str, listens: str) -> None:
    with started(sys.executable, "-c", LISTEN, address, listens) as (pid, _):
        assert loopback_port(pid) is None


def test_a_port_of_another_process_does_not_count() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)),
        started(sys.executable, "-c", LISTEN, "127.0.0.1", "no") as (pid, _),
    ):
        assert loopback_port(pid) is None
