"""The libraries of OpenAI and Anthropic through the gateway, with real engines: what programs see when things fail."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anthropic
import gguf
import openai
import pytest

from cli.endpoint.client_configuration import EndpointFacts, render_configuration
from crds.serving import ServingOptions
from gateway.proxy import keep_alive
from runtimes.serving import Serving
from tests.hosts.test_client_libraries import SAYS, TEMPLATE, WEATHER, WHOLE_RESPONSE
from tests.support import llama_server
from tests.support.faulty_relay import Fault, FaultyRelay
from tests.support.tiny_models import tiny_gguf
from tests.unit.gateway.cluster.running_gateway import AUTHORIZED, SECRET, RunningGateway, gateway_in_process

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "chat", "messages": MESSAGES}
TOOL: Any = {"name": "weather", "input_schema": WEATHER["parameters"]}
BROKEN = "its engine broke off the response"
CUT_AFTER_EVENTS = 3
RETRY: dict[str, str] = {"Retry-After": "1"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The URLs of real engines by the names of their services: `chat` thinks, answers, and calls a function."""
    folder = tmp_path_factory.mktemp("models")
    tiny_gguf.write(folder / "chat", text=f"<think>so it is</think>{SAYS}")
    tiny_gguf.write(folder / "embed", pooling=gguf.PoolingType.MEAN)
    tiny_gguf.write(folder / "rank", pooling=gguf.PoolingType.RANK, scores=True)
    one_thread = ["-t", "1"]
    options = {
        "chat": ServingOptions(context_length=2048, chat_template=TEMPLATE, extra_args=one_thread),
        "embed": ServingOptions(context_length=2048, mode="embeddings", extra_args=one_thread),
        "rank": ServingOptions(context_length=2048, mode="rerank", extra_args=one_thread),
    }
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(llama_server.serve_as(Serving(name, str(folder / name), stated))).url
            for name, stated in options.items()
        }


class Clients(NamedTuple):
    """A gateway in front of the engines, and clients of it that repeat nothing by themselves."""

    gateway: RunningGateway
    relay: FaultyRelay
    """Stands before the engine of `chat`."""
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    async def read_stream(self, api: str) -> str:
        """Return the text of a stream, as a program puts it together that looks for text only."""
        text = ""
        match api:
            case "chat":
                async for chunk in await self.openai.chat.completions.create(stream=True, **CHAT):
                    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            case "responses":
                async with self.openai.responses.stream(model="chat", input="hi") as stream:
                    async for event in stream:
                        text += event.delta if event.type == "response.output_text.delta" else ""
            case "messages":
                async with self.anthropic.messages.stream(max_tokens=100, **CHAT) as message_stream:
                    async for piece in message_stream.text_stream:
                        text += piece
        return text


APIS = ("chat", "responses", "messages")


@pytest.fixture
async def clients(engines: dict[str, str]) -> AsyncIterator[Clients]:
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(gateway_in_process())
        relay = await stack.enter_async_context(FaultyRelay(engines["chat"]).serve())
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "chat", relay.url)
        for name in ("embed", "rank"):
            gateway.cluster.serve("team-a", name, engines[name])
        yield Clients(
            gateway,
            relay,
            await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=SECRET, max_retries=0)
            ),
            await stack.enter_async_context(
                anthropic.AsyncAnthropic(base_url=gateway.url, auth_token=SECRET, max_retries=0)
            ),
        )


async def test_openais_library_uses_each_path(clients: Clients) -> None:
    client = clients.openai
    assert [model.id for model in (await client.models.list()).data] == ["chat", "embed", "rank"]
    assert (await client.models.retrieve("chat")).id == "chat"

    answer = await client.chat.completions.create(**CHAT, tools=[{"type": "function", "function": WEATHER}])
    (choice,) = answer.choices
    assert (answer.model, choice.finish_reason, choice.message.content) == ("chat", "tool_calls", "Hello ")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert answer.usage
    assert answer.usage.completion_tokens > 0

    async with client.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == SAYS
    assert final.usage
    assert final.usage.completion_tokens > 0

    async with client.responses.stream(model="chat", input="hi", tools=[WEATHER]) as responses:
        response = await responses.get_final_response()
    assert [item.type for item in response.output] == WHOLE_RESPONSE

    (embedding,) = (await client.embeddings.create(model="embed", input="hi")).data
    assert len(embedding.embedding) == 64  # the library asks for base64, and decodes it


async def test_documents_are_ranked(clients: Clients) -> None:
    asked = {"model": "rank", "query": "Hi", "documents": ["Hi", "Ho"]}
    async with (
        aiohttp.ClientSession(headers=AUTHORIZED) as http,
        http.post(f"{clients.gateway.url}/v1/rerank", json=asked) as response,
    ):
        answer = await response.json()
    assert sorted(result["index"] for result in answer["results"]) == [0, 1]


