"""Compressed request bodies: which codings are decoded, what invalid data is answered, and what a bomb costs."""

import asyncio
import contextlib
import functools
import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable

import aiohttp
import pytest
from aiohttp import web
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.http.headers import Headers
from gateway.proxy import content_coding, listeners
from gateway.proxy.config import ProxyConfig, RouterListener
from gateway.proxy.content_coding import WINDOW_BYTES, decode_body, read_coding
from gateway.proxy.errors import RequestError
from gateway.proxy.inference_request import BODY_LIMIT_BYTES
from gateway.proxy.request_body import SHORT_BODY_BYTES, BodyBudget
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.recording_engine import recording_engine
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    CHAT,
    GatedEngine,
    ProxyProcess,
    error_code,
    fake_engine,
    make_service,
    proxy_in_process,
)

BODY = json.dumps(CHAT).encode()
LIMIT = 1 << 20


def compress_as_codex(content: bytes) -> bytes:
    """Compress as a stream, whose frame does not state the length of its content."""
    compressor = zstd.ZstdCompressor(level=3)
    return compressor.compress(content) + compressor.flush()


compress_gzip = functools.partial(gzip.compress, mtime=0)
"""Without the time, which would give each process other names of tests."""
COMPRESSORS: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": compress_gzip,
    b"x-gzip": compress_gzip,
    b"zstd": compress_as_codex,
    b"ZSTD": zstd.compress,
}
BY_CODING = pytest.mark.parametrize("coding", COMPRESSORS)


def decode(
    content: bytes, coding: bytes, *, limit_bytes: int = LIMIT, reserve: Callable[[int], None] = lambda _: None
) -> tuple[bytes, int]:
    """Return the decoded content, and the number of pauses."""
    pauses = 0
    work = decode_body(content, read_coding(Headers([(b"Content-Encoding", coding)])), limit_bytes, reserve)
    while True:
        try:
            next(work)
            pauses += 1
        except StopIteration as end:
            return bytes(end.value), pauses


# Which codings


@pytest.mark.parametrize(
    ("values", "coding"),
    [
        ([], ""),
        ([b""], ""),
        ([b"identity"], ""),
        ([b"gzip"], "gzip"),
        ([b" X-GZip "], "gzip"),
        ([b"identity, zstd"], "zstd"),
    ],
)
def test_one_known_coding_is_decoded(values: list[bytes], coding: str) -> None:
    assert read_coding(Headers((b"content-encoding", value) for value in values)) == coding


@pytest.mark.parametrize(
    "values", [[b"br"], [b"deflate"], [b"gzip, gzip"], [b"gzip", b"zstd"], [b"gzip,zstd"], [b"gzip;q=1"], [b"\xff"]]
)
def test_other_codings_and_several_of_them_are_refused(values: list[bytes]) -> None:
    with pytest.raises(RequestError, match="send the request body with gzip or zstd, or uncompressed") as refused:
        read_coding(Headers((b"Content-Encoding", value) for value in values))
    assert refused.value.status == 415
    assert refused.value.headers == {"Accept-Encoding": "gzip, zstd"}
    assert repr(values[0].decode(errors="surrogateescape"))[1:-1] in str(refused.value)


# Decoding


@BY_CODING
@given(
    content=st.binary(max_size=2000) | st.builds(lambda unit, times: unit * times, st.binary(), st.integers(0, 9999))
)
def test_decoded_body_is_what_was_compressed(coding: bytes, content: bytes) -> None:
    assert decode(COMPRESSORS[coding](content), coding)[0] == content[:LIMIT]


