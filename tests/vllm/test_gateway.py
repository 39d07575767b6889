"""The real vLLM behind the gateway: what clients of OpenAI's and Anthropic's libraries get of it."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.support.eventually import eventually
from tests.support.tiny_models.tiny_gguf import SENTENCE
from tests.unit.gateway.cluster.running_gateway import SECRET, RunningGateway, gateway_in_process
from tests.vllm.real_server import CONTEXT, KEY, RealServer, serve

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
SURE: Any = {"temperature": 0}  # Anthropic's library has no argument for it
CHAT: dict[str, Any] = {"model": "chat", "messages": MESSAGES, "max_tokens": 40, "extra_body": SURE}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with serve(tmp_path_factory.mktemp("vllm"), "chat") as running:
        yield running


class Clients(NamedTuple):
    """A gateway in front of the server, and clients of it that repeat nothing by themselves."""

    gateway: RunningGateway
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


@pytest.fixture
async def clients(server: RealServer) -> AsyncIterator[Clients]:
    async with (
        gateway_in_process() as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=SECRET, max_retries=0) as of_openai,
        anthropic.AsyncAnthropic(base_url=gateway.url, auth_token=SECRET, max_retries=0) as of_anthropic,
    ):
        gateway.cluster.put_key(tokensPerMinute=1_000_000)
        gateway.cluster.serve("team-a", "chat", server.url, token=KEY)
        yield Clients(gateway, of_openai, of_anthropic)


async def test_chat_and_responses_are_answered(clients: Clients) -> None:
    answer = await clients.openai.chat.completions.create(**CHAT)
    assert (answer.model, answer.choices[0].message.content) == ("chat", SENTENCE)
    response = await clients.openai.responses.create(model="chat", input="Hi", temperature=0, max_output_tokens=40)
    assert (response.model, response.output_text) == ("chat", SENTENCE)


async def test_counts_of_tokens_that_the_client_did_not_ask_for_are_hidden(clients: Clients) -> None:
    """The gateway asks vLLM for them in either case: they settle the client's limit."""
    chunks = [chunk async for chunk in await clients.openai.chat.completions.create(stream=True, **CHAT)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SENTENCE
    assert not any(chunk.usage for chunk in chunks)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    last = [chunk async for chunk in await clients.openai.chat.completions.create(**options, **CHAT)][-1]
    assert last.usage
    assert last.usage.completion_tokens > 0


async def test_messages_are_answered_and_counted(clients: Clients) -> None:
    message = await clients.anthropic.messages.create(**CHAT)
    assert (message.model, [block.text for block in message.content if block.type == "text"]) == ("chat", [SENTENCE])
    async with clients.anthropic.messages.stream(**CHAT) as stream:
        assert "".join([piece async for piece in stream.text_stream]) == SENTENCE
    counted = await clients.anthropic.messages.count_tokens(model="chat", messages=MESSAGES)
    assert counted.input_tokens == message.usage.input_tokens


async def test_request_above_the_context_length_is_the_clients_mistake(clients: Clients) -> None:
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)):
        await clients.openai.chat.completions.create(**CHAT | {"max_tokens": CONTEXT + 1})


async def test_client_that_leaves_ends_the_work_of_the_engine(clients: Clients, server: RealServer) -> None:
    endless = CHAT | {"max_tokens": CONTEXT - 100, "extra_body": SURE | {"ignore_eos": True}}
    async with await clients.openai.chat.completions.create(stream=True, **endless) as stream:
        await anext(aiter(stream))
        assert running_requests(server) == 1
    await eventually(lambda: running_requests(server) == 0, 1.0)


def running_requests(server: RealServer) -> int:
    """Return the requests that vLLM works on."""
    (line,) = [
        line
        for line in server.ask("GET", "/metrics", key=None).text.splitlines()
        if line.startswith("vllm:num_requests_running{")
    ]
    return int(float(line.rpartition(" ")[2]))