async def test_anthropics_library_uses_each_path(clients: Clients) -> None:
    messages = clients.anthropic.messages
    assert [model.id async for model in clients.anthropic.models.list()] == ["chat", "embed", "rank"]
    message = await messages.create(**CHAT, max_tokens=100, tools=[TOOL])
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.stop_reason == "tool_use"
    async with messages.stream(**CHAT, max_tokens=100, tools=[TOOL]) as stream:
        streamed = await stream.get_final_message()
    assert streamed.content[-1].type == "tool_use"
    assert streamed.content[-1].input == {"city": "Paris"}
    counted = await messages.count_tokens(**CHAT)
    plain = await messages.create(**CHAT, max_tokens=100)
    assert counted.input_tokens == plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("api", APIS)
async def test_stream_that_is_cut_raises_and_never_ends_as_a_whole_one(clients: Clients, api: str) -> None:
    whole = await clients.read_stream(api)
    assert whole == SAYS
    clients.relay.lasting_fault = Fault(cut_after_events=CUT_AFTER_EVENTS)
    clients.relay.paths()
    with pytest.raises((openai.APIError, anthropic.APIStatusError), match=BROKEN):
        await clients.read_stream(api)
    assert len(clients.relay.paths()) == 1


@pytest.mark.parametrize("api", APIS)
async def test_comments_before_the_first_token_do_not_disturb_a_stream(
    clients: Clients, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_COMMENT_SECONDS", "COMMENT_SECONDS"):
        monkeypatch.setattr(keep_alive, name, 0.1)
    clients.relay.faults = [Fault(delay_seconds=2)]
    assert await clients.read_stream(api) == SAYS

    # An error that comes after a comment has no status of its own any more.
    clients.relay.faults = [Fault(delay_seconds=1, cut_after_events=CUT_AFTER_EVENTS)]
    with pytest.raises((openai.APIError, anthropic.APIStatusError), match=BROKEN):
        await clients.read_stream(api)


async def ask_chat(clients: Clients, **changes: Any) -> None:
    await clients.openai.chat.completions.create(**(CHAT | changes))


async def ask_messages(clients: Clients, **changes: Any) -> None:
    await clients.anthropic.messages.create(max_tokens=100, **(CHAT | changes))


ASK: dict[str, tuple[Callable[..., Any], Any]] = {"openai": (ask_chat, openai), "anthropic": (ask_messages, anthropic)}


@pytest.mark.parametrize("library", ASK)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_raise_the_class_of_their_status(clients: Clients, library: str, *, stream: bool) -> None:
    ask, module = ASK[library]
    with pytest.raises(module.NotFoundError, match="the model 'other' is not served here"):
        await ask(clients, model="other", stream=stream)
    clients.relay.lasting_fault = Fault(429, RETRY)
    with pytest.raises(module.RateLimitError) as limited:
        await ask(clients, stream=stream)
    assert limited.value.response.headers["retry-after"] == "1"
    clients.relay.lasting_fault = Fault(503, RETRY)
    with pytest.raises(module.InternalServerError) as overloaded:
        await ask(clients, stream=stream)
    assert (overloaded.value.status_code, overloaded.value.response.headers["retry-after"]) == (503, "1")
    clients.gateway.cluster.put_key(suspend=True)
    with pytest.raises(module.AuthenticationError, match="missing, wrong, suspended or expired"):
        await ask(clients, stream=stream)


@pytest.mark.parametrize("library", ASK)
@pytest.mark.parametrize("status", [429, 503])
async def test_library_waits_as_it_is_told_and_asks_again(clients: Clients, library: str, status: int) -> None:
    ask, _ = ASK[library]
    patient = clients._replace(
        openai=clients.openai.with_options(max_retries=2), anthropic=clients.anthropic.with_options(max_retries=2)
    )
    clients.relay.faults = [Fault(status, RETRY)]
    began = asyncio.get_running_loop().time()
    await ask(patient)
    assert asyncio.get_running_loop().time() - began >= 1
    assert len(clients.relay.paths()) == 2


@pytest.mark.parametrize("client", ["openai", "anthropic", "curl"])
@pytest.mark.parametrize("alias", ["", "/engines/llama.cpp"])
async def test_printed_configuration_asks(clients: Clients, client: str, alias: str) -> None:
    """As `pomona endpoint --for CLIENT` prints it, also with the base URL of a program for Docker Model Runner."""
    facts = EndpointFacts(clients.gateway.url + alias, SECRET, "chat", 2048)
    script = render_configuration(client, facts)
    process = await asyncio.create_subprocess_exec(
        *("sh", "-eu"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    said, _ = await process.communicate(script.encode())
    assert process.returncode == 0
    assert "Hello " in said.decode()
