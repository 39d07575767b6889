"""Run the services of the files on this machine: the same host as the agent's, without an API server.

Models are inspected here, as by a Job in a cluster, and after each result the assignments are decided again. The run
ends in one of two ways: everything is drained and stopped, or all engines keep running for an agent that takes over.
"""

import asyncio
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import structlog

from artifacts.foreign_stores import find_foreign_stores
from artifacts.repositories.address_policy import Networks
from artifacts.repositories.repository import SourceAccess
from crds.model import Model
from devices import limits
from gateway.change_counter import ChangeCounter
from gateway.http.control_client import ControlRefusedError, ControlUnreachableError
from kube.resources import ObjectKey
from metal_agent.assignments import Assignment
from metal_agent.host import Host, HostCallbacks
from metal_agent.lifecycle import GRACE_SECONDS
from metal_agent.memory.ledger import Ledger
from metal_agent.native.process import is_running
from metal_agent.options import StartError
from metal_agent.supervise.records import Record
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.proxy_process import Proxy
from standalone import desired
from standalone.absent_engines import find_absent
from standalone.ask import AskError
from standalone.client_access import ClientAccess
from standalone.daemon_starter import DaemonStarter
from standalone.desired import Decision
from standalone.exposure import StandaloneExposure
from standalone.inspections import ModelInspector
from standalone.manifests import Manifests
from standalone.model_lookup import ModelLookup
from standalone.on_demand import OnDemandLoader
from standalone.served_facts import find_facts
from standalone.service_decisions import ServiceDecisions
from standalone.wanted_processes import WantedProcesses, find_wanted
from standalone.weights_prefetch import WeightsPrefetch
from standalone.weights_pull import WeightsPuller

FILE_ROOT: Final = Path("/")
"""file:// sources may be any file that the user can read."""
_FIRST_RETRY_SECONDS: Final = 1.0
_LAST_RETRY_SECONDS: Final = 60.0
ABORT_SECONDS: Final = GRACE_SECONDS + 2
"""Time between the second Ctrl-C and the end: an engine that ignores SIGTERM is killed in it."""
_CONFIGURE_AGAIN_SECONDS: Final = 0.2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StandaloneOptions:
    """Options of `pomona up`."""

    folder: Path
    """State folder, owned by the caller."""
    port: int
    """Port of the endpoint; 0 lets the kernel choose."""
    endpoint: str
    """URL of the hub for hf:// sources."""
    token: str | None = None
    """Bearer token for the hub."""
    allowed_networks: Networks = ()
    """Private networks that sources may lead to."""
    access: ClientAccess = field(default_factory=ClientAccess)
    """The clients that the endpoint serves."""
    start_daemons: bool = False
    """Start the daemons that services need, if they are installed and do not run."""

    @property
    def source_access(self) -> SourceAccess:
        """The settings to read sources, with the token for the hub."""
        return SourceAccess(
            token=self.token,
            endpoint=self.endpoint,
            file_root=FILE_ROOT,
            allowed_networks=self.allowed_networks,
        )


@dataclass(frozen=True, slots=True)
class UserSignals:
    """Requests of the user, which arrive as signals of the operating system."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Drain and stop everything."""
    abort: asyncio.Event = field(default_factory=asyncio.Event)
    """Abort running requests instead of draining them."""
    hand_over: asyncio.Event = field(default_factory=asyncio.Event)
    """End, and leave everything running for an agent."""


