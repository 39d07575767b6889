"""Keep the host's proxy running, as a process of its own that outlives the agent and keeps all streams.

It has no record on disk: the process that listens on its socket, which is in a private folder, is the proxy, and the
kernel names that process even if it is too busy, too new or too stuck to answer.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from devices.sockets import unix_listener
from gateway.proxy.config import ProxyState
from gateway.proxy.control_client import ProxyClient, ProxyRefusedError, ProxyUnreachableError
from kube.backoff import backoff_seconds
from metal_agent.lifecycle import GRACE_SECONDS
from metal_agent.native import log_files
from metal_agent.native.process import NativeProcess, adopt_process, spawn_process
from metal_agent.options import StartError
from runtimes.environment import PYTHON, select_environment

PATIENCE_SECONDS: Final = 60.0
"""A proxy that answers nothing for so long is ended, with all its streams; a busy machine is slow."""
_FIRST_RESTART_SECONDS: Final = 0.1
_LAST_RESTART_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 30.0
_STARTING_SECONDS: Final = 0.05
_CHECK_SECONDS: Final = 10.0
_LONGEST_SOCKET: Final = 103 if sys.platform == "darwin" else 107

log = structlog.get_logger()


class Proxy:
    """The proxy of the agent whose state is in `folder`; `on_change` is called when `answers` has changed.

    Raises StartError if the path of a socket in `folder` would be longer than the system allows.
    """

    def __init__(self, folder: Path, on_change: Callable[[], None]) -> None:
        self._folder = folder
        # In a folder of its own, which the proxy requires to be private.
        self._socket = folder / "proxy" / "control.sock"
        excess = len(os.fsencode(self._socket)) - _LONGEST_SOCKET
        if excess > 0:
            raise StartError(f"--state-dir {folder} is {excess} bytes too long for the socket {self._socket} in it")
        self._on_change = on_change
        self.process: NativeProcess | None = None
        self.answers = False
        self.state: ProxyState | None = None
        """Its last reported state, some seconds old."""
        self.client = ProxyClient(self._socket)

    def adopt(self) -> None:
        """Adopt the proxy of an earlier agent, whether it answers or not. Raises OSError."""
        pid = unix_listener(self._socket)
        if self.process or pid is None:
            return
        try:
            process = NativeProcess(pid)
        except ProcessLookupError:
            return
        # Read again: the open handle must be of the process that listens, not of a later one with its pid.
        if unix_listener(self._socket) == pid:
            log.info("proxy_adopted", pid=pid)
            self.process = process
        else:
            process.release()

    async def run(self) -> None:
        """Keep a proxy running until cancelled; the proxy goes on after that."""
        failures = 0
        loop = asyncio.get_running_loop()
        try:
            while True:
                started = loop.time()
                try:
                    await self._run_once()
                except OSError as error:
                    log.warning("proxy_not_started", error=str(error))
                failures = 1 if loop.time() - started >= _STABLE_SECONDS else failures + 1
                await asyncio.sleep(backoff_seconds(failures, first=_FIRST_RESTART_SECONDS, most=_LAST_RESTART_SECONDS))
        finally:
            if self.process:
                self.process.release()

    async def end(self) -> None:
        """End the proxy for good, after `run` was cancelled; requests in progress get the grace period."""
        started = self.process.identity if self.process else None
        self.process = None
        self.adopt()
        process: NativeProcess | None = self.process
        if process is None and started:
            # It was just started and does not listen yet.
            process = adopt_process(started)
        if process:
            await process.end(GRACE_SECONDS)

    async def _run_once(self) -> None:
        """Start or adopt the proxy, and watch it until it ends. Raises OSError."""
        self.adopt()
        self.process = process = self.process or self._spawn()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch_answers(process))
            ended = await process.wait()
            watching.cancel()
        log.warning("proxy_ended", pid=process.pid, code=ended.code, signal=ended.signal)
        self.process = None
        self.state = None
        self.answers = False
        self._on_change()

    async def _watch_answers(self, process: NativeProcess) -> None:
        """Check that the proxy answers, often while it starts and rarely later; end it after a long silence."""
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
                    log.error("proxy_restarted_after_silence", pid=process.pid, seconds=PATIENCE_SECONDS)
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
        argv = [*PYTHON, "cli.main", "proxy", "--socket", str(self._socket)]
        process = spawn_process(
            argv, select_environment(os.environ), self._folder / "logs" / log_files.PROXY_LOG, self._folder
        )
        log.info("proxy_started", pid=process.pid)
        return process
