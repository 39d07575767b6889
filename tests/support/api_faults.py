"""Faults between Pomona and the API server: a Transport that wraps another and follows a plan.

The plan gets each request before it is sent and decides its fate. `nth` selects the call with a number, so that a test
can inject a failure, a lost answer, a repetition or a crash at each call of an operation in turn.
"""

import asyncio
import contextlib
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from enum import Enum, auto
from http import HTTPStatus
from typing import Final

import msgspec

from kube.errors import Unreachable
from kube.transport import Request, Response, Stream, Transport

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
EVERYTHING: Final = os.environ.get("CRASH") == "everything"
"""`make crash`: a fault at each write, in place of a sample of them that differs from run to run."""
SAMPLED_ONE_IN: Final = 4


class Fault(Enum):
    FAIL = auto()
    """Not sent; the caller gets Unreachable."""
    CUT = auto()
    """Sent and executed, but the answer is lost: Unreachable. A stream is cut after its first chunk."""
    HANG = auto()
    """Not sent, and no answer until the caller gives up."""
    MUTE = auto()
    """Sent and executed, and no answer until the caller gives up. A stream is not affected."""
    TWICE = auto()
    """Sent twice, as a repeating proxy does; the second answer counts. A stream is not affected."""
    CRASH_BEFORE = auto()
    """The process dies before the request is sent."""
    CRASH_AFTER = auto()
    """The process dies after the server has executed the request."""


class Crash(BaseException):
    """The process died here; a BaseException, so that no handler of the code under test catches it."""


Plan = Callable[[Request], Fault | Response | None]
"""Function that returns a fault, an answer to replace the server's, or None to send a request as usual."""


def nth(number: int, fault: Fault | Response, *, methods: frozenset[str] = WRITES) -> Plan:
    """Return a plan with `fault` at call `number`, counted from 0, with `methods` (default: writes) and no watch."""
    seen = 0

    def plan(request: Request) -> Fault | Response | None:
        nonlocal seen
        if request.method not in methods or "watch" in request.query:
            return None
        seen += 1
        return fault if seen == number + 1 else None

    return plan


def sample_writes(count: int) -> range:
    """Return the numbers of some of so many writes, others in each run; of all of them for `make crash`."""
    return range(count) if EVERYTHING else range(secrets.randbelow(SAMPLED_ONE_IN), count, SAMPLED_ONE_IN)


class FaultyTransport:
    """The transport `inner` with the faults of `plan`, which may be replaced at any time."""

    def __init__(self, inner: Transport, plan: Plan = lambda _: None) -> None:
        self.plan = plan
        self.sent: list[Request] = []
        """Requests that reached `inner`, in order."""
        self.created: Counter[tuple[str, str]] = Counter()
        """Objects that the server said it created, by path of their collection and name."""
        self.deleted_owners: set[str] = set()
        """`uid` of objects that a test has deleted. What is made for one that is not seen to be gone yet is collected
        again, and does not count."""
        self._inner = inner
        self._unanswered: set[asyncio.Task[Response]] = set()

    async def request(self, request: Request) -> Response:
        fault = await self._before(request)
        if isinstance(fault, Response):
            return fault
        response = await self._send(request)
        if fault is Fault.TWICE:
            response = await self._send(request)
        if fault is Fault.MUTE:
            await asyncio.Event().wait()
        if fault is Fault.CUT:
            raise Unreachable(f"{request.method} {request.path}: answer lost by the test")
        if fault is Fault.CRASH_AFTER:
            raise Crash(request.path)
        return response

    @contextlib.asynccontextmanager
    async def stream(self, request: Request, *, idle_seconds: float) -> AsyncIterator[Stream]:
        fault = await self._before(request)
        if isinstance(fault, Response):
            yield Stream(fault.status, _once(fault.body), fault.retry_after_seconds)
            return
        self.sent.append(request)
        async with self._inner.stream(request, idle_seconds=idle_seconds) as stream:
            chunks = _cut(stream.chunks) if fault is Fault.CUT else stream.chunks
            yield Stream(stream.status, chunks, stream.retry_after_seconds)

    async def reconnect(self) -> None:
        await self._inner.reconnect()

    async def close(self) -> None:
        """Close the connection when the requests that nobody waits for any more are answered."""
        await self.settle()
        await self._inner.close()

    async def settle(self) -> None:
        """Wait until the requests that nobody waits for any more are answered."""
        while self._unanswered:
            await asyncio.wait(self._unanswered)

    async def _before(self, request: Request) -> Fault | Response | None:
        fault = self.plan(request)
        if fault is Fault.FAIL:
            raise Unreachable(f"{request.method} {request.path}: not sent by the test")
        if fault is Fault.CRASH_BEFORE:
            raise Crash(request.path)
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        return fault

    async def _send(self, request: Request) -> Response:
        """Send to the end, even if the caller dies: the server would execute the request none the less."""
        self.sent.append(request)
        task = asyncio.create_task(self._record(request))
        self._unanswered.add(task)
        task.add_done_callback(self._unanswered.discard)
        return await asyncio.shield(task)

    async def _record(self, request: Request) -> Response:
        response = await self._inner.request(request)
        if response.status == HTTPStatus.CREATED and not self.deleted_owners & _owner_uids(request):
            self.created[_created_object(request)] += 1
        return response


def _created_object(request: Request) -> tuple[str, str]:
    """Return the collection and the name of the object that a POST, or a PATCH that applies, created."""
    if request.method == "POST":
        return request.path, msgspec.json.decode(request.body or b"{}")["metadata"]["name"]
    collection, _, name = request.path.rpartition("/")
    return collection, name


def _owner_uids(request: Request) -> set[str]:
    """Return the owners of the object of a POST, or of a PATCH that applies."""
    metadata = msgspec.json.decode(request.body or b"{}").get("metadata") or {}
    return {owner["uid"] for owner in metadata.get("ownerReferences") or ()}


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _cut(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield chunk
        raise Unreachable("stream cut by the test")
