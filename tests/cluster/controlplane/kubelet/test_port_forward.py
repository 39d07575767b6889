"""`kubectl port-forward` to a pod of the process kubelet."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tests.cluster.controlplane.kubelet.conftest import Pods
from tests.controlplane import binaries
from tests.controlplane.plane import ControlPlane

ECHO = """
import socketserver
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(self.rfile.readline().upper())
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
print("serving", flush=True)
Server(("0.0.0.0", 8080), Echo).serve_forever()
"""
"""A server that answers a line."""

ENDLESS = """
import socket
connection, _ = socket.create_server(("0.0.0.0", 8080)).accept()
try:
    while True:
        connection.sendall(bytes(65536))
except OSError:
    print("the client is gone")
"""


@dataclass(frozen=True)
class Forwarded:
    """A kubectl that forwards a port of this machine."""

    port: int
    errors: asyncio.StreamReader

    async def ask(self, data: bytes) -> bytes:
        """Send data over a new connection, and return the answer to its end.

        Where nothing answers, kubectl may close the connection before it has read the data, which resets it.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def forward(plane: ControlPlane, namespace: str, pod: str, port: int) -> AsyncIterator[Forwarded]:
    process = await asyncio.create_subprocess_exec(
        *(binaries.ensure_binaries().kubectl, "port-forward", f"--namespace={namespace}", f"pod/{pod}", f":{port}"),
        env={**os.environ, **plane.environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = (await process.stdout.readline()).decode()
        match = re.match(r"Forwarding from 127\.0\.0\.1:(\d+)", line)
        assert match, line + (await process.stderr.read()).decode()
        yield Forwarded(int(match[1]), process.stderr)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_bytes_pass_both_ways_on_connections_at_the_same_time(pods: Pods, plane: ControlPlane) -> None:
    name = await pods.run(f"exec python3 -c '{ECHO}'", main={"readinessProbe": {"tcpSocket": {"port": 8080}}})
    await pods.until(name, lambda status: status["containerStatuses"][0]["ready"])
    async with forward(plane, pods.namespace, name, 8080) as forwarded:
        sent = [bytes([letter]) * size + b"\n" for letter, size in ((97, 3), (98, 3_000_000), (99, 1), (100, 200_000))]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*map(forwarded.ask, sent))
        assert answers == [data.upper() for data in sent]
        assert await forwarded.ask(b"again\n") == b"AGAIN\n"


async def test_pod_sees_that_a_client_goes_in_the_middle_of_an_answer(pods: Pods, plane: ControlPlane) -> None:
    name = await pods.run(f"exec python3 -c '{ENDLESS}'")
    await pods.until(name, lambda status: status["phase"] == "Running")
    async with forward(plane, pods.namespace, name, 8080) as forwarded:

        async def read_some() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", forwarded.port)
            try:
                return await reader.read(1)
            finally:
                writer.transport.abort()

        assert await read_some() == b"\0"
        assert (await pods.ended(name))["exitCode"] == 0


async def test_port_at_which_nothing_listens_is_reported(pods: Pods, plane: ControlPlane) -> None:
    name = await pods.run("sleep 1000")
    await pods.until(name, lambda status: status["phase"] == "Running")
    async with forward(plane, pods.namespace, name, 8080) as forwarded:
        assert await forwarded.ask(b"hello\n") == b""
        async with asyncio.timeout(60):
            errors = await forwarded.errors.read()
    assert f"error forwarding port 8080 to pod {name}: " in errors.decode()
    assert "Connect call failed" in errors.decode()
