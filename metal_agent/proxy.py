"""Keeps the host's proxy running, as a process of its own that outlives the agent with all its streams."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from gateway.proxy.client import ProxyClient, ProxyRefusedError, ProxyUnreachableError
from kube.backoff import backoff_seconds
from metal_agent import durable, spawn
from metal_agent.runner import GRACE_SECONDS
from metal_agent.spawn import Identity, NativeProcess
from runtimes.llama_server import child_environment

_FIRST_RESTART_SECONDS: Final = 0.1
_LAST_RESTART_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 30.0
_SOCKET_PAUSE_SECONDS: Final = 0.05

log = structlog.get_logger()


class Proxy:
    """The proxy of the agent whose state is in `folder`; `on_change` hears that `answers` changed."""

    def __init__(self, folder: Path, on_change: Callable[[], None]) -> None:
        self._folder = folder
        # In a folder of its own, which the proxy wants to be private.
        self._socket = folder / "proxy" / "control.sock"
        self._record = folder / "proxy.json"
        self._on_change = on_change
        self.process: NativeProcess | None = None
        self.answers = False
        self.client = ProxyClient(self._socket)

    async def adopt(self) -> None:
        """Take over the proxy of an earlier agent if it answers; end it if it runs and does not answer."""
        identity = durable.read(self._record, Identity)
        process = spawn.adopt(identity) if identity else None
        if process is None:
            return
        try:
            await self.client.state()
        except (ProxyUnreachableError, ProxyRefusedError) as error:
            log.warning("proxy does not answer, starting another", pid=process.pid, error=str(error))
            await process.end(GRACE_SECONDS)
            return
        log.info("proxy adopted", pid=process.pid)
        self.process = process

    async def run(self) -> None:
        """Keep a proxy running for ever; when cancelled, it goes on."""
        failures = 0
        loop = asyncio.get_running_loop()
        try:
            while True:
                started = loop.time()
                try:
                    await self._live()
                except OSError as error:
                    log.warning("proxy cannot be started", error=str(error))
                failures = 1 if loop.time() - started >= _STABLE_SECONDS else failures + 1
                await asyncio.sleep(backoff_seconds(failures, first=_FIRST_RESTART_SECONDS, most=_LAST_RESTART_SECONDS))
        finally:
            if self.process:
                self.process.release()

    async def _live(self) -> None:
        """One life of the proxy, from its start (or adoption) to its end. Raises OSError."""
        self.process = process = self.process or self._spawn()
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(self._until_it_answers(process))
            how = await process.wait()
            answering.cancel()
        log.warning("proxy ended", pid=process.pid, code=how.code, signal=how.signal)
        self.process = None
        self.answers = False
        self._on_change()

    async def _until_it_answers(self, process: NativeProcess) -> None:
        """Wait for the control socket, which a proxy that was just started makes when it is ready."""
        while not self.answers:
            try:
                await self.client.state()
            except (ProxyUnreachableError, ProxyRefusedError):
                await asyncio.sleep(_SOCKET_PAUSE_SECONDS)
            else:
                # Anew: a launcher may have become the interpreter, and its command line with it.
                self._remember(process)
                self.answers = True
                self._on_change()

    def _spawn(self) -> NativeProcess:
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "cli.main", "proxy", "--socket", str(self._socket)]
        process = spawn.spawn(argv, child_environment(os.environ), self._folder / "logs" / "proxy.log", self._folder)
        self._remember(process)
        log.info("proxy started", pid=process.pid)
        return process

    def _remember(self, process: NativeProcess) -> None:
        if identity := spawn.identify(process.pid):
            durable.write(self._record, identity)
