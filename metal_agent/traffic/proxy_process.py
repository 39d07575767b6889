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
from gateway.http.control_client import ControlRefusedError, ControlUnreachableError
from gateway.http.named_socket import TEMPORARY_SUFFIX
from gateway.proxy.build import BUILD
from gateway.proxy.config import ProxyState
from gateway.proxy.control_client import ProxyClient
from gateway.proxy.control_socket import LAST_SOCKET, LONGEST_NAME
from kube.backoff import backoff_seconds
from metal_agent.lifecycle import GRACE_SECONDS
from metal_agent.native import log_files
from metal_agent.native.process import NativeProcess, adopt_process, spawn_process
from metal_agent.options import OptionsError
from metal_agent.traffic.service_rates import ServiceRates
from runtimes.environment import PYTHON, select_environment

PATIENCE_SECONDS: Final = 60.0
"""A proxy that answers nothing for so long is ended, with all its streams; a busy machine is slow."""
OLDER_PROXY_SECONDS: Final = 3600.0
"""The longest that an older proxy, or one whose control API is silent, is left alone because of its streams."""
_IDLE_SECONDS: Final = 60.0
_REACTION_SECONDS: Final = 5.0
_FIRST_RESTART_SECONDS: Final = 0.1
_LAST_RESTART_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 30.0
_STARTING_SECONDS: Final = 0.05
_CHECK_SECONDS: Final = 10.0
_LONGEST_SOCKET: Final = 103 if sys.platform == "darwin" else 107

log = structlog.get_logger()


