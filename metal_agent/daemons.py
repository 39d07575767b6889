"""The shared daemons of this host, and our models in them, each with an `EngineHandle`, like an engine process.

A daemon has no event for a model that it unloads, so it is checked every few seconds while it has models of ours, and
rarely otherwise, since each check adds a line to its owner's log. One check covers all its models. An unknown result
changes nothing: a model is gone if the daemon lists only other models, or if nothing listens on the daemon's port any
more.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from artifacts.repositories.address_policy import Networks
from crds.metalprocess import MetalProcessSpec
from kube.backoff import backoff_seconds
from metal_agent.native.engine_handle import EngineExit, EngineHandle
from runtimes.daemon import (
    NOT_RUNNING,
    SILENT,
    UNAUTHORIZED,
    Daemon,
    DaemonError,
    LoadedModel,
    OnProgress,
    digest_content,
    owner_mark,
)
from runtimes.registry import RUNTIMES
from runtimes.serving import Serving

WATCH_SECONDS: Final = 5.0
"""Interval between two checks of a daemon that has a model of ours, or that cannot be used so far."""
IDLE_SECONDS: Final = 30.0
"""Interval between two checks of a daemon that has only models of its owner."""
SILENT_CHECKS: Final = 6
"""Checks in a row without an answer, each of up to 10 s, after which the daemon counts as hung."""
_LEAVING_SECONDS: Final = 0.25
_UNLOAD_AGAIN_SECONDS: Final = 10.0

log = structlog.get_logger()


class DaemonModel(EngineHandle):
    """One model of ours in a shared daemon, loading or loaded."""

    model: str

    def __init__(self, shared: "SharedDaemon", model: str, *, loaded: bool) -> None:
        """Watch the model if it is `loaded`, else begin to load it."""
        super().__init__()
        self.model = model
        self.loaded = loaded
        self._shared = shared  # the daemon that has the model
        self._loading = None if loaded else asyncio.create_task(self._load())

    @property
    def token(self) -> str | None:
        """API key that the daemon requires, or None."""
        return self._shared.daemon.api_key

    def url(self) -> str | None:
        """Return the URL of the daemon once the model is loaded, else None."""
        return self._shared.daemon.url if self.loaded else None

    async def end(self, grace_seconds: float, *, even_if_shared: bool = False) -> None:
        """Unload the model, and wait until it is gone, however long that takes: its memory is not free before.

        A model that another process of ours uses too stays loaded, and only this handle ends. With `even_if_shared`,
        for a sick model, it is unloaded all the same: the other processes get its exit, and load it again.
        """
        if self._exit.done():
            return
        if self._loading:
            self._loading.cancel()
            await asyncio.wait([self._loading])
        if even_if_shared:
            self._shared.report_exit_of_others(self)
        await self._shared.unload(self, grace_seconds)
        self.report_exit(EngineExit())  # without a reason, as it was asked for

    def release(self) -> None:
        """Stop watching the model; it stays loaded."""
        if self._loading:
            self._loading.cancel()
        self._shared.forget(self)

    def report_exit(self, engine_exit: EngineExit) -> None:
        """Stop watching the model, and report to the runner that it is gone."""
        self._shared.forget(self)
        if not self._exit.done():
            self._exit.set_result(engine_exit)

    async def _load(self) -> None:
        """Load the model, and report the exit if that fails."""
        try:
            await self._shared.start_if_down()
            await self._shared.daemon.load(self.model)
        except DaemonError as error:
            self.report_exit(EngineExit(reason=error.reason, message=str(error)))
        except Exception as error:  # a defect here must not leave a service loading forever
            log.exception("load_crashed", model=self.model)
            self.report_exit(EngineExit(reason="InternalError", message=f"{type(error).__name__}: {error}"))
        else:
            self.loaded = True


class SharedDaemon:
    """One daemon as this agent uses it. `on_change` is called when it becomes usable or unusable."""

    def __init__(self, daemon: Daemon, owner: str, on_change: Callable[[], None]) -> None:
        """Begin as not usable: nothing was checked yet."""
        self.daemon = daemon
        self.problem = f"{daemon.runtime} was not checked yet"
        """The reason why it cannot be used now; empty if it can."""
        self.is_down = False
        """Nothing listened at its port at the last check."""
        self.start_program: Callable[[], Awaitable[None]] | None = None
        """Starts its program, and returns once it listens, or cannot; None: its owner does that."""
        self.start_hint = ""
        """The end of the message that it does not run."""
        self._owner, self._on_change = owner, on_change  # the owner is this agent: a mark in the names of its models
        self._handles: list[DaemonModel] = []
        """Our models in it, one handle for each process: two processes may share one loaded model."""

        # The last check of the daemon.
        self._is_unsure = False
        """True if the last check could not determine which models are loaded."""
        self._silent_checks = 0  # in a row, without an answer
        self._last_silence_at = 0.0  # end of the last one, in seconds of the monotonic clock
        self._loaded_models: list[tuple[str, int | None]] = []  # at the last check: name, and bytes if known

        self._wake = asyncio.Event()  # set when `run` is to check at once
        self._is_cleaned_up = False  # True if no process has ended since our unused models were removed from the daemon
        # Held by `add_model` and the clean-up, which must not remove a model that is being added and has no handle yet.
        self._changing = asyncio.Lock()

    def build_name(self, spec: MetalProcessSpec) -> str:
        """Return the name of this process's model in the daemon; a later agent computes the same."""
        artifact = spec.artifact
        weights = [artifact.sha256] if artifact.sha256 else [artifact.source, artifact.revision]
        return self.daemon.build_name(self._owner, spec.model_name, digest_content(weights, spec.context_tokens))

    def start(self, model: str) -> DaemonModel:
        """Start to load `model`, which was added before."""
        return self._add_handle(DaemonModel(self, model, loaded=False))

    def adopt(self, model: str) -> DaemonModel | None:
        """Adopt a model that an earlier agent loaded; None if the last check did not find it.

        If the daemon was too busy to answer, the model is adopted: the next checks find out whether it is loaded.
        """
        return self._add_handle(DaemonModel(self, model, loaded=True)) if self.may_have(model) else None

    def may_have(self, model: str) -> bool:
        """Return True if the last check found `model` loaded, or could not find out."""
        return self._is_unsure or self.daemon.identify_content(model) in self._identify_contents(self._loaded_models)

    async def add_model(self, model: str, serving: Serving, on_progress: OnProgress) -> None:
        """Make the weights known to the daemon. Raises DaemonError."""
        async with self._changing:
            await self.daemon.add_model(model, serving, on_progress)

    async def unload(self, handle: DaemonModel, grace_seconds: float) -> None:
        """Unload the model of `handle`, and wait until the daemon does not list it; failures are retried for ever.

        Returns early once another process of ours uses the same weights, or once the daemon does not run. The wait
        compares contents, not names: a daemon may list a model under another name with the same weights.
        """
        model, failures = handle.model, 0
        while not self._list_others_with_same_weights(handle):  # once another handle has them, they stay
            try:
                await self.daemon.unload(model)
                async with asyncio.timeout(grace_seconds + _UNLOAD_AGAIN_SECONDS):
                    # The daemon may list the model for a while after it has accepted the call.
                    content = self.daemon.identify_content(model)
                    while content in self._identify_contents(await self.daemon.list_loaded()):  # noqa: ASYNC110 - no event tells it
                        await asyncio.sleep(_LEAVING_SECONDS)
            except DaemonError as error:
                if error.reason == NOT_RUNNING:
                    return
                log.warning("unload_failed", daemon=self.daemon.runtime, model=model, error=str(error))
                failures += 1
                await asyncio.sleep(backoff_seconds(failures, first=_LEAVING_SECONDS, most=_UNLOAD_AGAIN_SECONDS))
            except TimeoutError:  # the daemon has accepted the call, and the model is still there
                log.warning("unload_timed_out", daemon=self.daemon.runtime, model=model)
            else:
                return  # the model is gone

    def report_exit_of_others(self, handle: DaemonModel) -> None:
        """Report to all other processes with the model of `handle` that it is gone: it is unloaded for all of them."""
        for sharing_handle in self._list_others_with_same_weights(handle):
            message = f"{self.daemon.runtime} unloads {handle.model}, which does not answer; it is loaded again"
            sharing_handle.report_exit(EngineExit(reason="Unloaded", message=message))

    async def remove_unwanted(self, wanted: Callable[[], Iterable[MetalProcessSpec]]) -> None:
        """Delete models of ours that no process uses: those of an earlier agent, or of a process that was stopped.

        `wanted` returns the specs of processes that serve or will serve here; it is called for each model, as they may
        change meanwhile. A model with the same weights as one in use stays: the daemon may list both under its name.
        Nothing is done while the daemon cannot be used, nor again before a process has ended or the daemon has become
        usable again. Raises DaemonError, after which the next call tries again.
        """
        if self._is_cleaned_up or self.problem:
            return
        async with self._changing:
            self._is_cleaned_up = True  # set first: the end of a process meanwhile makes it False again
            try:
                for model in sorted(await self.daemon.list_marked(self._owner)):  # those with our mark in their names
                    specs = [spec for spec in wanted() if spec.runtime == self.daemon.runtime]
                    used_models = {*map(self.build_name, specs), *(handle.model for handle in self._handles)}
                    used_contents = {self.daemon.identify_content(name) for name in used_models}
                    if self.daemon.identify_content(model) not in used_contents:
                        log.info("daemon_model_removed", daemon=self.daemon.runtime, model=model)
                        await self.daemon.remove(model)
            except BaseException:
                self._is_cleaned_up = False  # the next call tries again
                raise

    def list_loaded(self) -> list[LoadedModel]:
        """Return the models that were in memory at the last check."""
        # By content: the daemon may list our model under another name.
        ours = {self.daemon.identify_content(handle.model) for handle in self._handles}
        return [
            LoadedModel(name, size, self.daemon.identify_content(name) in ours) for name, size in self._loaded_models
        ]

    def forget(self, handle: DaemonModel) -> None:
        """Stop watching `handle`; the next clean-up may remove its model."""
        self._is_cleaned_up = False
        if handle in self._handles:
            self._handles.remove(handle)

    async def run(self) -> None:
        """Check the daemon at intervals and when a model was added, until cancelled; then close its connections."""
        try:
            while True:
                await self.check_models()
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_SECONDS if self._handles or self.problem else IDLE_SECONDS):
                        await self._wake.wait()  # until a model is added
        finally:
            await self.daemon.close()

    async def ensure_running(self) -> None:
        """Check the daemon, and have it started if nothing listens."""
        await self.check_models()
        if await self.start_if_down():
            await self.check_models()

    async def start_if_down(self) -> bool:
        """Start the daemon, if nothing listened at the last check and that is wanted; return whether it was tried."""
        if not self.is_down or self.start_program is None:
            return False
        await self.start_program()
        return True

    async def check_models(self) -> None:
        """Find out which models are loaded and whether the daemon is usable; report the exit of models that are gone.

        `on_change` is called if it became usable or unusable.
        """
        was_usable = not self.problem
        if self._handles or self.daemon.installed():
            await self._list_loaded_models()
        else:
            self.problem, self._loaded_models = f"{self.daemon.runtime} is not installed here", []
            self._is_unsure = False  # nothing is installed that could have a model loaded
        is_usable = not self.problem
        if is_usable != was_usable:
            log.info("daemon_usable_changed", daemon=self.daemon.runtime, usable=is_usable, problem=self.problem)
            self._is_cleaned_up = False  # a daemon that is back may list models that were not seen before
            self._on_change()

    async def _list_loaded_models(self) -> None:
        """Ask the daemon for its loaded models, note the outcome, and report the exit of our models that are gone.

        Three outcomes: an answer clears `problem`, and a model that it lacks has exited. An error sets `problem`, and
        all our models have exited if the daemon does not run, refuses us or is silent; after another error they may
        still serve. The first checks in a row without an answer change none of this, since the daemon may be busy.
        """
        # A handle is one process of ours whose model is in the daemon.
        watched = [handle for handle in self._handles if handle.loaded]
        asked_at = time.monotonic()

        try:
            self._loaded_models = await self.daemon.list_loaded()
        except DaemonError as error:
            self.is_down = error.reason == NOT_RUNNING
            self._is_unsure = not self.is_down  # a daemon that runs may still have its models
            if self._is_excused(error, asked_at):
                return  # too few silent checks in a row
            self.problem = str(error)
            if self.is_down:
                self.problem, self._loaded_models = self.problem + self.start_hint, []
            if error.reason in {NOT_RUNNING, UNAUTHORIZED, SILENT}:
                # Even a model that is still loaded cannot be served now.
                for handle in watched:
                    handle.report_exit(EngineExit(reason=error.reason, message=self.problem))
        except Exception:  # a defect here must not end the engines of this host
            log.exception("daemon_check_crashed", daemon=self.daemon.runtime)
            self._is_unsure = True
        else:
            self.problem, self.is_down, self._is_unsure, self._silent_checks = "", False, False, 0
            loaded_contents = self._identify_contents(self._loaded_models)
            for handle in watched:
                if self.daemon.identify_content(handle.model) not in loaded_contents:
                    message = (
                        f"{self.daemon.runtime} has unloaded {handle.model}: by hand, to make room for another model, "
                        "or because it was restarted; the model is loaded again"
                    )
                    handle.report_exit(EngineExit(reason="Unloaded", message=message))

    def _is_excused(self, error: DaemonError, asked_at: float) -> bool:
        """Count a check that got no answer; return True if that were few in a row, so that the daemon may be busy.

        `asked_at` is the start of the check. Checks that overlapped, as for several processes, count as one. Any
        other error ends the count.
        """
        if error.reason != SILENT:
            self._silent_checks = 0
            return False
        overlaps_last_silence = asked_at < self._last_silence_at  # it began before the last silent check ended
        if not overlaps_last_silence:
            self._silent_checks += 1
            self._last_silence_at = time.monotonic()
        return self._silent_checks < SILENT_CHECKS

    def _identify_contents(self, models: Iterable[tuple[str, int | None]]) -> set[str]:
        """Return the identities of the weights of models in the daemon; see `Daemon.identify_content`."""
        return {self.daemon.identify_content(name) for name, _ in models}

    def _list_others_with_same_weights(self, handle: DaemonModel) -> list[DaemonModel]:
        """Return the handles of other processes whose model has the same weights in memory."""
        content = self.daemon.identify_content(handle.model)  # the same for models with the same weights
        return [
            other
            for other in self._handles
            if other is not handle and self.daemon.identify_content(other.model) == content
        ]

    def _add_handle(self, handle: DaemonModel) -> DaemonModel:
        """Watch the model of `handle`, have the daemon checked soon, and return the handle."""
        self._handles.append(handle)
        self._wake.set()
        return handle


