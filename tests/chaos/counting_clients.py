"""Clients of the gateway that count what they get: each token, the end of each answer, and what it may be charged."""

import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Literal

import aiohttp

from gateway.cluster.token_estimate import _BYTES_OF_TOKEN
from tests.chaos.numbered_engine import count_usage, write_token
from tests.controlplane.process import Process
from tests.support.eventually import eventually

End = Literal["whole", "error", "broken", "stuck", "cut"]
"""The end of an answer: as it should be; an error; a broken connection; none; as if the answer were whole."""
STUCK_SECONDS: Final = 30.0
"""A request waits for an engine that is stopped, for one of them only, and on a busy machine."""
ERRORS: Final = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE})
_MOST_TOKENS: Final = 60
_PAUSE_SECONDS: Final = 0.5
"""After an error, before the next request."""


class KilledGateway:
    """A process of the gateway that is killed and started again; each start is another life."""

    def __init__(self, process: Process, url: str, health: str) -> None:
        self.process = process
        self.url = url
        self.health = health
        self.life = 0
        self.is_down = False

    async def kill(self, seconds: float) -> None:
        """Kill it, and start it again after a while; return when it listens, which may be before it is ready."""
        self.life += 1
        self.is_down = True
        await self.process.kill()
        await asyncio.sleep(seconds)
        self.process.start()
        await eventually(lambda: self.answers("/healthz"))
        self.is_down = False

    async def answers(self, path: str) -> bool:
        """Return whether its health page answers 200."""
        return (await self._get(path)).status == HTTPStatus.OK

    async def read_used_tokens(self) -> int:
        """Return the tokens that this life has counted, of all keys."""
        keys = json.loads(await (await self._get("/usage")).text())["keys"]
        return sum(tokens for _, tokens in keys.values())

    async def _get(self, path: str) -> aiohttp.ClientResponse:
        async with aiohttp.ClientSession() as session, session.get(f"{self.health}{path}") as response:
            await response.read()
            return response


