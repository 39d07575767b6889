"""The webhook's server over TLS: reviews are answered, and hostile requests cost little and break nothing."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec
import pytest

from controller.preflight import preflight_webhook
from controller.preflight.admission_review import ReviewedWrite
from controller.preflight.preflight_verdict import ALLOWED, PreflightAnswer
from controller.preflight.preflight_webhook import build_server
from gateway.http.limits import ConnectionCaps
from gateway.http.whole_answers import AnswerServer, serve_answers
from gateway.proxy.tls import load_certificate
from tests.support.api_objects import service
from tests.support.certificates import CA, HOST
from tests.support.eventually import eventually
from tests.unit.gateway.http.http_server import RawClient

PATH = "/preflight/secret"
REQUEST = {
    "uid": "u-1",
    "operation": "CREATE",
    "resource": {"group": "inference.pomona.dev", "version": "v1alpha1", "resource": "inferenceservices"},
    "object": service(),
}
REVIEW = msgspec.json.encode({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": REQUEST})


class Served(NamedTuple):
    server: AnswerServer
    port: int


def refuse(_write: ReviewedWrite) -> PreflightAnswer:
    return PreflightAnswer(refusal="too large")


@contextlib.asynccontextmanager
async def serve(server: AnswerServer | None = None) -> AsyncIterator[Served]:
    server = server or build_server(lambda path: path == PATH, refuse)
    context, caps = load_certificate(HOST), preflight_webhook.CAPS
    async with serve_answers(server, "127.0.0.1", 0, context=context, caps=caps) as (_, port):
        yield Served(server, port)


@contextlib.asynccontextmanager
async def connect(served: Served) -> AsyncIterator[RawClient]:
    trust = ssl.create_default_context(cafile=CA)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=trust)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


def post(body: bytes, path: str = PATH, *, length: int | None = None, kind: str = "application/json") -> bytes:
    size = len(body) if length is None else length
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n".encode()
        + body
    )


async def ask(served: Served, request: bytes) -> tuple[int, bytes]:
    async with connect(served) as client:
        await client.send(request)
        head, body = await client.answer()
        return int(head.split(b" ", 2)[1]), body


async def test_review_is_answered_by_the_certificate_of_the_service() -> None:
    async with serve() as served:
        status, body = await ask(served, post(REVIEW))
        assert status == 200
        answer = msgspec.json.decode(body)["response"]
        assert (answer["uid"], answer["allowed"], answer["status"]["message"]) == ("u-1", False, "too large")
        assert served.server.held_bytes == 0


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (post(b"\x00\xff garbage"), 400),
        (post(b""), 400),
        (post(b"a=b", kind="application/x-www-form-urlencoded"), 400),
        (post(b"[" * 100_000), 400),
        (post(b"", length=9 << 20), 413),
        (post(b"", length=1 << 60), 413),
        (post(REVIEW, "/preflight/guess"), 404),
        (post(b"", "/", length=1 << 60), 404),
        (f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), 405),
    ],
)
async def test_hostile_request_is_answered_and_the_next_client_served(request_bytes: bytes, expected: int) -> None:
    async with serve() as served:
        assert (await ask(served, request_bytes))[0] == expected
        assert (await ask(served, post(REVIEW)))[0] == 200
        assert served.server.held_bytes == 0


async def test_chunked_body_without_end_is_not_kept() -> None:
    async with serve() as served, connect(served) as client:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        await client.send(head)
        with contextlib.suppress(ConnectionError):
            for _ in range(9):
                await client.send(b"100000\r\n" + b" " * 0x100000 + b"\r\n")
        answer, _ = await client.answer()
        assert b" 413 " in answer
        assert served.server.held_bytes == 0


async def test_bodies_of_many_clients_together_are_limited_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_webhook, "MOST_HELD_BYTES", 100)
    async with serve() as served:
        async with connect(served) as slow:
            await slow.send(post(b"x" * 80, length=90))
            await eventually(lambda: served.server.held_bytes == 80)
            assert (await ask(served, post(b"x" * 50)))[0] == 503
        await eventually(lambda: served.server.held_bytes == 0)
        assert (await ask(served, post(b"x" * 50)))[0] == 400


async def test_idle_connections_of_strangers_are_few_and_keep_no_review_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_webhook, "CAPS", ConnectionCaps(total=4, per_peer=2))
    async with serve() as served, contextlib.AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(connect(served)) for _ in range(3)]
        async with asyncio.timeout(60):
            assert await strangers[0].reader.read() == b"", "half of all are for one address, and the longest idle goes"
        assert (await ask(served, post(REVIEW)))[0] == 200


async def test_plain_text_on_the_port_harms_nobody() -> None:
    async with serve() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(post(REVIEW))
        with contextlib.suppress(ConnectionError):
            assert b"200" not in await asyncio.wait_for(reader.read(), 20)
        writer.transport.abort()
        assert (await ask(served, post(REVIEW)))[0] == 200


async def test_judgement_that_fails_refuses_nothing() -> None:
    def fail(write: ReviewedWrite) -> PreflightAnswer:
        if write.uid == "u-1":
            raise RuntimeError("the token is s3cret")
        return ALLOWED

    async with serve(build_server(lambda path: path == PATH, fail)) as served:
        status, body = await ask(served, post(REVIEW))
        assert status == 500, "an API server lets the write pass, by the failurePolicy"
        assert b"s3cret" not in body
        assert (await ask(served, post(REVIEW.replace(b"u-1", b"u-2"))))[0] == 200
