"""The shared daemons of this host, and the models of ours in them, each behind a `Handle` as a process would be.

A daemon tells nobody when it unloads a model, so each is looked at every few seconds while something of ours is in it,
and seldom otherwise, for each look is a line in its owner's log. One look serves all models in it. Of its death we hear
at once, for that closes a connection that says nothing. What a look does not tell changes nothing: a model is gone when
the daemon says that it has others only, or when nothing listens there any more.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from yarl import URL

from crds.metalprocess import MetalProcessSpec
from devices.sockets import LOOPBACK
from kube.backoff import backoff_seconds
from metal_agent.handle import Exit
from runtimes.daemon import (
    NOT_RUNNING,
    SILENT,
    UNAUTHORIZED,
    Daemon,
    DaemonError,
    LoadedModel,
    Progress,
    named,
    owner_mark,
)
from runtimes.ollama import Ollama
from runtimes.omlx import Omlx
from runtimes.serving import Serving

WATCH_SECONDS: Final = 5.0
"""Between two looks at a daemon that has something of ours, or that cannot be used so far."""
IDLE_SECONDS: Final = 30.0
"""Between two looks at one that has nothing of ours, for what its owner has loaded."""
SILENT_LOOKS: Final = 6
"""In a row, each of up to 10 s: then it hangs, and what it has loaded answers nobody."""
_LEAVING_SECONDS: Final = 0.25
_UNLOAD_AGAIN_SECONDS: Final = 10.0

log = structlog.get_logger()


class DaemonModel:
    """One model of ours in a shared daemon, loading or loaded: a `Handle`."""

    pid: None = None
    identity: None = None

    def __init__(self, shared: "SharedDaemon", model: str, *, loaded: bool) -> None:
        self.model = model
        self.loaded = loaded
        self._shared = shared
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._loading = None if loaded else asyncio.create_task(self._load())

    @property
    def token(self) -> str | None:
        """What the daemon asks for."""
        return self._shared.daemon.api_key

    def url(self) -> str | None:
        """Where the daemon answers, once the model is loaded."""
        return self._shared.daemon.url if self.loaded else None

    async def wait(self) -> Exit:
        """Wait until it is not loaded any more, or could not be."""
        return await asyncio.shield(self._exit)

    async def end(self, grace_seconds: float) -> None:
        """Have it unloaded, and wait until it is, however long that takes: its memory is not free before."""
        if self._exit.done():
            return
        await self._stop_loading()
        await self._shared.unload(self, grace_seconds)
        self.gone(Exit())

    def release(self) -> None:
        """Stop watching; it stays loaded."""
        if self._loading:
            self._loading.cancel()
        self._shared.forget(self)

    def gone(self, how: Exit) -> None:
        """Hear that it is gone."""
        self._shared.forget(self)
        if not self._exit.done():
            self._exit.set_result(how)

    async def _load(self) -> None:
        try:
            await self._shared.daemon.load(self.model)
        except DaemonError as error:
            self.gone(Exit(reason=error.reason, message=str(error)))
        except Exception as error:  # a defect here must not leave a service loading for ever
            log.exception("cannot load", model=self.model)
            self.gone(Exit(reason="InternalError", message=f"{type(error).__name__}: {error}"))
        else:
            self.loaded = True

    async def _stop_loading(self) -> None:
        if self._loading:
            self._loading.cancel()
            await asyncio.wait([self._loading])


class SharedDaemon:
    """One daemon as this agent uses it. `on_change` hears that it became usable or ceased to be."""

    def __init__(self, daemon: Daemon, owner: str, on_change: Callable[[], None]) -> None:
        self.daemon = daemon
        self.problem = f"{daemon.runtime} has not been looked at yet"
        """Why it cannot be used now; empty when it can."""
        self._owner = owner
        self._on_change = on_change
        self._handles: list[DaemonModel] = []
        self._unknown = False
        """The last look did not tell what is loaded."""
        self._silences = 0
        self._silent_until = 0.0
        self._found: list[tuple[str, int | None]] = []
        self._wake = asyncio.Event()
        self._clean = False
        # What is brought is not yet wanted by a name that a clean-up could see.
        self._changing = asyncio.Lock()

    def name(self, spec: MetalProcessSpec) -> str:
        """Return what the model of this process is called in the daemon, also in a later agent."""
        artifact = spec.artifact
        weights = [artifact.sha256] if artifact.sha256 else [artifact.source, artifact.revision]
        return self.daemon.name(named(self._owner, spec.model_name, weights, [spec.context_length]))

    def start(self, model: str) -> DaemonModel:
        """Begin to load what was brought as `model`."""
        return self._watched(DaemonModel(self, model, loaded=False))

    def adopt(self, model: str) -> DaemonModel | None:
        """Take over what an earlier agent loaded; None where the last look did not find it.

        Where the daemon was too busy to say, it is taken over: the watch finds out.
        """
        if not self._unknown and model not in {name for name, _ in self._found}:
            return None
        return self._watched(DaemonModel(self, model, loaded=True))

    async def bring(self, model: str, serving: Serving, on_progress: Progress) -> None:
        """Make the weights known to the daemon. Raises DaemonError."""
        async with self._changing:
            await self.daemon.bring(model, serving, on_progress)

    async def unload(self, handle: DaemonModel, grace_seconds: float) -> None:
        """Unload the model of `handle`, unless another process of ours is served by it too."""
        model, failures = handle.model, 0
        while not any(other.model == model for other in self._handles if other is not handle):
            try:
                await self.daemon.unload(model)
                async with asyncio.timeout(grace_seconds + _UNLOAD_AGAIN_SECONDS):
                    await self._left(model)
            except DaemonError as error:
                if error.reason == NOT_RUNNING:
                    return
                log.warning("daemon does not unload", daemon=self.daemon.runtime, model=model, error=str(error))
                failures += 1
                await asyncio.sleep(backoff_seconds(failures, first=_LEAVING_SECONDS, most=_UNLOAD_AGAIN_SECONDS))
            except TimeoutError:
                log.warning("daemon keeps what it was to unload", daemon=self.daemon.runtime, model=model)
            else:
                return

    async def clean(self, wanted: Callable[[], Iterable[str]]) -> None:
        """Remove everything of ours that no process wants: an earlier agent's, or what was just stopped.

        Quick when nothing came to an end since the last time. Raises DaemonError.
        """
        if self._clean or self.problem:
            return
        async with self._changing:
            self._clean = True
            try:
                for model in sorted(await self.daemon.marked(self._owner)):
                    if model not in {*wanted(), *(handle.model for handle in self._handles)}:
                        log.info("removing from daemon", daemon=self.daemon.runtime, model=model)
                        await self.daemon.remove(model)
            except BaseException:
                self._clean = False
                raise

    def loaded(self) -> list[LoadedModel]:
        """List what was in memory at the last look."""
        ours = {handle.model for handle in self._handles}
        return [LoadedModel(name, memory_bytes, name in ours) for name, memory_bytes in self._found]

    def forget(self, handle: DaemonModel) -> None:
        """Watch `handle` no more."""
        self._clean = False
        if handle in self._handles:
            self._handles.remove(handle)

    async def run(self) -> None:
        """Look for ever."""
        try:
            hung_up = False
            while True:
                await self.look()
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_SECONDS if self._handles or self.problem else IDLE_SECONDS):
                        # Where it hung up and lives on, it does not like to be held: then only time tells.
                        hung_up = bool(self._handles) and not hung_up and await self._hangs_up()
                        if not hung_up:
                            await self._wake.wait()
        finally:
            await self.daemon.close()

    async def look(self) -> None:
        """Find out what is loaded, and tell those whose model is not."""
        if not self._handles and not self.daemon.installed():
            self.problem = f"{self.daemon.runtime} is not installed here"
            return
        watched = [handle for handle in self._handles if handle.loaded]
        before, began = self.problem, time.monotonic()
        try:
            self._found = await self.daemon.loaded()
        except DaemonError as error:
            self._unknown = error.reason != NOT_RUNNING
            if self._is_excused(error, began):
                return  # a daemon that works hard may take long to answer
            self.problem = str(error)
            if error.reason == NOT_RUNNING:
                self._found = []
            if error.reason in {NOT_RUNNING, UNAUTHORIZED, SILENT}:
                # Whether it is loaded or not, nobody gets an answer from it through us.
                for handle in watched:
                    handle.gone(Exit(reason=error.reason, message=self.problem))
        except Exception:  # a defect here must not end what the host serves
            log.exception("cannot look at daemon", daemon=self.daemon.runtime)
            self._unknown = True
        else:
            self.problem, self._unknown, self._silences = "", False, 0
            there = {name for name, _ in self._found}
            for handle in watched:
                if handle.model not in there:
                    handle.gone(Exit(reason="Unloaded", message=_unloaded(self.daemon, handle.model)))
        if bool(before) != bool(self.problem):
            log.info("daemon", daemon=self.daemon.runtime, usable=not self.problem, problem=self.problem)
            self._clean = False
            self._on_change()

    def _is_excused(self, error: DaemonError, began: float) -> bool:
        """Count silent looks in a row; several at the same time, as of processes that are checked, are one."""
        if error.reason != SILENT:
            self._silences = 0
            return False
        if began >= self._silent_until:
            self._silences += 1
            self._silent_until = time.monotonic()
        return self._silences < SILENT_LOOKS

    async def _left(self, model: str) -> None:
        while model in {name for name, _ in await self.daemon.loaded()}:  # noqa: ASYNC110 - a daemon tells nobody
            await asyncio.sleep(_LEAVING_SECONDS)

    async def _hangs_up(self) -> bool:
        """Hold a silent connection until the daemon closes it (True), or there is something else to look at (False)."""
        loop = asyncio.get_running_loop()
        with socket.socket() as line:
            line.setblocking(False)
            woken = asyncio.create_task(self._wake.wait())
            try:
                await loop.sock_connect(line, (LOOPBACK, URL(self.daemon.url).port))
                closed = asyncio.create_task(loop.sock_recv(line, 1))
                try:
                    await asyncio.wait([closed, woken], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    closed.cancel()
                    await asyncio.wait([closed])
            except OSError:
                await asyncio.sleep(_LEAVING_SECONDS)
                return True
            finally:
                woken.cancel()
            # A reset is a way to hang up too; the exception is looked at, so that nobody reports it.
            if not closed.cancelled():
                closed.exception()
            return not closed.cancelled()

    def _watched(self, handle: DaemonModel) -> DaemonModel:
        self._handles.append(handle)
        self._wake.set()
        return handle


def of_this_machine(folder: Path) -> "Daemons":
    """Return every kind of daemon that may run here, whether it does or not."""
    return Daemons(folder, [Omlx(), Ollama()])


class Daemons:
    """The shared daemons of this host, as the agent whose state is in `folder` uses them."""

    def __init__(self, folder: Path, daemons: Iterable[Daemon]) -> None:
        owner = owner_mark(str(folder))
        self._listeners: list[Callable[[str], None]] = []
        self._shared = {each.runtime: SharedDaemon(each, owner, partial(self._tell, each.runtime)) for each in daemons}

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Have `listener` hear the runtime of each daemon that becomes usable or ceases to be."""
        self._listeners.append(listener)

    def get(self, runtime: str) -> SharedDaemon | None:
        """Return the daemon that is this runtime; None for one with processes of its own."""
        return next((shared for name, shared in self._shared.items() if name == runtime), None)

    def usable(self) -> list[str]:
        """Name the runtimes whose daemon runs and answers us."""
        return [name for name, shared in self._shared.items() if not shared.problem]

    def loaded(self) -> list[LoadedModel]:
        """List what all of them hold in memory; what is not ours has no reservation."""
        return [model for shared in self._shared.values() for model in shared.loaded()]

    async def look(self) -> None:
        """Look at each once, so that it is known which can be used."""
        await asyncio.gather(*(shared.look() for shared in self._shared.values()))

    async def clean(self, wanted: Callable[[], Iterable[MetalProcessSpec]]) -> None:
        """Remove from each what none of these processes is served by."""
        for runtime, shared in self._shared.items():
            try:
                await shared.clean(partial(_names, shared, wanted))
            except DaemonError as error:
                log.warning("cannot clear up in daemon", daemon=runtime, error=str(error))
            except Exception:  # a defect here must not end what the host serves
                log.exception("cannot clear up in daemon", daemon=runtime)

    def _tell(self, runtime: str) -> None:
        for listener in self._listeners:
            listener(runtime)

    async def run(self) -> None:
        """Watch all of them for ever."""
        async with asyncio.TaskGroup() as group:
            for shared in self._shared.values():
                group.create_task(shared.run())


def _names(shared: SharedDaemon, wanted: Callable[[], Iterable[MetalProcessSpec]]) -> list[str]:
    return [shared.name(spec) for spec in wanted() if spec.runtime == shared.daemon.runtime]


def _unloaded(daemon: Daemon, model: str) -> str:
    return (
        f"{daemon.runtime} has {model} loaded no more: somebody unloaded it, or it made room for another, or it was "
        "restarted; it is loaded again"
    )