@dataclass
class SentRequest:
    """A request, and what its client got."""

    name: str
    gateway: KilledGateway
    life: int
    """The life of the gateway when it was sent."""
    tokens: int
    streams: bool
    body: bytes
    began: float
    found_it_down: bool
    ended: float = math.inf
    end: End = "stuck"
    status: int = 0
    text: str = ""
    usage: dict[str, int] | None = None
    finished: bool = False
    """The answer has its last event, or its reason to finish."""
    error: str = ""
    lost_its_gateway: bool = False
    """Its gateway was killed before it ended."""

    @property
    def expected(self) -> str:
        return "".join(write_token(self.name, number) for number in range(self.tokens))

    @property
    def prompt_estimate(self) -> int:
        return -(-len(self.body) // _BYTES_OF_TOKEN)

    @property
    def used(self) -> int:
        """The tokens that it owes if it is settled: by the engine's report, or by what came of a broken one."""
        if self.usage:
            return self.usage["total_tokens"]
        return self.prompt_estimate + self.text.count(" ") if self.text else 0

    @property
    def reserved(self) -> int:
        return self.prompt_estimate + self.tokens

    def describe_defect(self) -> str:
        """Return what is wrong with the answer; empty: nothing."""
        if not self.expected.startswith(self.text):
            return "its text was lost, doubled or foreign"
        if self.end in {"stuck", "cut"}:
            return "it is " + self.end
        if self.end == "whole" and (self.text, self.usage) != (self.expected, count_usage(self.name, self.tokens)):
            return "it is not as whole as it seems"
        if self.end == "error" and self.status != HTTPStatus.OK and self.status not in ERRORS:
            return "its error is that of another failure"
        if self.end == "broken" and not self.lost_its_gateway and not self.found_it_down:
            return "its connection broke, and its gateway was not killed"
        return ""


@dataclass
class CountingClients:
    """All clients of a run, with one key."""

    gateways: Sequence[KilledGateway]
    key: str
    session: aiohttp.ClientSession
    requests: list[SentRequest] = field(default_factory=list)
    stopped: bool = False

    async def run_client(self, number: int, seed: int) -> None:
        """Send requests, one after the other, until all clients are stopped."""
        chance = random.Random(1000 * seed + number)  # noqa: S311 - to be repeated, not to be secret
        gateways = self.gateways
        while not self.stopped:
            name = f"{number}-{len(self.requests)}"
            tokens, streams = chance.randint(5, _MOST_TOKENS), chance.random() < 2 / 3
            request = await self.ask(chance.choice(gateways), name, tokens, streams=streams)
            gateways = self.gateways
            if request.end == "broken":
                gateways = [gateway for gateway in gateways if gateway is not request.gateway]
            if request.end != "whole":
                await asyncio.sleep(_PAUSE_SECONDS)

    async def ask_all(self) -> None:
        """Send a short stream to each gateway."""
        names = [f"probe-{len(self.requests)}-{number}" for number in range(len(self.gateways))]
        asked = [self.ask(gateway, name, 3, streams=True) for gateway, name in zip(self.gateways, names, strict=True)]
        await asyncio.gather(*asked)

    async def ask(self, gateway: KilledGateway, name: str, tokens: int, *, streams: bool) -> SentRequest:
        """Send a request, read its answer, and note how it ended."""
        content: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": name}]}
        content |= {"max_tokens": tokens, "stream": streams}
        content |= {"stream_options": {"include_usage": True}} if streams else {}
        body, now = json.dumps(content).encode(), asyncio.get_running_loop().time
        request = SentRequest(name, gateway, gateway.life, tokens, streams, body, now(), gateway.is_down)
        self.requests.append(request)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(STUCK_SECONDS),
                self.session.post(f"{gateway.url}/v1/chat/completions", data=body, headers=headers) as response,
            ):
                request.status = response.status
                if response.content_type == "text/event-stream":
                    async for line in response.content:
                        _take_line(request, line)
                else:
                    _take_answer(request, await response.json())
            request.end = "error" if request.error else "whole" if request.finished else "cut"
        except (aiohttp.ClientError, ConnectionError) as error:
            request.end, request.error = "broken", repr(error)
        except TimeoutError:
            request.end = "stuck"
        except ValueError as error:  # half an event
            request.end, request.error = "cut", repr(error)
        request.ended, request.lost_its_gateway = now(), request.life != gateway.life
        return request

    def bound_charge(self, since: float, outages: Sequence[tuple[float, float]]) -> tuple[int, int]:
        """Return the least and the most tokens that may be charged for all that was sent since then.

        A gateway that is killed may not have settled a request, unless it has served a later one in the same life: the
        limit store has taken the reservation of that with all settlements before it. What is not settled counts with
        its reservation, if the store knows that. It does not if the request was refused in an outage of the store after
        another one had been refused: from the first refusal on, a gateway sends no request to the store.

        Args:
            since: the time; as all times, by the clock of the loop.
            outages: begin and end of each time in which the store did not answer.
        """
        served: dict[tuple[str, int], float] = {}
        refused: dict[tuple[str, int, int], float] = {}
        for request in self.requests:
            life = (request.gateway.url, request.life)
            if request.status == HTTPStatus.OK:
                served[life] = max(request.began, served.get(life, 0.0))
            elif (outage := _find_outage(request, outages)) is not None:
                refused[*life, outage] = min(request.ended, refused.get((*life, outage), math.inf))
        least = most = 0
        for request in self.requests:
            if request.began < since:
                continue
            life = (request.gateway.url, request.life)
            outage = _find_outage(request, outages)
            was_unsent = outage is not None and request.began > refused[*life, outage]
            was_alive = request.life == request.gateway.life
            was_settled = was_alive or (not request.lost_its_gateway and request.ended < served.get(life, 0.0))
            is_known = was_unsent or was_settled
            least += request.used if is_known else min(request.used, len(request.name) + request.tokens)
            most += request.used if is_known else request.reserved
        return least, most


def _find_outage(request: SentRequest, outages: Sequence[tuple[float, float]]) -> int | None:
    """Return the number of the outage of the limit store in which a request was refused because of it."""
    if "cannot be counted" not in request.error:
        return None
    during = (number for number, (begin, end) in enumerate(outages) if begin < request.ended and request.ended < end)
    return next(during, None)


def _take_line(request: SentRequest, line: bytes) -> None:
    """Take a line of a stream: after its end, and after an error, nothing may come."""
    if not line.strip() or line.startswith(b":"):
        return
    if request.finished or request.error:
        request.text += f"<beyond the end: {line!r}>"
    elif line.strip() == b"data: [DONE]":
        request.finished = True
    else:
        event = json.loads(line.removeprefix(b"data: "))
        request.error = str(event.get("error", ""))
        request.usage = event.get("usage") or request.usage
        for choice in event.get("choices", ()):
            request.text += choice["delta"].get("content", "")


def _take_answer(request: SentRequest, answer: dict[str, Any]) -> None:
    request.error = str(answer.get("error", ""))
    if not request.error:
        (choice,) = answer["choices"]
        request.text, request.usage = choice["message"]["content"], answer["usage"]
        request.finished = choice["finish_reason"] == "stop"
