"""Serves on this machine alone: the agent's supervisor, ledger, weights and proxy, told what to run by files.

Models are inspected here, as a Job does it in a cluster, and each finding decides anew what runs. It ends in one of two
ways: everything is drained and stopped, or everything goes on for an agent that joins this machine to a cluster.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import structlog

from artifacts.errors import ArtifactError
from artifacts.inspect import Inspection, inspect
from artifacts.source import parse
from controller.plan import Key
from crds.model import Model
from devices import limits, pressure
from gateway.proxy.client import ProxyRefusedError, ProxyUnreachableError
from kube.backoff import backoff_seconds
from metal_agent import daemons, spawn
from metal_agent.ledger import Ledger
from metal_agent.peaks import Peaks
from metal_agent.pressure import Action
from metal_agent.proxy import Proxy
from metal_agent.records import Records
from metal_agent.runner import Host, Runner
from metal_agent.start import StartError
from metal_agent.supervisor import Supervisor
from metal_agent.usage import Usage
from metal_agent.watchdog import Senses, Watchdog
from metal_agent.weights import Weights
from standalone import desired
from standalone.ask import AskError
from standalone.desired import Decision
from standalone.exposure import Exposed
from standalone.manifests import Wanted

FILE_ROOT: Final = Path("/")
"""Who runs this names files of his own."""
_FIRST_RETRY_SECONDS: Final = 1.0
_LAST_RETRY_SECONDS: Final = 60.0
_CONFIGURE_AGAIN_SECONDS: Final = 0.2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Options:
    """What the owner says."""

    folder: Path
    """State folder, owned by the caller."""
    port: int
    """Of the endpoint on loopback; 0 lets the kernel choose."""
    endpoint: str
    """Hub of hf:// sources."""
    token: str | None = None
    """Download token."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the owner asks for while it runs."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Drain and stop everything."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """Wait for no running request."""
    hand_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Leave everything running."""


class Changes:
    """Counts what happens, for any number of tasks that look again after it."""

    def __init__(self) -> None:
        self.count = 0
        self._happened = asyncio.Event()

    def note(self) -> None:
        """Something happened."""
        self.count += 1
        self._happened.set()
        self._happened = asyncio.Event()

    async def after(self, seen: int) -> int:
        """Wait until there was more than was seen, and return the new count."""
        while self.count == seen:
            await self._happened.wait()
        return self.count