@BY_CODING
@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: b"",
        lambda _: b"{}",
        lambda whole: whole[:-1],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole + b"\0",
        lambda whole: whole + whole,
        lambda whole: whole[:1] + b"\xff" + whole[2:],
        lambda whole: b"\0" + whole,
        lambda whole: whole + bytes(1 << 20),
    ],
    ids=["nothing", "plain", "cut", "half", "more", "twice", "changed", "late", "much more"],
)
def test_invalid_data_is_refused(coding: bytes, spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(RequestError, match=f"is not the {coding.decode().lower().removeprefix('x-')} data") as refused:
        decode(spoil(COMPRESSORS[coding](b"some text" * 9999)), coding)
    assert refused.value.status == 400


@given(content=st.binary(max_size=300), coding=st.sampled_from([b"gzip", b"zstd"]))
def test_any_data_is_decoded_or_refused(content: bytes, coding: bytes) -> None:
    with contextlib.suppress(RequestError):  # any other error fails
        decode(content, coding)


def test_gzip_whose_checksum_is_wrong_is_refused() -> None:
    with pytest.raises(RequestError, match="incorrect data check"):
        decode(compress_gzip(BODY)[:-8] + bytes(8), b"gzip")


# What it costs


@BY_CODING
def test_bomb_is_refused_at_the_limit_in_short_pieces_of_work(coding: bytes) -> None:
    bomb = COMPRESSORS[coding](bytes(100 * LIMIT))
    reserved: list[int] = []
    with pytest.raises(RequestError, match=f"larger than {LIMIT} bytes") as refused:
        decode(bomb, coding, reserve=reserved.append)
    assert refused.value.status == 413
    assert max(reserved) <= 2 * content_coding.PIECE_BYTES
    assert sum(reserved) <= 2 * LIMIT


@BY_CODING
def test_work_between_two_pauses_is_bounded(coding: bytes) -> None:
    size = 20 * content_coding.PIECE_BYTES
    for content in (bytes(size), zlib.compress(bytes(size)) * 20, bytes(range(256)) * (size // 256)):
        decoded, pauses = decode(COMPRESSORS[coding](content), coding, limit_bytes=2 * size)
        assert decoded == content
        assert pauses >= len(content) // content_coding.PIECE_BYTES


def test_data_that_decodes_to_nothing_is_read_in_pieces() -> None:
    empty_blocks = compress_gzip(b"")[:10] + b"\0\0\0\xff\xff" * (LIMIT // 5)
    pauses = 0

    def count() -> None:
        nonlocal pauses
        for _ in decode_body(empty_blocks, "gzip", LIMIT, lambda _: None):
            pauses += 1

    with pytest.raises(RequestError, match="it ends early"):
        count()
    assert pauses >= LIMIT // content_coding.PIECE_BYTES


@BY_CODING
def test_every_piece_is_reserved_before_the_next_one_is_made(coding: bytes) -> None:
    budget = BodyBudget(LIMIT)
    content = COMPRESSORS[coding](bytes(100 * LIMIT))
    tracemalloc.start()
    with pytest.raises(RequestError) as refused:
        decode(content, coding, limit_bytes=1000 * LIMIT, reserve=budget.reserve)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "1"})
    assert budget.held_bytes <= LIMIT
    assert most_bytes < 3 * LIMIT


def test_window_of_zstd_is_bounded_and_its_memory_is_reserved() -> None:
    def compress(window_log: int) -> bytes:
        compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: window_log})
        return compressor.compress(b"a") + compressor.compress(bytes(2 * WINDOW_BYTES)) + compressor.flush()

    reserved: list[int] = []
    size = 2 * WINDOW_BYTES + 1
    assert len(decode(compress(23), b"zstd", limit_bytes=size, reserve=reserved.append)[0]) == size
    assert sum(reserved) == size + WINDOW_BYTES
    with pytest.raises(RequestError, match="Frame requires too much memory for decoding"):
        decode(compress(24), b"zstd", limit_bytes=size)


# Through the proxy


def encoded(coding: bytes) -> dict[str, str]:
    return AUTHORIZED | {"Content-Encoding": coding.decode(), "Content-Type": "application/json"}


@BY_CODING
@pytest.mark.parametrize("padding", [0, 2 * SHORT_BODY_BYTES])
async def test_engine_gets_the_body_decoded(http: aiohttp.ClientSession, coding: bytes, padding: int) -> None:
    body = json.dumps(CHAT | {"padding": "x" * padding}).encode()
    async with recording_engine() as (engine, backend), proxy_in_process(backend) as (listeners_, url):
        data = COMPRESSORS[coding](body)
        async with http.post(f"{url}/v1/chat/completions", data=data, headers=encoded(coding)) as response:
            assert response.status == 200
        assert not listeners_._shared.body_budget.held_bytes
    (request,) = engine.requests
    assert (json.loads(request.body), engine.faults) == (json.loads(body), [])
    assert not request.values(b"content-encoding")
    assert request.values(b"content-length") == [b"%d" % len(request.body)]


@BY_CODING
async def test_service_is_found_by_the_model_of_a_compressed_body(
    proxy: ProxyProcess, http: aiohttp.ClientSession, coding: bytes
) -> None:
    async def echo(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"asked": await request.json()})

    async with fake_engine(echo) as a, fake_engine(echo, "b") as b:
        named = structs.replace(b, model="of the engine")
        services = (make_service(a, name="x/chat"), make_service(named, name="x/mail"))
        state = await proxy.client.configure(ProxyConfig(services, RouterListener("127.0.0.1", 0)))
        assert state.router
        url = f"http://127.0.0.1:{state.router.port}/v1/chat/completions"
        data = COMPRESSORS[coding](json.dumps(CHAT | {"model": "mail"}).encode())
        async with http.post(url, data=data, headers=encoded(coding)) as response:
            assert (await response.json())["asked"]["model"] == "of the engine"


