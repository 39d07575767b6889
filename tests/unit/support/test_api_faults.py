"""The fault injector: if a fault were not injected, the tests that use it could not fail."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kube.errors import Unreachable
from kube.transport import Request, Response, Stream
from tests.support.api_faults import Crash, Fault, FaultyTransport, nth

WRITE = Request("PATCH", "/a")


class Recording:
    def __init__(self) -> None:
        self.requests = 0

    async def request(self, request: Request) -> Response:
        del request
        self.requests += 1
        return Response(200, str(self.requests).encode())

    @contextlib.asynccontextmanager
    async def stream(self, request: Request, *, idle_seconds: float) -> AsyncIterator[Stream]:
        del request, idle_seconds

        async def chunks() -> AsyncIterator[bytes]:
            for chunk in (b"a", b"b"):
                yield chunk

        yield Stream(200, chunks())

    async def reconnect(self) -> None:
        pass

    async def close(self) -> None:
        self.requests = -1


@pytest.mark.parametrize(
    ("fault", "raised", "sent"),
    [
        (Fault.FAIL, Unreachable, 0),
        (Fault.CUT, Unreachable, 1),
        (Fault.CRASH_BEFORE, Crash, 0),
        (Fault.CRASH_AFTER, Crash, 1),
        (Fault.HANG, TimeoutError, 0),
    ],
)
async def test_fault_raises_its_error_and_sends_its_requests(
    fault: Fault, raised: type[BaseException], sent: int
) -> None:
    server = Recording()
    transport = FaultyTransport(server, nth(0, fault))
    with pytest.raises(raised):
        # Any other fault is raised by itself, however busy the machine is.
        async with asyncio.timeout(0.05 if fault is Fault.HANG else None):
            await transport.request(WRITE)
    assert server.requests == len(transport.sent) == sent


async def test_the_nth_write_is_counted_without_reads_and_watches() -> None:
    server = Recording()
    transport = FaultyTransport(server, nth(1, Response(500, b"")))
    answers = [(await transport.request(request)).status for request in (WRITE, Request("GET", "/a"), WRITE, WRITE)]
    assert answers == [200, 200, 500, 200]


async def test_a_request_sent_twice_gets_the_second_answer() -> None:
    assert (await FaultyTransport(Recording(), nth(0, Fault.TWICE)).request(WRITE)).body == b"2"


async def test_creation_that_its_caller_did_not_wait_for_is_counted() -> None:
    """A crash in one task cancels the requests of the others, and the server executes them none the less."""
    arrived, may_answer = asyncio.Event(), asyncio.Event()

    class Slow(Recording):
        async def request(self, request: Request) -> Response:
            arrived.set()
            await may_answer.wait()
            await super().request(request)
            return Response(201, b"")

    transport = FaultyTransport(Slow())
    call = asyncio.create_task(transport.request(Request("PATCH", "/services/a")))
    await arrived.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    may_answer.set()
    await transport.close()
    assert transport.created == {("/services", "a"): 1}


async def test_what_is_made_for_an_object_that_was_deleted_does_not_count() -> None:
    class Creating(Recording):
        async def request(self, request: Request) -> Response:
            await super().request(request)
            return Response(201, b"")

    transport = FaultyTransport(Creating())
    transport.deleted_owners.add("gone")
    for name, owner in (("a", "gone"), ("b", "alive")):
        body = f'{{"metadata": {{"name": "{name}", "ownerReferences": [{{"uid": "{owner}"}}]}}}}'.encode()
        await transport.request(Request("PATCH", f"/services/{name}", body=body))
    assert transport.created == {("/services", "b"): 1}


async def test_a_stream_is_cut_after_its_first_chunk() -> None:
    transport = FaultyTransport(Recording(), lambda _: Fault.CUT)
    read = []

    async def read_all() -> None:
        async with transport.stream(Request("GET", "/a", {"watch": "1"}), idle_seconds=1) as stream:
            async for chunk in stream.chunks:
                read.append(chunk)  # noqa: PERF401 - what was read before the cut matters

    with pytest.raises(Unreachable):
        await read_all()
    assert read == [b"a"]