class Machine:
    """All that runs here. Raises StartError and OSError."""

    def __init__(
        self,
        wanted: Wanted,
        options: Options,
        session: aiohttp.ClientSession,
        ledger: Ledger,
        wishes: Wishes,
    ) -> None:
        self.wanted = wanted
        self._decisions: dict[Key, Decision] | None = None
        self.models: dict[Key, Model] = dict(wanted.models)
        """With what is known of each so far."""
        self.runners: dict[str, Runner] = {}
        self.ledger = ledger
        self.wishes = wishes
        self.changes = Changes()
        self._options = options
        self._reconfigure = asyncio.Event()
        self._proxy = Proxy(options.folder, self._note)
        self.exposed = Exposed(self._proxy, self.runners, options.port, wishes.hurry)
        senses = Senses(read=pressure.read, idle_seconds=self.exposed.idle_seconds, ledger=ledger)
        self.watchdog = Watchdog(options.folder / "pressure.json", self.runners, senses, self._pressed)
        peaks = Peaks(options.folder / "peaks.json")
        shared = daemons.of_this_machine(options.folder)
        self._usage = Usage(self.runners, ledger, peaks, read=pressure.read, changed=self._note, loaded=shared.loaded)
        self._host = Host(
            folder=options.folder,
            records=Records(options.folder / "processes"),
            weights=Weights(options.folder / "weights", FILE_ROOT),
            ledger=ledger,
            session=session,
            exposure=self.exposed,
            secret=lambda _namespace, _name: options.token,
            changed=lambda _runner: self._note(),
            daemons=shared,
            hold=self.watchdog.hold,
            peaks=peaks,
            look=self._usage.look,
        )

    @property
    def decisions(self) -> Mapping[Key, Decision]:
        """What is decided for each service, by what was known of the Models when that was last asked."""
        if self._decisions is None:
            # Once for each finding: a view asks twice a second, and many services take long.
            self._decisions = {
                key: desired.decide(service, self.models) for key, service in self.wanted.services.items()
            }
        return self._decisions

    def replicas(self, key: Key) -> list[Runner]:
        """Return what is there of one service."""
        return [runner for runner in self.runners.values() if runner.assignment.service == tuple(key)]

    async def reachable(self, key: Key) -> tuple[str, str]:
        """Wait until a service answers; its base URL and the name of its model.

        Raises:
            AskError: it does not, and will not soon.
        """
        seen = -1
        while True:
            seen = await self.changes.after(seen)
            router, replicas = self.exposed.router, self.replicas(key)
            if router and router.error:
                raise AskError(f"no endpoint: {router.error}; give another with --port")
            if router and key in self.exposed.accepted:
                return f"http://{router.address}:{router.port}", key.name
            problem = self.decisions[key].problem
            if problem and problem.phase in {"Failed", "Suspended"}:
                raise AskError(f"{key.name}: {problem.message}")
            if any(runner.state.phase in {"Failed", "Rejected"} for runner in replicas):
                told = dict.fromkeys(runner.state.message for runner in replicas if runner.state.message)
                raise AskError(f"{key.name}: {'; '.join(told)}")

    async def run(self) -> None:
        """Serve until the owner wishes to stop, which ends everything, or to hand over, which leaves it running.

        Raises:
            StartError: the engines of a cluster run from this state folder, or it cannot be found out what does.
        """
        self._refuse_clusters_engines()
        limits.raise_descriptors()
        self._proxy.adopt()
        try:
            async with asyncio.TaskGroup() as group:
                await self._serve(group)
        except ExceptionGroup as ended:
            if refused := ended.subgroup(StartError):
                raise refused.exceptions[0] from None
            if ended.split(_Over)[1] is not None:
                raise
            log.info("over", handed_over=self.wishes.hand_over.is_set(), processes=len(self.runners))

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        supervisor = Supervisor(self._host, self.runners, group)
        try:
            await supervisor.recover([self._proxy.process.pid] if self._proxy.process else [])
        except OSError as error:
            raise self._unreadable(error) from error
        serving = [
            group.create_task(self._proxy.run()),
            group.create_task(self._expose()),
            group.create_task(self.watchdog.run()),
            group.create_task(self._usage.run()),
        ]
        self._decide(supervisor)
        inspecting = [group.create_task(self._inspect(supervisor, key)) for key in self.models]
        await _first(self.wishes.stop, self.wishes.hand_over)
        if not self.wishes.hand_over.is_set():
            await _cancel(inspecting)
            await self._stop(supervisor)
            await _cancel(serving)
            await self._proxy.end()
        raise _Over

    def _refuse_clusters_engines(self) -> None:
        """Refuse to stop what a cluster runs here, which the list of our files does not have."""
        try:
            records = self._host.records.load()
        except OSError as error:
            raise self._unreadable(error) from error
        for record in records.values():
            if record.assignment.is_standalone or record.identity is None:
                continue
            if spawn.identify(record.identity.pid) == record.identity:
                raise StartError(
                    f"{record.namespace}/{record.name} runs here for a cluster: start `pomona agent` again and remove "
                    f"it there, or serve beside it with --state-dir DIR instead of {self._options.folder}"
                )

    def _unreadable(self, error: OSError) -> StartError:
        return StartError(f"cannot find out what runs from --state-dir {self._options.folder}: {error}")

    def _note(self) -> None:
        self._reconfigure.set()
        self.changes.note()

    def _pressed(self, _action: Action, note: str) -> None:
        log.warning("memory pressure", note=note)
        self._note()

    def _decide(self, supervisor: Supervisor) -> None:
        """Run what is decided by what is known now."""
        self._decisions = None
        assigned = [each for decision in self.decisions.values() for each in decision.assignments]
        if any(model.status.phase == "Pending" for model in self.models.values()):
            # What an earlier run left may be what is decided once that Model is known.
            supervisor.add(assigned)
        else:
            supervisor.assign(assigned)
            self.watchdog.keep({each.uid for each in assigned})
        self._note()

    async def _inspect(self, supervisor: Supervisor, key: Key) -> None:
        """Read the header of a Model until that succeeds or never will."""
        failures = 0
        while True:
            try:
                self.models[key] = await self._inspected(self.models[key])
            except ArtifactError as error:
                self.models[key] = desired.failed(self.models[key], error)
                log.warning("model not inspected", model="/".join(key), reason=error.reason, error=error.message)
                self._decide(supervisor)
                if not error.retryable:
                    return
            else:
                self._decide(supervisor)
                return
            failures += 1
            await asyncio.sleep(backoff_seconds(failures, first=_FIRST_RETRY_SECONDS, most=_LAST_RETRY_SECONDS))

    async def _inspected(self, model: Model) -> Model:
        """Return the Model with what can be known of it; of Ollama's library that is what its owner states."""
        if parse(model.spec.source).is_library:
            return desired.stated(model)
        return desired.inspected(model, await self._read(model))

    async def _read(self, model: Model) -> Inspection:
        token = self._options.token if model.spec.source_secret_ref else None
        return await inspect(
            parse(model.spec.source),
            token=token,
            endpoint=self._options.endpoint,
            file_root=FILE_ROOT,
            sha256=model.spec.sha256,
        )

    async def _expose(self) -> None:
        """Keep the proxy told, for ever."""
        while True:
            await self._reconfigure.wait()
            self._reconfigure.clear()
            if not self._proxy.answers:
                continue
            try:
                if await self.exposed.configure():
                    self.changes.note()
            except (ProxyUnreachableError, ProxyRefusedError) as error:
                log.warning("proxy not told", error=str(error))
                await asyncio.sleep(_CONFIGURE_AGAIN_SECONDS)
                self._reconfigure.set()

    async def _stop(self, supervisor: Supervisor) -> None:
        """Drain and stop everything; returns when the last engine is gone."""
        supervisor.assign([])
        seen = self.changes.count
        while any(runner.state.phase != "Stopped" for runner in self.runners.values()):
            seen = await self.changes.after(seen)


class _Over(Exception):  # noqa: N818 - no error
    """Ends what watches over engines for ever; engines that still run then go on."""


async def _first(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
