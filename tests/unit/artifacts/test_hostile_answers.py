"""Answers that would take memory, time or secrets: every one ends in a plain error, soon, and quotes no byte."""

import asyncio
import dataclasses
import functools
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from artifacts.errors import ArtifactError
from artifacts.inspect import inspect
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from tests.support.file_server import ALLOWED_NETWORKS
from tests.unit.artifacts.fetch_call import FetchCall
from tests.unit.artifacts.stored_weights import HURRIED

SECRET = b"s3cret-of-another-server"
ONCE = dataclasses.replace(HURRIED, attempts=1, connect_seconds=0.5, silence_seconds=0.5)
MOST_BYTES = 64 << 20
"""Far below the 512 MiB of a Job."""


def send_many_headers() -> Iterable[bytes]:
    yield b"HTTP/1.1 206 Partial Content\r\n"
    while True:
        yield b"".join(b"X-%d: %s\r\n" % (number, b"a" * 4000) for number in range(50))


def send_a_folded_header() -> Iterable[bytes]:
    yield b"HTTP/1.1 206 Partial Content\r\nX: " + SECRET + b"\r\n"
    while True:
        yield b" " + SECRET + b"a" * 60_000


def send_a_long_header() -> Iterable[bytes]:
    yield b"HTTP/1.1 200 OK\r\nX: " + SECRET
    while True:
        yield b"a" * 65_536


def send_a_long_status_line() -> Iterable[bytes]:
    yield b"HTTP/1.1 200 " + SECRET
    while True:
        yield b"a" * 65_536


def send_another_protocol() -> Iterable[bytes]:
    yield b"-ERR " + SECRET + b"\r\n"


def send_interim_answers_for_ever() -> Iterable[bytes]:
    while True:
        yield b"HTTP/1.1 100 Continue\r\n\r\n" * 100


def send_trailers_for_ever() -> Iterable[bytes]:
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    while True:
        yield b"X: a\r\n" * 4000


@functools.cache
def send_a_bomb() -> Iterable[bytes]:
    packer = zlib.compressobj(wbits=31)
    body = packer.compress(b"GGUF")
    for _ in range(256):
        body += packer.compress(bytes(1 << 20))
    body += packer.flush()
    # Packed here and not while the client waits: on a busy machine it takes many seconds.
    return [b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body]


HOSTILE = (
    *(send_many_headers, send_a_folded_header, send_a_long_header, send_a_long_status_line, send_another_protocol),
    *(send_interim_answers_for_ever, send_trailers_for_ever, send_a_bomb),
)


@asynccontextmanager
async def serve(blocks: Iterable[bytes]) -> AsyncIterator[str]:
    """Answer every request with the same bytes, until the client hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for block in blocks:
                writer.write(block)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/weights.gguf"


async def _read(verb: str, url: str, folder: Path) -> None:
    access = SourceAccess(patience=ONCE, allowed_networks=ALLOWED_NETWORKS)
    async with asyncio.timeout(60):
        if verb == "inspect":
            await inspect(parse(url), access)
        else:
            await FetchCall(folder, "https://hub.example")(url, patience=ONCE)


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("verb", ["inspect", "fetch"])
async def test_hostile_answer_is_a_plain_error_in_bounded_time_and_memory(
    hostile: Callable[[], Iterable[bytes]], verb: str, tmp_path: Path
) -> None:
    tracemalloc.start()
    async with serve(hostile()) as url:
        with pytest.raises(ArtifactError) as caught:
            await _read(verb, url, tmp_path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.reason in {"SourceUnreachable", "SourceRefused"}
    assert SECRET.decode() not in caught.value.message
    assert len(caught.value.message) < 300
    assert peak_bytes < MOST_BYTES
    left = await asyncio.to_thread(lambda: [path.name for path in tmp_path.iterdir()])
    assert "weights.gguf" not in left