class Machine:
    """The host of `pomona up`: inspected Models, decisions, runners and the proxy. Raises StartError and OSError."""

    def __init__(
        self,
        manifests: Manifests,
        options: StandaloneOptions,
        session: aiohttp.ClientSession,
        ledger: Ledger,
        signals: UserSignals,
    ) -> None:
        """Build the host, its proxy and its inspector; nothing is started before `run`.

        Args:
            manifests: the Models and services of the files.
            options: the options of the command line.
            session: the HTTP session for downloads and for questions to engines.
            ledger: the memory budget of this machine.
            signals: the requests of the user.
        """
        self.runners: dict[str, Runner] = {}  # by uid; changed by the supervisor only
        self.ledger = ledger
        self.signals = signals
        self.changes = ChangeCounter()  # counts changes of processes, proxy and memory
        self._options = options
        self._assigned: tuple[Assignment, ...] = ()
        """The processes that the supervisor should run, as it was told last."""
        self.ever_served: set[ObjectKey] = set()
        """The services that have served since the start."""
        self.failure = ""
        """The reason why nothing can be served, for which `run` has ended by itself; "" if the user ended it."""
        self._reconfigure = asyncio.Event()
        """Set when the proxy may need another configuration."""

        # The parts that do the work; `run` starts them.
        self._proxy = Proxy(options.folder, self._note_change)
        self.exposure = StandaloneExposure(self._proxy, self.runners, options.port, options.access, signals.abort)
        self._host = Host(
            options.folder,
            ledger=ledger,
            runners=self.runners,
            exposure=self.exposure,
            callbacks=HostCallbacks(lambda _runner: self._note_change(), self._note_change, self._note_pressure_action),
            session=session,
            secret=lambda _namespace, _name: options.token,
            file_root=FILE_ROOT,
            allowed_networks=options.allowed_networks,
            foreign=find_foreign_stores(),
            proxy=self._proxy,
        )
        self._daemons = DaemonStarter(options.folder, self._host.daemons, may_start=options.start_daemons)
        context = self._host.context
        self.on_demand = OnDemandLoader(self, context, self._proxy)
        self.exposure.find_absent = functools.partial(find_absent, self)
        self.exposure.find_facts = functools.partial(find_facts, self)
        self.prefetch = WeightsPrefetch(context, self._list_sleeping, self.changes)
        inspector = ModelInspector(options.folder / "inspections", context.weights.store, options.source_access)
        self._services = ServiceDecisions(
            manifests, inspector, options.endpoint, budget_bytes=lambda: ledger.budget_bytes, changed=self.run_wanted
        )
        foreign = context.weights.store.foreign
        self.lookup = ModelLookup(options.folder / "names", options.source_access, inspector, foreign)
        self.puller = WeightsPuller(context.weights, inspector, options.source_access, self.lookup, ledger.budget_bytes)

    @property
    def manifests(self) -> Manifests:
        """The Models and services that are served."""
        return self._services.manifests

    @property
    def models(self) -> Mapping[ObjectKey, Model]:
        """The Models, each with the status that is known so far."""
        return self._services.models

    @property
    def decisions(self) -> Mapping[ObjectKey, Decision]:
        """The decision for each service, from the present status of the Models."""
        return self._services.decisions

    def replace_manifests(self, manifests: Manifests) -> None:
        """Serve other manifests from now on; what is equal in them goes on. Once everything is stopped, do nothing."""
        if not self.signals.stop.is_set():
            self.on_demand.follow_manifests(manifests)
            self._services.replace_manifests(manifests)

    def list_replicas(self, key: ObjectKey) -> list[Runner]:
        """Return the replicas of one service, without those of a model on demand that have ended."""
        replicas = [runner for runner in self.runners.values() if runner.assignment.service == tuple(key)]
        is_unwanted = self.on_demand.is_unwanted(key)
        return [runner for runner in replicas if not is_unwanted or runner.state.exists]

    async def wait_until_reachable(self, key: ObjectKey) -> tuple[str, str]:
        """Wait until the endpoint forwards to a service; return its base URL and the name of the model in requests.

        Raises:
            AskError: the endpoint cannot be opened, the service is invalid or suspended, or one of its replicas failed.
        """
        seen_changes = -1  # less than any count, so that the first wait returns at once
        while True:
            seen_changes = await self.changes.wait_past(seen_changes)
            replicas = self.list_replicas(key)
            if self.exposure.problem:
                raise AskError(self.exposure.problem)

            if self.exposure.url and key in self.exposure.forwarded_services:
                return self.exposure.url, key.name  # requests name the service as their model

            # It is not reachable yet: does it still make sense to wait?
            problem = self.decisions[key].problem
            if problem and problem.phase in {"Failed", "Suspended"}:
                raise AskError(f"{key.name}: {problem.message}")
            if any(runner.state.phase in {"Failed", "Rejected"} for runner in replicas):
                messages = dict.fromkeys(runner.state.message for runner in replicas if runner.state.message)
                raise AskError(f"{key.name}: {'; '.join(messages)}")

    async def run(self) -> None:
        """Serve until one of these ends it.

        * The user stops it, or nothing can be served (`failure` says why): all engines are drained and stopped.
        * An agent takes over: all engines keep running.

        Raises:
            StartError: engines of a cluster run from this state folder, its records cannot be read, or another program
                listens on the port.
        """
        await self._refuse_cluster_engines()
        limits.raise_descriptor_limit()
        try:
            async with asyncio.TaskGroup() as group:
                await self._serve(group)
        except ExceptionGroup as ended:
            if refused := ended.subgroup(StartError):
                raise refused.exceptions[0] from None

            # `_serve` ends the loops of the group by raising _ServingEnded: any other error is a failure.
            _, other_errors = ended.split(_ServingEnded)
            if other_errors is not None:
                raise
            log.info("pomona_up_ended", handed_over=self.signals.hand_over.is_set(), processes=len(self.runners))

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        """Start everything in `group`, wait for the end, and end the engines unless an agent takes over.

        1. Adopt the proxy and the engines that an earlier run left. A proxy that still runs has the port already;
           otherwise the port must be free.
        2. Start the loops, and the processes that can be decided already. Then inspect each Model, after which further
           processes start.
        3. At a stop, drain and stop the processes before the proxy, which still has their last requests. At a
           hand-over, leave all of them running.

        Raises:
            _ServingEnded: in any case at the end: it cancels the loops of `group`.
            StartError: the records of engines cannot be read, or the port is in use.
        """
        try:
            self._daemons.adopt()  # step 1
            await self._host.recover(group)
        except OSError as error:
            raise self._unreadable_error(error) from error
        if not self._proxy.pids():
            self.exposure.refuse_used_port()

        # serving: the loops that a drain needs
        self.on_demand.adopt()
        serving = [*self._host.start_loops(group), group.create_task(self._configure_proxy())]
        self.run_wanted()  # step 2
        serving.append(group.create_task(self._end_if_nothing_serves()))
        self._services.inspect_in(group)
        loops = (self._follow_processes(), self.on_demand.run(), self.prefetch.run())
        deciding = [group.create_task(loop) for loop in loops]

        await _wait_for_any(self.signals.stop, self.signals.hand_over)  # step 3
        if not self.signals.hand_over.is_set():
            await self._services.end_inspections()
            await _cancel_all(deciding)
            await self._drain_and_stop()
            await _cancel_all(serving)  # only now, as a drain needs the proxy
            await self._proxy.end()
            await self._daemons.end()
        self._daemons.release()
        raise _ServingEnded

    async def _refuse_cluster_engines(self) -> None:
        """Raise StartError if the records name an engine that a cluster has placed here and that may still run.

        The files do not list such an engine, so that this run would stop it.
        """
        try:
            records = self._host.context.records.load()
        except OSError as error:
            raise self._unreadable_error(error) from error
        for record in records.values():
            if not record.assignment.is_standalone and await self._may_run(record):
                raise StartError(
                    f"the engine of {record.namespace}/{record.name}, which a cluster has placed on this machine, "
                    f"still runs from --state-dir {self._options.folder}: start the agent again and end it by "
                    "`pomona agent stop`, or serve beside it from another --state-dir"
                )

    async def _may_run(self, record: Record) -> bool:
        """Return True if the engine of `record` runs, or if that cannot be found out. Raises OSError.

        A record without the identity of a process is of a model in a daemon such as Ollama: it runs while it is
        loaded. Without such a daemon it does not run.
        """
        if record.identity is not None:
            return is_running(record.identity)
        daemon = self._host.context.daemons.get(record.spec.runtime)
        if daemon is None:
            return False
        await daemon.check_models()
        return daemon.may_have(record.model)

    def _unreadable_error(self, error: OSError) -> StartError:
        """Return the error that the records of engines cannot be read."""
        return StartError(f"cannot read which engines run from --state-dir {self._options.folder}: {error}")

    def _note_change(self) -> None:
        """Request a configuration of the proxy, and wake all tasks that wait for a change."""
        self._reconfigure.set()
        self.changes.note()

    def _note_pressure_action(self, _action: object, note: str) -> None:
        """Log a step against memory pressure, and note the change."""
        log.warning("memory_pressure_handled", note=note)
        self._note_change()

    def run_wanted(self) -> None:
        """Run the processes that are wanted, and nothing else; once everything is stopped, do nothing."""
        if self.signals.stop.is_set():
            return
        wanted, sleeping = self._find_wanted(), self._list_sleeping()
        self._assigned = wanted.assignments
        self._host.supervisor.assign(
            wanted.assignments,
            is_complete=wanted.is_complete,
            sleeping=[assignment.spec for assignment in sleeping.values()],
        )
        if wanted.is_complete:
            self._host.retain_holds({assignment.uid for assignment in wanted.assignments} | set(sleeping))
        self._note_change()

    def _find_wanted(self) -> WantedProcesses:
        """Return the processes that should run now."""
        return find_wanted(self.decisions, self.runners.values(), self.ledger, self.on_demand.is_unwanted)

    async def _follow_processes(self) -> None:
        """Run other processes when those that were started serve, or have ended, until cancelled."""
        seen_changes = -1
        while True:
            seen_changes = await self.changes.wait_past(seen_changes)
            uids = {assignment.uid for assignment in self._assigned}
            ended = [uid for uid in uids if (runner := self.runners.get(uid)) and runner.state.has_ended]
            if ended or self._find_wanted().assignments != self._assigned:
                self.run_wanted()

    def _list_sleeping(self) -> dict[str, Assignment]:
        """Return the assignments of models on demand that are not wanted now, by uid."""
        return {
            assignment.uid: assignment
            for key, decision in self.decisions.items()
            if self.on_demand.is_unwanted(key)
            for assignment in decision.assignments
        }

    async def _end_if_nothing_serves(self) -> None:
        """Set `failure` and the signal to stop, once the endpoint cannot be opened or no service will serve any more.

        A service may still serve if it has served before, or if its failure may pass without the user. Services
        that the user has suspended do not count.
        """
        seen_changes = -1  # less than any count
        while not self.failure:
            seen_changes = await self.changes.wait_past(seen_changes)
            if self.exposure.problem:
                self.failure = self.exposure.problem
                continue

            failures = dict[str, str]()  # by service; "" for one that may still serve
            for key, decision in self.decisions.items():
                if decision.problem is not None and decision.problem.phase == "Suspended":
                    continue
                states = [runner.state for runner in self.list_replicas(key)]
                self.ever_served.update(key for state in states if state.phase == "Ready")
                # The next request for a model on demand loads it again, so that only its decision counts.
                failure = desired.describe_failure(decision, [] if self.on_demand.has(key) else states)
                failures[key.name] = "" if key in self.ever_served else failure

            if failures and all(failures.values()):
                self.failure = "; ".join(f"{name}: {failure}" for name, failure in failures.items())
        self.signals.stop.set()

    async def _configure_proxy(self) -> None:
        """Send the proxy a new configuration after each change, until cancelled.

        If the proxy refuses it, or does not answer the request, it is sent again after a short pause. While the proxy
        is known not to answer, nothing is sent: that it answers again is a change, too.
        """
        while True:
            await self._reconfigure.wait()  # set by each change
            self._reconfigure.clear()
            if not self._proxy.answers:
                continue

            # `configure` returns True if the endpoint, or a service that it forwards to, is another than before.
            try:
                if await self.exposure.configure():
                    self.changes.note()
            except (ControlUnreachableError, ControlRefusedError) as error:
                log.warning("proxy_not_configured", error=str(error))
                await asyncio.sleep(_CONFIGURE_AGAIN_SECONDS)
                self._reconfigure.set()

    async def _drain_and_stop(self) -> None:
        """Drain and stop everything; return when the last engine has stopped, or soon after the user asked twice."""
        stopped = asyncio.create_task(self._host.stop_processes(self.changes))
        given_up = asyncio.create_task(self._wait_until_aborted())  # some time after a second Ctrl-C
        try:
            await asyncio.wait({stopped, given_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel_all([stopped, given_up])

    async def _wait_until_aborted(self) -> None:
        """Wait until the user has asked twice, and engines have had the time to end by force."""
        await self.signals.abort.wait()
        await asyncio.sleep(ABORT_SECONDS)

    def describe_left_engines(self) -> list[str]:
        """Return a message for each engine that did not end."""
        return [
            f"{runner.assignment.spec.service_name}: "
            + (runner.state.message or "its engine has not ended, and holds its memory until it does")
            for runner in self.runners.values()
            if runner.state.exists
        ]


class _ServingEnded(Exception):  # noqa: N818 - no error
    """Exception that cancels the loops of the task group; engines that still run keep running."""


async def _wait_for_any(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _cancel_all(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel the tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
