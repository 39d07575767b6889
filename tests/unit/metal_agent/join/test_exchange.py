"""A code meets the wrong server, or loses its answer: no secret leaves, and nothing is sent twice."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from crds.metalprocess import Artifact, MetalProcessSpec
from metal_agent.cluster.host_identity import FILE_NAME, JoinedHost, write_joined_host
from metal_agent.join.exchange import JoinError, join_cluster
from metal_agent.join.join_code import JoinCode, split_certificates
from metal_agent.native.process import identify_process
from metal_agent.state_folder import own_folder
from metal_agent.supervise.records import Record, Records
from tests.support.certificates import CA, HOST

FOREIGN = Path(__file__).parents[2] / "kube" / "certificate.pem"
SECRET = "the-code-s-token"


def code_for(url: str, authority: Path = CA) -> JoinCode:
    return JoinCode("studio-1", url, SECRET, "signature", 2**40, split_certificates(authority.read_bytes()))


def server_tls() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(HOST.certificate, HOST.key)
    return context


@contextlib.asynccontextmanager
async def recording_server() -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve TLS, and record what is sent by a client that accepts the certificate."""
    received: list[bytes] = []

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(65536))
        writer.close()

    server = await asyncio.start_server(record, "127.0.0.1", 0, ssl=server_tls())
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", received


async def test_server_of_another_authority_gets_nothing(tmp_path: Path) -> None:
    async with recording_server() as (url, received):
        with pytest.raises(
            JoinError, match=r"certificate verify failed.*nothing secret was sent, and the code is not used"
        ):
            await join_cluster(code_for(url, FOREIGN), tmp_path)
        assert received == []
    assert not (tmp_path / FILE_NAME).exists()


async def test_server_that_does_not_answer_gets_no_secret(tmp_path: Path) -> None:
    async with recording_server() as (url, received):
        with pytest.raises(JoinError, match=r"cannot reach the API server.*the code is not used"):
            await join_cluster(code_for(url), tmp_path)
        assert received
        assert not any(SECRET.encode() in data for data in received)


async def test_code_without_tls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JoinError, match="without TLS"):
        await join_cluster(code_for("http://127.0.0.1:1"), tmp_path)


@pytest.mark.parametrize("status", [None, 500, 504])
async def test_lost_answer_is_not_asked_for_again(tmp_path: Path, status: int | None) -> None:
    """A server whose storage does not answer in time says so by a status, and may have deleted nevertheless."""
    sent: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        sent.append(request.method)
        if request.method != "DELETE":
            return web.json_response({})
        await request.read()
        if status is None:
            assert request.transport
            request.transport.close()
        return web.json_response({"kind": "Status", "reason": "Timeout"}, status=status or 200)

    runner = web.AppRunner(application := web.Application(), shutdown_timeout=0.1)
    application.router.add_route("*", "/{path:.*}", answer)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_tls()).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        with pytest.raises(JoinError, match="may be used up: get another code by `pomona host join studio-1`"):
            await join_cluster(code_for(url), tmp_path)
    finally:
        await runner.cleanup()
    assert sent == ["GET", "DELETE"]


async def test_machine_that_is_another_host_and_runs_does_not_join(tmp_path: Path) -> None:
    write_joined_host(tmp_path, JoinedHost("studio-2", "https://192.0.2.1", "t", "2026-01-01T00:00:00Z"))
    with own_folder(tmp_path), pytest.raises(JoinError, match=r"is host studio-2: another agent .*, then join"):
        await join_cluster(code_for("https://127.0.0.1:1"), tmp_path)


async def test_machine_with_engines_of_another_host_does_not_join(tmp_path: Path) -> None:
    write_joined_host(tmp_path, JoinedHost("studio-2", "https://192.0.2.1", "t", "2026-01-01T00:00:00Z"))
    spec = MetalProcessSpec(
        service_name="chat",
        model_name="tiny",
        runtime="llama.cpp",
        artifact=Artifact(source="file:///tiny.gguf"),
        memory_bytes=1,
        token_secret="chat-token",
    )
    running = identify_process(os.getpid())
    Records(tmp_path / "processes").write(Record("u1", "team", "chat-1", spec, running, "2026-01-01T00:00:00Z"))
    with pytest.raises(JoinError, match=r"is host studio-2, and engines of it run here \(chat-1\): remove that host"):
        await join_cluster(code_for("https://127.0.0.1:1"), tmp_path)
