"""Conversations over several replicas of a real llama.cpp: does each turn go to the replica that has its prompt cached?

All conversations share a long system prompt, as those of one agent do. Each replica is behind a relay that notes the
conversation of each request. `benchmarks.gateway` runs this with the others.
"""

import asyncio
import re
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from benchmarks.clients.http_load import TOKEN
from benchmarks.report import Figure
from benchmarks.servers.cluster_api import SERVICE, ClusterApi
from benchmarks.servers.gateways import GatewayServer, run_gateway
from crds.serving import ServingOptions
from runtimes.serving import Serving
from tests.support import llama_server
from tests.support.tiny_models import tiny_gguf

CONVERSATIONS: Final = 30
TURNS: Final = 6
REPLICAS: Final = 3
SLOTS: Final = 30
"""The slots of all replicas together, and of the one that is the floor."""
CONTEXT: Final = 8192
AT_ONCE: Final = 10
"""Conversations whose turns run at once."""
_SYSTEM: Final = "You are an agent that works in the folder of a project. Read a file before you change it. " * 12
_QUESTION: Final = "Please look at file number {} of conversation {} and say what it does, in a few words. "
_MARK: Final = re.compile(rb'"user":"conversation-(\d+)"')
_CHUNK_BYTES: Final = 1 << 16


class Relay:
    """Passes all bytes on to a replica, and notes the conversations whose requests come by.

    Args:
        number: the number of the replica.
        url: its URL.
        visits: gets the numbers of the replicas of each conversation, in the order of its turns.
    """

    def __init__(self, number: int, url: str, visits: dict[int, list[int]]) -> None:
        self._number = number
        self._port = urlsplit(url).port
        self._visits = visits
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        """Listen, and return the URL."""
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Refuse connections from now on, and break off all that are open."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._port)
            self._writers |= {writer, to_writer}
            await asyncio.gather(self._copy(reader, to_writer), self._copy(to_reader, writer))
            self._writers -= {writer, to_writer}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                if mark := _MARK.search(data):
                    self._visits[int(mark[1])].append(self._number)
                writer.write(data)
                await writer.drain()
        writer.close()


class ReplicaSet(NamedTuple):
    """Replicas behind a gateway, and the visits of each conversation."""

    gateway: GatewayServer
    relays: Sequence[Relay]
    visits: dict[int, list[int]]


@asynccontextmanager
async def run_replicas(model: Path, count: int) -> AsyncIterator[ReplicaSet]:
    """Run so many replicas, which have all slots together, and a gateway, until the context ends."""
    visits: dict[int, list[int]] = defaultdict(list)
    slots = SLOTS // count
    async with AsyncExitStack() as stack:
        options = ServingOptions(context_length=CONTEXT, parallel=slots, extra_args=["-t", "1"])
        servers = [
            stack.enter_context(llama_server.serve_as(Serving(SERVICE, str(model), options))) for _ in range(count)
        ]
        relays = [Relay(number, server.url, visits) for number, server in enumerate(servers)]
        api = ClusterApi()
        api.serve(*[await relay.start() for relay in relays], slots=slots)
        api.put_key()
        api.put_shards()
        api_url = await stack.enter_async_context(api.run())
        gateway = await stack.enter_async_context(run_gateway(model.parent, api_url))
        for relay in relays:
            stack.callback(relay.stop)
        yield ReplicaSet(gateway, relays, visits)


class Conversations:
    """Conversations with a model, each of which grows by a question and an answer with each turn."""

    def __init__(self, gateway: GatewayServer, session: aiohttp.ClientSession) -> None:
        self.cached_tokens = self.prompt_tokens = 0
        self._url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
        self._session = session
        self._running = asyncio.Semaphore(AT_ONCE)
        self._messages: list[list[dict[str, str]]] = [
            [{"role": "system", "content": _SYSTEM}] for _ in range(CONVERSATIONS)
        ]

    async def run_turns(self, count: int) -> None:
        """Run so many turns of each conversation."""
        await asyncio.gather(*(self._run(number, count) for number in range(CONVERSATIONS)))

    async def _run(self, number: int, count: int) -> None:
        messages = self._messages[number]
        for _ in range(count):
            messages.append({"role": "user", "content": 3 * _QUESTION.format(len(messages), number)})
            body = {"model": SERVICE, "user": f"conversation-{number}", "max_tokens": 8, "messages": messages}
            async with self._running, self._session.post(self._url, json=body) as response:
                answer: dict[str, Any] = await response.json()
                response.raise_for_status()
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            self.prompt_tokens += answer["usage"]["prompt_tokens"]
            self.cached_tokens += answer["timings"]["cache_n"]


async def measure_conversations() -> list[Figure]:
    """Run the conversations on one replica, and on several, of which the last one ends then."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "tiny.gguf"
        tiny_gguf.write(model, n_ctx=CONTEXT)
        async with aiohttp.ClientSession(headers=headers) as session:
            async with run_replicas(model, 1) as replicas:
                alone = Conversations(replicas.gateway, session)
                await alone.run_turns(TURNS)
            async with run_replicas(model, REPLICAS) as replicas:
                spread = Conversations(replicas.gateway, session)
                await spread.run_turns(TURNS)
                former = {number: visits[-1] for number, visits in replicas.visits.items()}
                stayed = count_stays(replicas.visits)
                sizes = [list(former.values()).count(number) for number in range(REPLICAS)]
                replicas.relays[-1].stop()
                replicas.visits.clear()
                await spread.run_turns(1)
                others = [number for number, replica in former.items() if replica != REPLICAS - 1]
                kept = sum(replicas.visits[number][-1] == former[number] for number in others)
    turns = CONVERSATIONS * (TURNS - 1)
    cached = [100 * conversations.cached_tokens / conversations.prompt_tokens for conversations in (spread, alone)]
    title = f"{CONVERSATIONS} conversations, {REPLICAS} replicas"
    return [
        Figure(f"{title}: turns at the former one ({sizes})", 100 * stayed / turns, None, 95, "%", at_least=True),
        Figure(
            f"{title}: cached tokens (floor: one replica)", cached[0], cached[1], 0.9 * cached[1], "%", at_least=True
        ),
        Figure(
            "one replica ends: turns of others' conversations that stay",
            100 * kept / len(others),
            None,
            100,
            "%",
            at_least=True,
        ),
    ]


def count_stays(visits: dict[int, list[int]]) -> int:
    """Return the number of turns that went to the same replica as the turn before."""
    return sum(before == after for replicas in visits.values() for before, after in pairwise(replicas))
