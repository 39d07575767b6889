"""Random disturbances between a controller and the API server, which follow from a seed.

Writes are refused, lost, repeated or answered to nobody; watches end, expire, lag, and bring an event twice or after
its successor. Nothing of it is more than an API server, its proxies and its load balancers may do.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import msgspec

from kube.errors import Unreachable
from kube.transport import Request, Response, Stream, Transport
from tests.support.api_faults import WRITES, Fault

REFUSALS: Final = {400: "BadRequest", 409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}
LONGEST_LAG_SECONDS: Final = 0.3
EXPIRED: Final = msgspec.json.encode(
    {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "expired by the test"}}
)
"""The event by which an API server ends a watch whose version is too old."""
KINDS: Final = 5
"""Number of ways to disturb an event."""


def refusal(status: int) -> Response:
    """Return the answer by which an API server refuses a call."""
    body = {"kind": "Status", "message": "refused by the test", "reason": REFUSALS[status], "code": status}
    return Response(status, msgspec.json.encode(body), 0.1 if status == 429 else None)


class RandomFaults:
    """A plan by which one of `one_in` calls meets a fault."""

    def __init__(self, seed: int, one_in: int) -> None:
        self.injected = 0
        self._chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
        self._one_in = one_in

    def __call__(self, request: Request) -> Fault | Response | None:
        if "watch" in request.query or self._chance.randrange(self._one_in):
            return None
        self.injected += 1
        choices: list[Fault | Response] = [refusal(status) for status in REFUSALS]
        choices += [Fault.FAIL, Fault.CUT]
        if request.method in WRITES:
            choices.append(Fault.TWICE)
        return self._chance.choice(choices)


class DisturbedWatches:
    """The transport `inner`, whose watches end or expire now and then, lag, and repeat or swap their events."""

    def __init__(self, inner: Transport, seed: int, one_in: int) -> None:
        self.injected = 0
        self._inner = inner
        self._chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
        self._one_in = one_in

    async def request(self, request: Request) -> Response:
        return await self._inner.request(request)

    @contextlib.asynccontextmanager
    async def stream(self, request: Request, *, idle_seconds: float) -> AsyncIterator[Stream]:
        async with self._inner.stream(request, idle_seconds=idle_seconds) as stream:
            yield replace(stream, chunks=self._disturb(stream.chunks))

    async def reconnect(self) -> None:
        await self._inner.reconnect()

    async def close(self) -> None:
        await self._inner.close()

    async def _disturb(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        rest = last = b""
        async for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                chosen = self._chance.randrange(KINDS * self._one_in)
                if chosen < KINDS:
                    self.injected += 1
                if chosen == 0:
                    raise Unreachable("watch cut by the test")
                if chosen == 1:
                    await asyncio.sleep(self._chance.uniform(0, LONGEST_LAG_SECONDS))
                elif chosen == 2:
                    yield line + b"\n"
                elif chosen == 3 and last:
                    yield line + b"\n" + last + b"\n"
                elif chosen == 4:
                    yield EXPIRED + b"\n"
                    return
                yield line + b"\n"
                last = line
