"""The libraries of OpenAI and Anthropic through the proxy, with real engines: what a program of a user sees."""

import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anthropic
import httpx
import openai
import pytest
from backports import zstd
from msgspec import structs

from crds.serving import ServingOptions
from gateway.proxy.config import Backend
from runtimes.serving import CompanionFile, Serving
from tests.support import llama_server
from tests.support.engine_process import start_engine
from tests.support.tiny_models import tiny_companions, tiny_gguf, tiny_mlx
from tests.unit.gateway.proxy.running_proxy import CHAT, TOKEN, proxy_in_process, raw_engine

SAYS = 'Hello <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
# llama.cpp learns from it how the model calls a function and begins to think.
TEMPLATE = """{% if tools %}<|system|><tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{% if message.tool_calls %}{% for call in message.tool_calls %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}}
{{- '</tool_call>' }}{% endfor %}{% else %}{% if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}{{ message.content }}{% endif %}</s>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
WHOLE_RESPONSE = ["reasoning", "message", "function_call"]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/messages": CHAT | {"max_tokens": 100},
    "/v1/responses": {"model": "tiny", "input": "hi"},
}
BROKEN = "service ns/tiny: its engine broke off the response, which is not complete"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """llama.cpp with a model that thinks, answers, and calls a function."""
    model = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_gguf.write(model, text=f"<think>so it is</think>{SAYS}")
    options = ServingOptions(context_length=2048, chat_template=TEMPLATE, extra_args=["-t", "1"])
    with llama_server.serve_as(Serving("tiny", str(model), options)) as server:
        yield Backend("engine", server.url)


class Libraries(NamedTuple):
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    async def read(self, path: str) -> None:
        """Read a stream to its end, as a program does that looks for text only."""
        asked = PATHS[path]
        match path:
            case "/v1/chat/completions":
                stream = await self.openai.chat.completions.create(stream=True, **asked)
            case "/v1/completions":
                stream = await self.openai.completions.create(stream=True, **asked)
            case "/v1/messages":
                stream = await self.anthropic.messages.create(stream=True, **asked)
            case _:
                stream = await self.openai.responses.create(stream=True, **asked)
        async for _ in stream:
            pass


@asynccontextmanager
async def serve(backend: Backend) -> AsyncIterator[Libraries]:
    """Run a proxy in front of `backend`, and yield the libraries that ask it."""
    async with (
        proxy_in_process(backend) as (_, url),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as of_openai,
        anthropic.AsyncAnthropic(base_url=url, auth_token=TOKEN, max_retries=0) as of_anthropic,
    ):
        yield Libraries(of_openai, of_anthropic)


async def test_openais_helper_reads_the_responses_of_llama_cpp(engine: Backend) -> None:
    async with (
        serve(engine) as libraries,
        libraries.openai.responses.stream(model="tiny", input="hi", tools=[WEATHER]) as stream,
    ):
        events = [event async for event in stream]
        response = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in response.output] == WHOLE_RESPONSE
    texts = [event for event in events if event.type == "response.output_text.delta"]
    assert {(event.output_index, event.content_index) for event in texts} == {(1, 0)}
    assert texts[-1].snapshot == response.output_text == "Hello "
    arguments = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert arguments[-1].snapshot == response.output[2].arguments == '{"city": "Paris"}'


async def test_tokens_of_a_prompt_are_counted(engine: Backend) -> None:
    async with serve(engine) as libraries:
        message = await libraries.anthropic.messages.create(**PATHS["/v1/messages"])
        counted = (await libraries.anthropic.beta.messages.count_tokens(**CHAT)).input_tokens
        assert counted == message.usage.input_tokens + message.usage.cache_read_input_tokens
        response = await libraries.openai.responses.create(**PATHS["/v1/responses"])
        also = await libraries.openai.responses.input_tokens.count(**PATHS["/v1/responses"])
        assert also.input_tokens == response.usage.input_tokens == counted


class CompressingTransport(httpx.AsyncHTTPTransport):
    """A transport that compresses each request body with gzip."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = gzip.compress(await request.aread())
        headers = {**request.headers, "content-encoding": "gzip", "content-length": str(len(content))}
        return await super().handle_async_request(
            httpx.Request(request.method, request.url, headers=headers, content=content)
        )


async def test_openais_library_sends_its_requests_compressed(engine: Backend) -> None:
    async with (
        proxy_in_process(engine) as (_, url),
        httpx.AsyncClient(transport=CompressingTransport()) as http_client,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, http_client=http_client) as client,
    ):
        for text in ("hi", "hi " * 300):
            stream = await client.responses.create(model="tiny", input=text, stream=True)
            assert [event.type async for event in stream][-1] == "response.completed"


