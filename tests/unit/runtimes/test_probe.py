"""Readiness is a generated token: the real server is ready, and a server that only answers is not."""

import contextlib
import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from crds.serving import Mode
from runtimes.probe import ProbeResult, generate_token
from tests.support import llama_server
from tests.support.stub_server import serve_stub
from tests.support.tiny_models import tiny_gguf


def answering(response: web.Response) -> AbstractAsyncContextManager[str]:
    async def answer(_: web.BaseRequest) -> web.Response:
        return response

    return serve_stub(answer)


async def probe(
    url: str,
    *,
    token: str | None = None,
    timeout_seconds: float = 10,
    mode: Mode = "chat",
    engine: str | None = None,
) -> ProbeResult:
    async with aiohttp.ClientSession() as session:
        return await generate_token(
            session, url, model="tiny", token=token, timeout_seconds=timeout_seconds, mode=mode, engine=engine
        )


async def test_a_real_server_is_ready_and_its_token_is_checked(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "m.gguf")
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with llama_server.serve(tmp_path / "m.gguf", "--api-key-file", str(keys)) as server:
        assert await probe(server.url, token="secret") == ProbeResult(
            ok=True, reason="Generated", message=f"{server.url} generated a token"
        )
        refused = await probe(server.url, token="wrong")
        assert (refused.ok, refused.reason) == (False, "Unauthorized")
        assert refused.message.endswith("answered 401: Invalid API Key")


@pytest.mark.parametrize(
    ("status", "body", "reason", "quote"),
    [
        (
            503,
            '{"error":{"message":"Loading model","type":"unavailable_error","code":503}}',
            "Loading",
            "Loading model",
        ),
        (404, '{"error":{"message":"no such model"}}', "NotFound", "no such model"),
        (501, '{"error":{"message":"no embeddings"}}', "Broken", "no embeddings"),
        (500, "worker died", "BadAnswer", "answered 500: worker died"),
        (200, '{"status":"ok"}', "BadAnswer", "without a token"),
        (200, '{"choices":[]}', "BadAnswer", "without a token"),
        (
            200,
            '{"choices":[{"message":{"content":""}}],"usage":{"completion_tokens":0}}',
            "BadAnswer",
            "without a token",
        ),
        (200, "<html>", "BadAnswer", "<html>"),
        (599, "", "BadAnswer", "answered 599: an empty body"),
    ],
)
async def test_an_answer_without_a_token_is_not_ready(status: int, body: str, reason: str, quote: str) -> None:
    async with answering(web.Response(status=status, text=body)) as url:
        result = await probe(url)
    assert (result.ok, result.reason) == (False, reason)
    assert quote in result.message


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_that_is_not_utf_8_is_not_ready(status: int) -> None:
    body = b'{"error":"\xff","choices":[{"message":{"content":"\xff"}}]}'
    async with answering(web.Response(status=status, body=body)) as url:
        assert (await probe(url)).reason == "BadAnswer"


@pytest.mark.parametrize(
    "body",
    [
        '{"choices":[{"message":{"content":"Hello"}}]}',
        '{"choices":[{"message":{"content":""}}],"usage":{"completion_tokens":1}}',
        '{"choices":[{"message":{"content":null}}],"usage":{"completion_tokens":1}}',
    ],
)
async def test_text_or_a_counted_token_is_ready(body: str) -> None:
    async with answering(web.Response(text=body)) as url:
        assert (await probe(url)).ok


@pytest.mark.parametrize(
    ("mode", "body", "reason"),
    [
        ("embeddings", '{"data":[{"embedding":[0.25,-1]}]}', "Embedded"),
        ("embeddings", '{"data":[{"embedding":[]}]}', "BadAnswer"),
        ("embeddings", '{"data":[{"embedding":[0,0]}]}', "BadAnswer"),
        ("embeddings", '{"data":[{"embedding":[null]}]}', "BadAnswer"),
        ("embeddings", '{"data":[]}', "BadAnswer"),
        ("embeddings", '{"choices":[{"message":{"content":"Hello"}}]}', "BadAnswer"),
        ("rerank", '{"results":[{"index":0,"relevance_score":-3.5}]}', "Ranked"),
        ("rerank", '{"results":[{"index":0}]}', "BadAnswer"),
        ("rerank", '{"results":[]}', "BadAnswer"),
    ],
)
async def test_each_mode_has_a_different_answer(mode: Mode, body: str, reason: str) -> None:
    async with answering(web.Response(text=body)) as url:
        result = await probe(url, mode=mode)
    assert (result.ok, result.reason) == (reason != "BadAnswer", reason)


async def test_engine_that_reports_its_death_is_broken() -> None:
    # mlx_lm.server 0.32.2 gives this answer for ever after it could not load its model.
    results = []
    for engine in ("mlx-lm", None):
        async with answering(web.Response(status=404, text='{"error": "generation thread died"}')) as url:
            results.append(await probe(url, engine=engine))
    result, of_another = results
    assert of_another.reason == "NotFound"
    assert (result.ok, result.reason) == (False, "Broken")
    assert result.message.endswith("answered 404: generation thread died")


async def test_a_long_answer_is_quoted_in_part() -> None:
    async with answering(web.Response(status=500, text="x" * 10_000)) as url:
        assert len((await probe(url)).message) < 500


async def test_an_endless_answer_is_read_in_part() -> None:
    async def pour(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"x" * 65536)
        return response

    async with serve_stub(pour) as url:
        assert (await probe(url)).reason == "BadAnswer"


async def test_an_answer_that_is_broken_off_is_no_silence() -> None:
    async def break_off(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"choices":[')
        assert request.transport
        request.transport.close()
        return response

    async with serve_stub(break_off) as url:
        result = await probe(url)
    assert (result.ok, result.reason) == (False, "BadAnswer")
    assert result.message == f"{url} broke off its answer"


async def test_a_redirect_is_not_followed() -> None:
    async with answering(web.Response(text="of the internal network")) as internal:
        redirect = web.Response(status=307, headers={"Location": f"{internal}/secret"})
        async with answering(redirect) as url:
            result = await probe(url)
    assert (result.ok, result.reason) == (False, "BadAnswer")
    assert "internal network" not in result.message


async def test_refused_connection_is_unreachable(refused_port: int) -> None:
    result = await probe(f"http://127.0.0.1:{refused_port}")
    assert (result.ok, result.reason) == (False, "Unreachable")


async def test_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel accepts, and no process answers
        result = await probe(f"http://127.0.0.1:{mute.getsockname()[1]}", timeout_seconds=0.2)
    assert (result.ok, result.reason) == (False, "TimedOut")
