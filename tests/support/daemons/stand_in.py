"""Common base of the stand-ins of shared daemons: start, kill and restart at the same port."""

import asyncio
import json
from types import TracebackType
from typing import Final, Self

from aiohttp import web


class StandIn:
    """A daemon that a test runs; `stop` simulates its crash, and `start` restarts it at the same port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[tuple[str, str]] = []
        """Method and path of every request."""
        self.answering = asyncio.Event()
        """Every request waits for this event: while it is cleared, the daemon hangs."""
        self.answering.set()
        self.sick: set[str] = set()
        """Names of models that answer every request with an error until they are unloaded."""
        self.hung: dict[str, asyncio.Event] = {}
        """Models that answer nothing, while the daemon answers, by name; the event is set when they are unloaded."""
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def application(self) -> web.Application:
        raise NotImplementedError

    def forget(self) -> None:
        """Drop the state that a crash loses: everything in memory."""
        raise NotImplementedError

    async def start(self) -> None:
        self._runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        self.answering.set()
        for name in tuple(self.hung):
            self.end_hang(name)
        if self._runner:
            await self._runner.cleanup()
            self._runner = None
        self.forget()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.stop()

    def hang(self, name: str) -> None:
        """Make a model hang until it is unloaded."""
        self.hung[name] = asyncio.Event()

    def end_hang(self, name: str) -> None:
        """Break off what a model was asked while it hung."""
        if event := self.hung.pop(name, None):
            event.set()

    def changes(self) -> list[tuple[str, str]]:
        """Return the requests that change something, in order."""
        return [(method, path) for method, path in self.asked if method not in {"GET", "HEAD"}]


SICK_ANSWER = {"error": {"message": "Compute error.", "type": "server_error", "code": 500}}
"""llama.cpp's answer after a Metal out-of-memory error; both daemons pass on what their engine answers."""


def completion(model: str) -> dict[str, object]:
    """Return a completion of one token in OpenAI's form."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1763629200,
        "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
    }


HANG: Final = "hang"
"""A prompt at which a model hangs."""


async def hang(daemon: StandIn, request: web.Request) -> None:
    """Answer nothing if the model hangs; it hangs from the stream for the prompt `HANG` on, of which a token comes."""
    asked = await request.json()
    name = asked["model"]
    if asked["messages"][-1]["content"] == HANG and name not in daemon.hung:
        daemon.hang(name)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk = {"model": name, "choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": None}]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    if event := daemon.hung.get(name):
        await event.wait()
        if request.transport:
            request.transport.close()


async def serve(daemon: StandIn) -> None:
    """Serve until the process is killed."""
    async with daemon:
        print(f"serving on {daemon.url}", flush=True)
        await asyncio.Event().wait()