async def test_request_as_codex_sends_it_is_served_after_its_attempt_for_a_websocket(engine: Backend) -> None:
    """Codex tries a WebSocket on the same path first, and then sends a stream of zstd, whose frame has no length."""
    compressor = zstd.ZstdCompressor(level=3)
    asked = PATHS["/v1/responses"] | {"stream": True, "store": False, "tools": [WEATHER]}
    content = compressor.compress(json.dumps(asked).encode()) + compressor.flush()
    async with (
        proxy_in_process(engine) as (_, url),
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
    ):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"{url}/v1/responses")
        assert refused.value.status == 426
        headers = {"Content-Encoding": "zstd", "Content-Type": "application/json", "Accept": "text/event-stream"}
        async with session.post(f"{url}/v1/responses", data=content, headers=headers) as response:
            assert response.status == 200
            assert b"event: response.completed\n" in await response.read()


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """llama.cpp with a model that hears, under another name than the service."""
    folder = tmp_path_factory.mktemp("model")
    tiny_gguf.write(folder / "tiny.gguf")
    tiny_companions.write_hearing_projector(folder / "ears.gguf")
    options = ServingOptions(context_length=2048, extra_args=["-t", "1"])
    ears = CompanionFile("projector", str(folder / "ears.gguf"))
    with llama_server.serve_as(Serving("weights", str(folder / "tiny.gguf"), options, [ears])) as server:
        yield Backend("engine", server.url, model="weights", engine="llama.cpp", mode="chat")


async def test_sound_is_transcribed(hearing: Backend) -> None:
    file = ("a tone.wav", tiny_companions.wav())
    async with serve(hearing) as libraries:
        whole = await libraries.openai.audio.transcriptions.create(model="tiny", file=file, language="en")
        assert whole.text.startswith("Hello from a tiny model")
        stream = await libraries.openai.audio.transcriptions.create(model="tiny", file=file, stream=True)
        events = [event async for event in stream]
        assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == whole.text
        assert events[-1].type == "transcript.text.done"


async def test_wrong_forms_are_mistakes_of_the_client(hearing: Backend) -> None:
    sound = ("a.wav", tiny_companions.wav())
    async with serve(hearing) as libraries:
        create = libraries.openai.audio.transcriptions.create
        for file, more, message in (
            (("a.wav", b"no sound"), {}, "Failed to load image or audio file"),
            (sound, {"response_format": "srt"}, "Only 'json' response_format is supported"),
            (sound, {"extra_body": {"max_tokens": "9" * 30}}, "stoul"),
            (sound, {"temperature": 1e200}, "stof"),
            (sound, {"extra_body": {"grammar": 'root ::= "a"'}}, "grammar: a form takes no schema or grammar"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                await create(model="tiny", file=file, **more)


async def test_model_that_does_not_hear_transcribes_nothing(engine: Backend) -> None:
    async with serve(structs.replace(engine, engine="llama.cpp", mode="chat")) as libraries:
        message = r"does not support audio input.*: use /v1/chat/completions, "
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            await libraries.openai.audio.transcriptions.create(model="tiny", file=("a.wav", tiny_companions.wav()))
    assert refused.value.code == "unsupported_path"


@asynccontextmanager
async def engine_that_ends_early(sent: Callable[[], bytes]) -> AsyncIterator[Backend]:
    """An engine whose streams have no length, as mlx-lm's: each of them ends in an orderly way after these bytes."""

    async def talk(reader: Any, writer: Any) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + sent())
        writer.close()

    async with raw_engine(talk) as backend:
        yield backend


@pytest.mark.parametrize("path", PATHS)
async def test_library_raises_wherever_a_stream_ends_before_its_mark(engine: Backend, path: str) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(engine.url + path, json=PATHS[path] | {"stream": True}) as response,
    ):
        whole = await response.read()
    cut = 0
    async with engine_that_ends_early(lambda: whole[:cut]) as backend, serve(backend) as libraries:
        # The last events are the mark, and one that says why the model has stopped.
        last = whole.index(b"response.completed") if path == "/v1/responses" else whole.rindex(b'_reason":null')
        ends = [index for index in range(last) if whole[index : index + 1] == b"\n"]
        for cut in (*ends[::4], *range(0, last, last // 10)):  # noqa: B007 - the engine reads it
            with pytest.raises((openai.APIError, anthropic.APIStatusError), match=BROKEN):
                await libraries.read(path)
        cut = len(whole)
        await libraries.read(path)


async def test_openai_raises_when_mlx_lm_is_killed_within_a_stream(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    tiny_mlx.write(model, loop=True, n_ctx=1 << 16)
    async with start_engine(tmp_path, model, runtime="mlx-lm") as engine:
        assert (await engine.ready()).ok
        async with serve(Backend("mlx", engine.url, model=engine.model, api_key=engine.token)) as libraries:
            stream = await libraries.openai.chat.completions.create(**CHAT, stream=True, max_tokens=1 << 15)
            assert (await anext(stream)).choices
            await engine.end()
            with pytest.raises(openai.APIError, match=BROKEN):
                async for _ in stream:
                    pass