@pytest.mark.parametrize(
    ("coding", "data", "status", "code"),
    [
        (b"br", b"\x8b\x00\x80{}\x03", 415, "unsupported_encoding"),
        (b"deflate", zlib.compress(BODY), 415, "unsupported_encoding"),
        (b"gzip, gzip", compress_gzip(compress_gzip(BODY)), 415, "unsupported_encoding"),
        (b"gzip", BODY, 400, "bad_request"),
        (b"gzip", b"", 400, "bad_request"),
        (b"gzip", compress_gzip(BODY)[:-4], 400, "bad_request"),
        (b"zstd", compress_gzip(BODY), 400, "bad_request"),
        (b"gzip", compress_gzip(b"no JSON"), 400, "bad_request"),
        (b"zstd", zstd.compress(b"[]" * SHORT_BODY_BYTES), 400, "bad_request"),
        (b"gzip", compress_gzip(bytes(BODY_LIMIT_BYTES + 1)), 413, "request_too_large"),
        (b"zstd", zstd.compress(bytes(BODY_LIMIT_BYTES + 1)), 413, "request_too_large"),
    ],
)
async def test_refused_body_reaches_no_engine_and_holds_no_memory(
    http: aiohttp.ClientSession, coding: bytes, data: bytes, status: int, code: str
) -> None:
    never = GatedEngine()
    async with fake_engine(never) as backend, proxy_in_process(backend) as (listeners_, url):
        async with http.post(f"{url}/v1/completions", data=data, headers=encoded(coding)) as response:
            assert (response.status, error_code(await response.json())) == (status, code)
        assert not listeners_._shared.body_budget.held_bytes
        (state,) = listeners_.service_states()
        assert (state.stats.requests, state.stats.errors) == (0, 0)
    assert not never.arrived.is_set()


async def test_decoded_bodies_share_the_budget_of_all_bodies(
    monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession
) -> None:
    monkeypatch.setattr(listeners, "BodyBudget", lambda: BodyBudget(LIMIT))
    async with recording_engine() as (_, backend), proxy_in_process(backend) as (listeners_, url):

        async def ask(size_bytes: int) -> int:
            data = compress_gzip(json.dumps(CHAT | {"padding": "x" * size_bytes}).encode())
            async with http.post(f"{url}/v1/completions", data=data, headers=encoded(b"gzip")) as response:
                return response.status

        assert [await ask(size) for size in (LIMIT, LIMIT // 4, 2 * LIMIT, 100)] == [503, 200, 503, 200]
        assert not listeners_._shared.body_budget.held_bytes


async def test_other_requests_are_answered_while_bombs_are_decoded(http: aiohttp.ClientSession) -> None:
    bomb = compress_gzip(bytes(BODY_LIMIT_BYTES + 1))
    began = asyncio.Event()
    decoding = answered_meanwhile = 0
    async with recording_engine() as (_, backend), proxy_in_process(backend) as (_, url):

        async def drop() -> None:
            nonlocal decoding
            decoding += 1
            began.set()
            async with http.post(f"{url}/v1/completions", data=bomb, headers=encoded(b"gzip")) as response:
                assert response.status == 413
            decoding -= 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(drop())
            await began.wait()
            while decoding:
                async with http.post(f"{url}/v1/completions", data=BODY, headers=encoded(b"identity")) as response:
                    assert response.status == 200
                answered_meanwhile += bool(decoding)
    assert answered_meanwhile > 10


async def test_client_that_hangs_up_while_its_body_is_decoded_holds_no_memory(http: aiohttp.ClientSession) -> None:
    async with recording_engine() as (engine, backend), proxy_in_process(backend) as (listeners_, url):
        turns = listeners_._shared.scan_turns
        await turns.acquire()  # the decoding cannot begin
        task = asyncio.create_task(post(http, url, compress_gzip(BODY)))
        await eventually(lambda: listeners_._shared.body_budget.held_bytes)
        task.cancel()
        await eventually(lambda: not listeners_._shared.body_budget.held_bytes)
        turns.release()
        assert await post(http, url, compress_gzip(BODY)) == 200
    assert len(engine.requests) == 1


async def post(http: aiohttp.ClientSession, url: str, data: bytes) -> int:
    async with http.post(f"{url}/v1/completions", data=data, headers=encoded(b"gzip")) as response:
        return response.status
