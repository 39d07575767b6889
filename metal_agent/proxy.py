"""Keeps the host's proxy running, as a process of its own that outlives the agent with all its streams.

Nothing is written down of it: who listens on its socket, which is in a folder of ours alone, is the proxy, and the
kernel says who that is even when it is too busy, too new or too stuck to answer.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from devices.sockets import unix_listener
from gateway.proxy.client import ProxyClient, ProxyRefusedError, ProxyUnreachableError
from gateway.proxy.config import ProxyState
from kube.backoff import backoff_seconds
from metal_agent import spawn
from metal_agent.runner import GRACE_SECONDS
from metal_agent.spawn import NativeProcess
from metal_agent.start import StartError
from runtimes.llama_server import child_environment

LOG: Final = "proxy.log"
PATIENCE_SECONDS: Final = 60.0
"""How long a proxy may fail to answer before it is ended: a busy machine is slow, and all its streams end with it."""
_FIRST_RESTART_SECONDS: Final = 0.1
_LAST_RESTART_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 30.0
_STARTING_SECONDS: Final = 0.05
_CHECK_SECONDS: Final = 10.0
_LONGEST_SOCKET: Final = 103 if sys.platform == "darwin" else 107

log = structlog.get_logger()


class Proxy:
    """The proxy of the agent whose state is in `folder`; `on_change` hears that `answers` changed.

    Raises StartError: a socket in `folder` would have a name longer than the system takes.
    """

    def __init__(self, folder: Path, on_change: Callable[[], None]) -> None:
        self._folder = folder
        # In a folder of its own, which the proxy wants to be private.
        self._socket = folder / "proxy" / "control.sock"
        excess = len(os.fsencode(self._socket)) - _LONGEST_SOCKET
        if excess > 0:
            raise StartError(f"--state-dir {folder} is {excess} bytes too long for the socket {self._socket} in it")
        self._on_change = on_change
        self.process: NativeProcess | None = None
        self.answers = False
        self.state: ProxyState | None = None
        """What it last said of itself, some seconds ago."""
        self.client = ProxyClient(self._socket)

    def adopt(self) -> None:
        """Take over the proxy of an earlier agent, whether it answers or not. Raises OSError."""
        pid = unix_listener(self._socket)
        if self.process or pid is None:
            return
        try:
            process = NativeProcess(pid)
        except ProcessLookupError:
            return
        # Asked again, as the watch is open now: it holds the process that listens, and not a later one of that pid.
        if unix_listener(self._socket) == pid:
            log.info("proxy adopted", pid=pid)
            self.process = process
        else:
            process.release()

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

    async def end(self) -> None:
        """End the proxy for good, after `run` was cancelled; what it still answers has the grace for it."""
        started = self.process.identity if self.process else None
        self.process = None
        self.adopt()
        process: NativeProcess | None = self.process
        if process is None and started:
            # It was just started and does not listen yet: it would be left behind.
            process = spawn.adopt(started)
        if process:
            await process.end(GRACE_SECONDS)

    async def _live(self) -> None:
        """One life of the proxy, from its start (or adoption) to its end. Raises OSError."""
        self.adopt()
        self.process = process = self.process or self._spawn()
        async with asyncio.TaskGroup() as group:
            attending = group.create_task(self._attend(process))
            how = await process.wait()
            attending.cancel()
        log.warning("proxy ended", pid=process.pid, code=how.code, signal=how.signal)
        self.process = None
        self.state = None
        self.answers = False
        self._on_change()

    async def _attend(self, process: NativeProcess) -> None:
        """Ask it whether it is well, soon while it starts and seldom later; end it when it is silent for long."""
        loop = asyncio.get_running_loop()
        silent_since = None
        while True:
            if await self._answers_as(process.pid):
                silent_since = None
                if not self.answers:
                    self.answers = True
                    self._on_change()
            else:
                silent_since = silent_since or loop.time()
                if loop.time() - silent_since >= PATIENCE_SECONDS:
                    log.error("proxy does not answer, starting another", pid=process.pid, seconds=PATIENCE_SECONDS)
                    await process.end(GRACE_SECONDS)
                    return
            await asyncio.sleep(_CHECK_SECONDS if self.answers else _STARTING_SECONDS)

    async def _answers_as(self, pid: int) -> bool:
        try:
            self.state = await self.client.state()
        except (ProxyUnreachableError, ProxyRefusedError):
            return False
        return self.state.pid == pid

    def _spawn(self) -> NativeProcess:
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "cli.main", "proxy", "--socket", str(self._socket)]
        process = spawn.spawn(argv, child_environment(os.environ), self._folder / "logs" / LOG, self._folder)
        log.info("proxy started", pid=process.pid)
        return process
