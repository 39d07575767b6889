"""Run an engine, the minimal proxy and the product's proxy beside each other, and keep them apart if asked."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.clients.http_load import TOKEN
from gateway.proxy.config import Backend, ProxyConfig, ProxyState, ServiceListener
from metal_agent.native.process import kill_strays
from metal_agent.traffic.proxy_process import Proxy

ENGINE_NAME: Final = "weights.gguf"
"""The engine's name for the model, which the proxy puts into requests and replaces in responses."""


class SupervisedProxy:
    """The proxy as an agent runs it: restarted when it ends, and configured again after each start."""

    def __init__(self, folder: Path) -> None:
        self.proxy = Proxy(folder, self._changed)
        self.config = ProxyConfig()
        self.answers = asyncio.Event()
        self._configuring: set[asyncio.Task[ProxyState]] = set()

    async def configure(self, config: ProxyConfig) -> int:
        """Configure the proxy with `config` and return the first service's port."""
        self.config = config
        return (await self.proxy.client.configure(config)).services[0].port

    @property
    def pid(self) -> int:
        """The proxy's process id."""
        assert self.proxy.process  # noqa: S101 - it answers
        return self.proxy.process.pid

    def _changed(self) -> None:
        if self.proxy.answers:
            self.answers.set()
        if self.proxy.answers and self.config.services:
            task = asyncio.create_task(self.proxy.client.configure(self.config))
            self._configuring.add(task)
            task.add_done_callback(self._configuring.discard)


@asynccontextmanager
async def run_proxy() -> AsyncIterator[SupervisedProxy]:
    """Run the proxy until the context ends."""
    with tempfile.TemporaryDirectory() as name:
        running = SupervisedProxy(Path(name))
        task = asyncio.create_task(running.proxy.run())
        try:
            await running.answers.wait()
            yield running
        finally:
            task.cancel()
            await asyncio.wait([task])
            await kill_strays(Path(name), ())


class Server(NamedTuple):
    """A running process of `benchmarks.servers`."""

    port: int
    pid: int
    process: subprocess.Popen[str]

    def ask(self) -> str:
        """Send an empty line, and return the line that the server answers."""
        assert self.process.stdin and self.process.stdout  # noqa: S101, PT018 - both are pipes
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


@contextmanager
def run_server(module: str, *arguments: str, prefix: Sequence[str] = ()) -> Iterator[Server]:
    """Run one of `benchmarks.servers` until the context ends; `prefix` begins its command."""
    command = [*prefix, sys.executable, "-m", f"benchmarks.servers.{module}", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdin  # noqa: S101, PT018 - both are pipes
        try:
            yield Server(int(process.stdout.readline()), process.pid, process)
        finally:
            process.stdin.close()


@contextmanager
def apart(proxy: Server, engine: Server) -> Iterator[None]:
    """Keep a proxy on the first processor, its engine and this process on the last, where the system can do that."""
    if sys.platform != "linux":
        yield
        return
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(proxy.pid, {min(processors)})
    for pid in (engine.pid, 0):
        os.sched_setaffinity(pid, {max(processors)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, processors)


def proxy_config(engine: int, concurrency: int, port: int = 0) -> ProxyConfig:
    """Return a configuration with one service in front of the engine."""
    backend = Backend("engine", f"http://127.0.0.1:{engine}", concurrency=concurrency, model=ENGINE_NAME)
    return ProxyConfig((ServiceListener("bench/tiny", "127.0.0.1", port, TOKEN, (backend,)),))


class Way(NamedTuple):
    """One way to the engine, the process in between, and its latencies in milliseconds."""

    port: int
    pid: int
    first_token_ms: list[float]
    token_ms: list[float]


class Ways(NamedTuple):
    """The ways of one run."""

    direct: Way
    bare: Way
    """Through `raw_proxy`."""
    ours: Way
    proxy: SupervisedProxy


@asynccontextmanager
async def open_ways(concurrency: int) -> AsyncIterator[Ways]:
    """Run engine and proxies until the context ends."""
    with ExitStack() as stack:
        engine = stack.enter_context(run_server("stream_engine"))
        bare = stack.enter_context(run_server("raw_proxy", str(engine.port), TOKEN))
        async with run_proxy() as running:
            port = await running.configure(proxy_config(engine.port, concurrency))
            yield Ways(
                Way(engine.port, engine.pid, [], []),
                Way(bare.port, bare.pid, [], []),
                Way(port, running.pid, [], []),
                running,
            )