def build_daemons(folder: Path, allowed_networks: Networks = ()) -> "Daemons":
    """Return all daemons that may run on this host, whether they run or not; see `Host` for the networks."""
    return Daemons(folder, [runtime.daemon(allowed_networks) for runtime in RUNTIMES.values() if runtime.daemon])


class Daemons:
    """The shared daemons of this host, as the agent whose state is in `folder` uses them."""

    def __init__(self, folder: Path, daemons: Iterable[Daemon]) -> None:
        """Prepare the use of each daemon; none is asked before `check_models` or `run`."""
        owner = owner_mark(str(folder))  # a part of the names of our models, by which a later agent knows them
        self._listeners: list[Callable[[str], None]] = []
        self._shared: dict[str, SharedDaemon] = {}
        for daemon in daemons:
            self._shared[daemon.runtime] = SharedDaemon(daemon, owner, partial(self._notify, daemon.runtime))

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the runtime of each daemon that becomes usable or unusable."""
        self._listeners.append(listener)

    def get(self, runtime: str) -> SharedDaemon | None:
        """Return the daemon of this runtime; None for a runtime with processes of its own."""
        return self._shared.get(runtime)

    def usable(self) -> list[str]:
        """Return the runtimes whose daemon runs and answers us."""
        return [name for name, shared in self._shared.items() if not shared.problem]

    def list_loaded(self) -> list[LoadedModel]:
        """Return the models that all daemons hold in memory; those that are not ours have no reservation."""
        return [model for shared in self._shared.values() for model in shared.list_loaded()]

    async def check_models(self) -> None:
        """Check each daemon once, to find out which can be used."""
        await asyncio.gather(*(shared.check_models() for shared in self._shared.values()))

    async def remove_unwanted(self, wanted: Callable[[], Iterable[MetalProcessSpec]]) -> None:
        """Remove from each daemon the models of ours that serve none of these processes."""
        for runtime, shared in self._shared.items():
            try:
                await shared.remove_unwanted(wanted)
            except DaemonError as error:
                log.warning("daemon_cleanup_failed", daemon=runtime, error=str(error))
            except Exception:  # a defect here must not end the engines of this host
                log.exception("daemon_cleanup_failed", daemon=runtime)

    def _notify(self, runtime: str) -> None:
        """Tell all listeners that a daemon became usable or unusable."""
        for listener in self._listeners:
            listener(runtime)

    async def run(self) -> None:
        """Check all daemons at intervals until cancelled."""
        async with asyncio.TaskGroup() as group:
            for shared in self._shared.values():
                group.create_task(shared.run())