class Proxy:
    """The proxy of the agent whose state is in `folder`; `on_change` is called when `answers` has changed.

    Raises OptionsError if the path of a socket in `folder` would be longer than the system allows.
    """

    def __init__(self, folder: Path, on_change: Callable[[], None]) -> None:
        """Begin without a process: `adopt` or `run` finds or starts one."""
        self._folder = folder
        # In a folder of its own, which the proxy requires to be private.
        self._socket = folder / "proxy" / "control.sock"
        # The system limits the path of a socket; the proxy makes one with a longer name beside it.
        longest = self._socket.with_name(LONGEST_NAME)
        excess = len(os.fsencode(longest)) - _LONGEST_SOCKET
        if excess > 0:
            raise OptionsError(f"--state-dir {folder} is {excess} bytes too long for the socket {longest} in it")

        self._on_change = on_change
        self.process: NativeProcess | None = None  # the proxy that serves, started or adopted
        self._spawned_pid: int | None = None
        """Pid of the proxy that this agent started last; an adopted one has another, and may be of another build."""
        self._has_answered = asyncio.Event()  # set at its first answer, cleared once there is no proxy
        self._is_handing_over = False
        """True while a newer proxy takes the place of the present one."""

        self.answers = False
        self.state: ProxyState | None = None
        """Its last reported state, some seconds old."""
        self.service_rates = ServiceRates()
        """The traffic of its services."""
        self.client = ProxyClient(self._socket)

    def adopt(self) -> None:
        """Adopt the proxy of an earlier agent, if one listens, whether it answers or not. Raises OSError."""
        pid = unix_listener(self._socket)
        if self.process or pid is None:
            return  # adopted already, or there is none
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
        """Keep a proxy running until cancelled: start another one after each end, later after each short run in a row.

        The proxy goes on after the cancellation, for the next agent to adopt.
        """
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
        """End the proxy for good, also one that this agent has not seen yet; requests in progress get the grace period.

        To be called after `run` was cancelled, which has released the handle: whichever proxy listens now is adopted
        again, such as one that a hand-over put in the place of the former.
        """
        last_identity = self.process.identity if self.process else None
        self.process = None
        self.adopt()
        process: NativeProcess | None = self.process
        if process is None and last_identity:
            process = adopt_process(last_identity)  # it was just started and does not listen yet
        if process:
            await process.end(GRACE_SECONDS)

    def pids(self) -> frozenset[int]:
        """Return the pids of the proxy, of those before it that still end their last requests, and of a newer one.

        A proxy that has handed over listens at `last-PID.sock` until its last request has ended. An agent that was
        ended in the middle of a hand-over leaves a newer proxy behind, which takes over or ends.
        """
        # A newer proxy listens at an unnamed socket, then takes the name; in this order it is seen at one of the two.
        newer = [unix_listener(path) for path in (self._socket.with_suffix(TEMPORARY_SUFFIX), self._socket)]
        ending = [unix_listener(path) for path in self._socket.parent.glob(LAST_SOCKET.format(pid="*"))]
        current = self.process.pid if self.process else None
        return frozenset(pid for pid in (current, *newer, *ending) if pid is not None)

    async def _run_once(self) -> None:
        """Adopt or start the proxy, and watch it until one of these happens. Raises OSError.

        * It is of an older build, and a new one has replaced it, which is now `process`.
        * It has ended.
        * It has handed over to a proxy that an earlier agent started, which the next call adopts, or to a new one that
          does not serve.

        Without a replacement, `process` and `state` are None and `answers` is False.
        """
        self.adopt()
        self.process = process = self.process or self._spawn()
        async with asyncio.TaskGroup() as group:
            # ending returns at the end of the process; replacing once a new proxy has its place; watching once one that
            # an earlier agent started has it. The first to return ends the other two.
            ending = group.create_task(process.wait())
            replacing = group.create_task(self._replace_older(process))
            watching = group.create_task(self._watch_answers(process))
            tasks = {ending, replacing, watching}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

        if replacing.done() and not replacing.cancelled():
            self.process = replacing.result()  # None: the new proxy does not serve
            log.info("proxy_replaced", pid=process.pid, by=self.process.pid if self.process else None)
            process.release()
        elif ending.done() and not ending.cancelled():  # it has ended
            ended = ending.result()
            log.warning("proxy_ended", pid=process.pid, code=ended.code, signal=ended.signal)
            self.process = None
        else:
            # `watching` has returned: a newer proxy has its place.
            log.info("proxy_has_left", pid=process.pid)
            self.process = None
            process.release()

        if self.process is None:
            self.state = None
            self.answers = False
            self._has_answered.clear()
        self._on_change()

    async def _replace_older(self, process: NativeProcess) -> NativeProcess | None:
        """Start a new proxy in the place of an adopted one of another build; return it when it serves.

        * Nothing to replace: wait until cancelled.
        * The hand-over works: return the new proxy.
        * The older one has handed over, and the new one does not serve: return None.
        * The hand-over fails, and the older one serves on: end it when it has been idle for a while, or after an hour.
          `_run_once` sees its end and starts a new one.
        """
        await self._has_answered.wait()
        state = self.state
        if state is None or process.pid == self._spawned_pid or state.version == BUILD:
            return await asyncio.Future()  # nothing to replace: wait for the cancellation

        if successor := await self._hand_over():
            return successor
        if self._has_handed_over(process):
            return None

        # It serves on.
        log.info("older_proxy_is_replaced_later", pid=process.pid, version=state.version)
        loop = asyncio.get_running_loop()
        started = busy = loop.time()  # busy: when it last had a request
        while loop.time() - started < OLDER_PROXY_SECONDS and loop.time() - busy < _IDLE_SECONDS:
            await asyncio.sleep(_CHECK_SECONDS)
            if not self._is_idle():
                busy = loop.time()
        await process.end(GRACE_SECONDS)
        return await asyncio.Future()  # `_run_once` cancels this at its end

    async def _hand_over(self) -> NativeProcess | None:
        """Start a proxy that takes the listeners over; return it when it answers, or None if it does not."""
        self._is_handing_over = True  # `_watch_answers` leaves the older one alone
        try:
            return await self._await_successor(self._spawn("--take-over"))
        except OSError as error:
            log.warning("hand_over_failed", error=str(error))
            return None
        finally:
            self._is_handing_over = False

    async def _await_successor(self, successor: NativeProcess) -> NativeProcess | None:
        """Return the newer proxy when it answers, or None if it has ended, or was ended because it does not answer."""
        ending = asyncio.create_task(successor.wait())
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not ending.done():
                    if await self._read_state_of(successor.pid):
                        return successor
                    await asyncio.wait({ending}, timeout=_STARTING_SECONDS)  # before it is asked again
        except TimeoutError:
            await successor.end(GRACE_SECONDS)
        finally:
            ending.cancel()
        log.warning("hand_over_failed", pid=successor.pid)
        return None

    async def _watch_answers(self, process: NativeProcess) -> None:
        """Check that the proxy answers, often while it starts and rarely later; end it after a long silence.

        Its control API alone may be silent while its streams flow: as long as a listener reacts, it has an hour, else
        a minute. Return if it has handed over to a newer proxy that an earlier agent started; the hand-over that this
        agent has begun itself (`_is_handing_over`) is watched by `_replace_older`.
        """
        loop = asyncio.get_running_loop()
        silent_since = None  # time of the first check without an answer
        while True:
            if await self._read_state_of(process.pid):  # it has answered
                silent_since = None
                if not self.answers:
                    self.answers = True
                    self._has_answered.set()
                    self._on_change()
            elif not self._is_handing_over and self._has_handed_over(process):
                return
            else:
                silent_since = silent_since or loop.time()
                silence = loop.time() - silent_since
                is_too_long = silence >= OLDER_PROXY_SECONDS
                if is_too_long or (silence >= PATIENCE_SECONDS and not await self._has_live_listener()):
                    log.error("proxy_restarted_after_silence", pid=process.pid, seconds=round(silence))
                    await process.end(GRACE_SECONDS)
                    await asyncio.Future()  # `_run_once` cancels this at its end

            await asyncio.sleep(_CHECK_SECONDS if self.answers else _STARTING_SECONDS)

    def _has_handed_over(self, process: NativeProcess) -> bool:
        """Return True if a proxy has left listening to a newer one, and only ends its last requests."""
        last = self._socket.with_name(LAST_SOCKET.format(pid=process.pid))
        return unix_listener(last) == process.pid

    def _is_idle(self) -> bool:
        """Return True if the proxy has reported that it has no request."""
        services = self.state.services if self.state else ()
        return self.answers and not any(service.stats.in_flight or service.stats.queued for service in services)

    async def _has_live_listener(self) -> bool:
        """Decide whether any listener of the proxy reacts to a client, if only by closing the connection."""
        for listener in self.state.services if self.state else ():
            if listener.error:
                continue  # it does not listen

            try:
                async with asyncio.timeout(_REACTION_SECONDS):
                    reader, writer = await asyncio.open_connection(listener.address, listener.port)  # as a client
                    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    await reader.read(1)
                    writer.close()
            except ConnectionResetError:
                return True
            except (OSError, TimeoutError):
                continue
            return True  # it has answered, or closed the connection
        return False

    async def _read_state_of(self, pid: int) -> bool:
        """Read the state of the proxy into `state` and the rates; return whether the process `pid` answered.

        If no proxy answers, `state` stays as it is, and the rates are computed again, since old ones become unknown.
        """
        try:
            self.state = await self.client.state()
        except (ControlUnreachableError, ControlRefusedError):
            self.service_rates.on_read(asyncio.get_running_loop().time())  # so that old rates become unknown
            return False
        self.service_rates.note_state(self.state, asyncio.get_running_loop().time())
        return self.state.pid == pid

    async def read_metrics(self) -> bytes:
        """Return the metrics of the proxy in Prometheus' text format; nothing if it does not answer."""
        try:
            return await self.client.metrics()
        except (ControlUnreachableError, ControlRefusedError):
            return b""

    def _spawn(self, *options: str) -> NativeProcess:
        """Start a proxy process with these further options. Raises OSError."""
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = [*PYTHON, "cli.main", "proxy", "--socket", str(self._socket), *options]
        log_path = self._folder / "logs" / log_files.PROXY_LOG
        process = spawn_process(argv, select_environment(os.environ), log_path, self._folder)
        log.info("proxy_started", pid=process.pid)
        self._spawned_pid = process.pid  # of our own build: nothing is to be replaced
        return process
