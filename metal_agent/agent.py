"""The agent of one host: it runs the processes that the API assigns to this host, and reports them to the API.

Each write to the API is a key of one queue and is computed from the state at the time of the write, so that no write is
lost by a failure or done twice. A process is removed only if a fresh and complete list of MetalProcesses lacks it, or
if it has a deletion mark: an API server that is down, slow or wrong removes none.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
import structlog
from msgspec import structs

from crds.meta import HOSTS_NAMESPACE
from crds.size import size_text
from devices import host, shutdown
from devices.facts import HostFacts
from gateway.http.control_client import ControlRefusedError, ControlUnreachableError
from gateway.proxy.build import BUILD
from kube.client import Client, Obj
from kube.errors import Forbidden
from kube.events import EventRecorder
from kube.queue import WorkQueue, run_workers
from kube.resources import METAL_PROCESSES, SECRETS, ObjectKey, Resource
from kube.store import Store
from kube.time import rfc3339
from kube.watch import Selection, reflect
from metal_agent import assignments
from metal_agent.change_counter import ChangeCounter
from metal_agent.cluster import host_status
from metal_agent.cluster.address import follow_address
from metal_agent.cluster.api_connection import ApiConnection, describe_identity
from metal_agent.cluster.events import HoldEvents
from metal_agent.cluster.exposure import ClusterExposure, ServicePorts, read_clocks
from metal_agent.cluster.host_lease import keep_host_lease
from metal_agent.cluster.host_tokens import HostTokens
from metal_agent.cluster.process_status import ProcessReporter
from metal_agent.cluster.reachability import ReachabilityListener
from metal_agent.control.agent_control import serve_control
from metal_agent.control.agent_status import AgentStatus, describe_processes
from metal_agent.exit_codes import forget_exit
from metal_agent.host import Host, HostCallbacks
from metal_agent.memory.ledger import Ledger, budget_bytes
from metal_agent.memory.pressure_policy import HoldAction
from metal_agent.metrics_listener import serve_metrics
from metal_agent.native import engine_command
from metal_agent.options import AgentOptions, StartError
from metal_agent.state_folder import identify_agent
from metal_agent.supervise import handover, keep_awake
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.proxy_process import Proxy

PATIENCE_SECONDS: Final = 10.0
"""Time that a starting agent waits for the API before it serves the last known assignments."""
_REPORT_SECONDS: Final = 60.0
"""Interval between two checks of this host's MetalHost and EndpointSlices, which may have been deleted."""
_EXPOSE_SECONDS: Final = 10.0
"""Interval between two tries to configure a proxy that cannot serve everything yet."""
_PROOF_SECONDS: Final = 5.0
"""Time for engines to answer after a gap; then the engines that answered are made ready without the others."""
_LAST_REPORT_SECONDS: Final = 10.0
"""Time for the last reports of an agent that has stopped everything."""
_WITHDRAWAL_SECONDS: Final = 5.0
"""Time for the API server to accept that a machine that shuts down withdraws its endpoints."""
_WORKERS: Final = 4
_RECONCILE_SECONDS: Final = 30.0
WorkKey = tuple[str, ...]
"""A key of the work queue: the kind of work, then the object of the work."""
_ASSIGN: Final[WorkKey] = ("assign",)
_LIST_AGAIN: Final[WorkKey] = ("list_again",)
_PROXY: Final[WorkKey] = ("proxy",)
_REPORT: Final[WorkKey] = ("host",)
_SLICES: Final[WorkKey] = ("slices",)
_EVENTS: Final[WorkKey] = ("events",)

log = structlog.get_logger()


class EverythingStopped(Exception):  # noqa: N818 - no error
    """Exception that cancels the loops of the agent's task group: everything was stopped on request."""


class Agent:
    """One host's agent."""

    def __init__(
        self,
        client: Client,
        session: aiohttp.ClientSession,
        options: AgentOptions,
        *,
        connection: ApiConnection,
        address: str,
        host_facts: HostFacts,
        ledger: Ledger,
    ) -> None:
        self._client, self.connection = client, connection
        self._options, self._name = options, options.name
        self._facts, self._ledger = host_facts, ledger
        self._store = Store()
        self._synced = asyncio.Event()
        self._queue: WorkQueue[WorkKey] = WorkQueue()
        self._identity = identify_agent(options.folder)
        self._renewed_once = asyncio.Event()
        """Set once this agent has the Lease of its name; before, it takes no new assignment and reports nothing."""
        self._last_known_file = assignments.LastKnownFile(options.folder / "assignments.json")
        self._last_known = self._last_known_file.load(options.name)
        self._tokens = HostTokens(self._store, options.name, self._last_known.secret)
        self._ports = ServicePorts(options.folder / "ports.json", options.first_port, options.last_port)
        self._proxy = Proxy(options.folder, self._proxy_changed)
        self._runners: dict[str, Runner] = {}
        self._claims_end: float | None = None
        """Monotonic time, in seconds, until which the cluster may claim engines that `pomona up` left running here."""
        self._may_have_slept = False
        """True if contact with the API was lost, as in a sleep of the machine, since engines were last checked."""
        self._started = datetime.now(UTC)
        self._stopping = asyncio.Event()
        """Set when everything is to be drained and stopped."""
        self._recovered = asyncio.Event()
        """Set once the engines that an earlier agent left running are adopted."""
        self._changes = ChangeCounter()
        self._exposed = ClusterExposure(
            client=client,
            host=options.name,
            address=address,
            proxy=self._proxy,
            ports=self._ports,
            runners=self._runners,
            tokens=self._tokens,
            tls=options.tls,
        )
        self._host = Host(
            options.folder,
            ledger=ledger,
            runners=self._runners,
            exposure=self._exposed,
            callbacks=HostCallbacks(self._process_changed, self._enqueue_report, self._hold_handled),
            session=session,
            secret=self._tokens.read,
            file_root=options.file_root,
            allowed_networks=options.allowed_networks,
            proxy=self._proxy,
            owner_policy=options.owner_policy,
        )
        self._add_reporters()

    def _add_reporters(self) -> None:
        """Add the parts that report to the cluster: reachability, Events and statuses."""
        client, name = self._client, self._name
        recorder = EventRecorder(client, "pomona.dev/metal-agent", name)
        self._host.daemons.subscribe(lambda _runtime: self._enqueue_report())
        address = self._exposed.address
        self._listener = ReachabilityListener(name, address, self._ports.list_spare, self._enqueue_report)
        self._ports.on_assign = self._listener.give_up
        self._hold_events = HoldEvents(client, recorder, name, self._runners)
        self._processes = ProcessReporter(client, self._store, recorder, name, self._exposed)
        self._exposed.traffic.on_change = lambda uid: self._enqueue(("process", uid))

    def _enqueue(self, *keys: WorkKey) -> None:
        """Add work to the queue."""
        for key in keys:
            self._queue.add(key)

    def _enqueue_report(self) -> None:
        """Enqueue a report of the host."""
        self._enqueue(_REPORT)

    async def run(self) -> None:
        """Adopt running engines and the proxy, then follow the API until cancelled.

        Raises StartError, and EverythingStopped after everything was stopped, each in a group.
        """
        address, budget_bytes = self._exposed.address, self._ledger.budget_bytes
        log.info("agent_started", host=self._name, address=address, budget_bytes=budget_bytes)
        with serve_control(self._options.folder, self._describe, self._stopping):
            forget_exit(self._options.folder)
            await self._run_loops()

    async def _run_loops(self) -> None:
        """Recover the engines, then run all loops until everything was stopped."""
        self._store.subscribe(self._object_changed)
        secret = Selection(SECRETS, HOSTS_NAMESPACE, field_selector=f"metadata.name={self._name}")
        assigned = Selection(METAL_PROCESSES, field_selector=f"spec.hostName={self._name}")
        async with asyncio.TaskGroup() as group:
            await self._recover(group)
            self._recovered.set()
            keep_awake_command = keep_awake.build_command(os.getpid()) if self._options.keep_awake else None
            loops = self._host.start_loops(group, keep_awake_command, has_benchmarks=self._options.benchmarks)
            group.create_task(run_workers(self._queue, self._reconcile, _WORKERS, _RECONCILE_SECONDS))
            group.create_task(reflect(self._client, self._store, secret))
            group.create_task(reflect(self._client, self._store, assigned, self._synced))
            address, server = self._exposed.address, self.connection.server
            group.create_task(follow_address(self._options, server, address, self._address_changed))
            group.create_task(self._listener.run())
            group.create_task(keep_host_lease(self._client, self._name, self._identity, self._lease_renewed))
            if self.connection.host_identity:
                group.create_task(self.connection.host_identity.keep_renewed(self._client))
            if self._options.metrics_place:
                group.create_task(serve_metrics(self._options.metrics_place, self._metrics_text))
            api_task = group.create_task(self._await_api())
            try:
                await self._stopping.wait()
            except asyncio.CancelledError:
                await self._withdraw_at_shutdown()
                raise
            api_task.cancel()
            await self._stop_everything(loops)
            raise EverythingStopped

    async def _stop_everything(self, loops: Collection[asyncio.Task[None]]) -> None:
        """Withdraw, drain and stop every process, report that, and end the proxy; the API server may be away."""
        log.info("agent_stopping", processes=len(self._runners))
        self._enqueue(_REPORT)
        served = set(self._exposed.services())
        await self._host.stop_processes(self._changes)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_REPORT_SECONDS):
                # Each of them alone: one that is refused must not keep the others from being written.
                reports = [*map(self._publish, served), *map(self._report_process, self._runners), self._report_host()]
                for outcome in await asyncio.gather(*reports, return_exceptions=True):
                    if isinstance(outcome, Exception):
                        log.warning("last_report_failed", error=str(outcome))
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
        await self._proxy.end()

    async def _withdraw_at_shutdown(self) -> None:
        """Withdraw all endpoints if this machine shuts down, which ends engines and proxy; else they serve on."""
        if not await asyncio.to_thread(shutdown.is_shutting_down):
            return
        log.info("machine_shuts_down", processes=len(self._runners))
        if self._renewed_once.is_set():  # before, another agent may have this name
            await self._exposed.withdraw_all(_WITHDRAWAL_SECONDS)

    def _describe(self) -> AgentStatus:
        """Return the status for the control socket."""
        return AgentStatus(
            host=self._name,
            version=BUILD,
            pid=os.getpid(),
            started_at=rfc3339(self._started),
            address=self._exposed.address,
            server=self.connection.server,
            connection=self.connection.status,
            identity=describe_identity(self.connection),
            holds=self._host.gate.list_holds(),
            ready=self._recovered.is_set() and (self._renewed_once.is_set() or self.connection.is_away),
            stopping=self._stopping.is_set(),
            budget_bytes=self._ledger.budget_bytes,
            available_bytes=self._ledger.available_bytes,
            processes=describe_processes(self._runners.values()),
        )

    async def _recover(self, group: asyncio.TaskGroup) -> None:
        """Adopt running engines and the proxy. Raises StartError if it cannot find them: they could run twice."""
        try:
            await self._host.recover(group)
        except OSError as error:
            raise StartError(
                f"cannot find the engines of an earlier agent, which still run: {error}; fix that and start again; "
                "if it is the record of one process, you may delete it: its model is then loaded again"
            ) from error

    async def _await_api(self) -> None:
        """Wait for the list of assignments and for the Lease; then enqueue the work that needs the API.

        If the list does not come in time, the last known assignments are run until it comes.
        """
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._synced.wait()
        except TimeoutError:
            log.warning("api_server_unreachable", serving_last_known=len(self._last_known.processes))
            self._host.supervisor.add(assignments.read_assignment(obj) for obj in self._last_known.processes)
            await self._synced.wait()
        await self._renewed_once.wait()
        self._enqueue(_ASSIGN, _REPORT, _SLICES, _EVENTS)

    def _object_changed(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Enqueue the work that a change in the store requires; a change of status alone was written by this agent."""
        if resource == SECRETS:
            self._enqueue(_PROXY)
        if old is None or new is None or _desired_state(old) != _desired_state(new):
            self._enqueue(_ASSIGN)
        if resource == METAL_PROCESSES and new and (old is None or old["metadata"]["uid"] != new["metadata"]["uid"]):
            # A process of the last known assignments runs before its object is known, and could not be reported.
            self._enqueue(("process", new["metadata"]["uid"]))

    def _lease_renewed(self) -> None:
        """Note a renewal of the Lease; after the first one and after a gap, have the assignments listed again."""
        self._renewed_once.set()
        is_first = self._exposed.freshness.renewed_at is None
        must_list_again = self._exposed.freshness.note_renewal(read_clocks())
        if must_list_again:
            self._may_have_slept = self._may_have_slept or not is_first
            self._enqueue(_LIST_AGAIN)

    async def _address_changed(self, address: str) -> None:
        """Serve at another address: withdraw the old one at once; the new one is ready once the proxy listens there."""
        self._exposed.move(address)
        self._listener.move(address)
        await self._client.reconnect()
        self._publish_all()
        self._enqueue(_PROXY, _REPORT)

    def _proxy_changed(self) -> None:
        """Configure the proxy if it answers again; if it has ceased to answer, make all endpoints not ready."""
        if self._proxy.answers:
            self._enqueue(_PROXY)
        else:
            self._exposed.proxied_uids = frozenset()
            self._publish_all()

    def _process_changed(self, runner: Runner) -> None:
        """Enqueue the work that a change of a process requires."""
        assignment = runner.assignment
        self._changes.note()
        self._enqueue(("process", assignment.uid))
        if runner.state.phase == "Fetching" and runner.progress:
            # Only the download advanced: no route, report or slice changes.
            return
        self._enqueue(_PROXY, _REPORT)
        if assignment.service.name and not assignment.is_standalone:
            self._enqueue(("slice", *assignment.service))
        if runner.state.phase == "Stopped":
            self._enqueue(_ASSIGN)

    def _hold_handled(self, step: HoldAction, note: str) -> None:
        """Enqueue the Event of a step by memory pressure or a pause of the owner, and the reports that it changes."""
        self._hold_events.add(step, note)
        uids = [step.uid] if step.uid else list(self._runners)
        self._enqueue(_REPORT, _EVENTS, *(("process", uid) for uid in uids))

    async def _publish(self, service: ObjectKey) -> float | None:
        """Write the slice of a service; return the seconds until the next try if the controller has not granted it."""
        before = self._exposed.find_problem(service)
        try:
            await self._exposed.publish(service)
        except Forbidden:
            if refusal := self._exposed.endpoints.refusals.get(service):
                return refusal.retry_seconds
            raise
        finally:
            if self._exposed.find_problem(service) != before:
                runners = self._exposed.services().get(service, [])
                self._enqueue(*(("process", runner.assignment.uid) for runner in runners))
        return None

    def _publish_all(self) -> None:
        """Enqueue the writes of all slices and of the status of all processes."""
        self._enqueue(*(("slice", *service) for service in self._exposed.services()))
        self._enqueue(*(("process", uid) for uid in self._runners))

    async def _reconcile(self, key: WorkKey) -> float | None:
        """Do the work of one key; return the seconds until the next time, if any."""
        match key:
            case ("assign",):
                return self._assign()
            case ("list_again",):
                await self._list_again()
            case ("proxy",):
                return await self._configure_proxy()
            case ("slice", namespace, name):
                return await self._publish(ObjectKey(namespace, name))
            case ("process" | "host" | "events", *_) if not self._renewed_once.is_set():
                pass  # another agent may have this name; the key is enqueued again once this agent has the Lease
            case ("process", uid):
                await self._report_process(uid)
            case ("host",):
                await self._report_host()
                return _REPORT_SECONDS
            case ("events",):
                await self._hold_events.send()
            case ("slices",):
                self._enqueue(*(("slice", *service) for service in await self._exposed.endpoints.find_outdated()))
                return _REPORT_SECONDS
        return None

    def _assign(self) -> float | None:
        """Run the assignments, once they are listed, and keep them on disk; return the seconds until the next call."""
        if not (self._synced.is_set() and self._renewed_once.is_set()) or self._stopping.is_set():
            return None
        processes = self._store.list(METAL_PROCESSES)
        now = time.monotonic()
        self._claims_end = self._claims_end or now + handover.CLAIM_SECONDS
        claim_seconds = self._claims_end - now
        self._host.supervisor.assign(map(assignments.read_assignment, processes), keep_unclaimed=claim_seconds > 0)
        self._last_known = assignments.LastKnown(processes, self._tokens.data())
        self._last_known_file.save(processes, self._last_known.secret)
        self._host.retain_holds({obj["metadata"]["uid"] for obj in processes})
        self._ports.keep({str(service) for service in self._exposed.services()})
        # Then engines of `pomona up` that nothing has claimed are stopped.
        return claim_seconds if claim_seconds > 0 and self._host.supervisor.unclaimed() else None

    async def _list_again(self) -> None:
        """List the assignments again; then endpoints may be ready, except those of processes that the list lacks."""
        gaps = self._exposed.freshness.gaps
        if self._may_have_slept:
            # Old connections may be dead without an error, and a watch would notice that only after a long wait.
            await self._client.reconnect()
        # Only processes from before the request: the list may lack those that are added meanwhile.
        before = set(self._runners)
        fresh = await self._client.list(METAL_PROCESSES, field_selector=f"spec.hostName={self._name}")
        services = await self._exposed.endpoints.list_services()
        assigned = {obj["metadata"]["uid"] for obj in fresh.items}
        if self._may_have_slept:
            # The machine may have slept: an engine that does not answer becomes not ready.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PROOF_SECONDS):
                    await asyncio.gather(*(runner.check_liveness() for runner in self._runners.values()))
        if self._exposed.freshness.gaps != gaps:
            return  # the list is of before another gap, after which this is enqueued again
        self._may_have_slept = False
        self._exposed.suspended = frozenset(before - assigned)
        self._exposed.endpoints.forget()
        self._exposed.freshness.confirmed = True
        log.info("contact_regained", assigned=len(assigned), suspended=len(self._exposed.suspended))
        self._enqueue(*(("slice", *service) for service in services))
        self._publish_all()
        self._enqueue(_ASSIGN, _PROXY, _REPORT)

    async def _configure_proxy(self) -> float | None:
        """Configure the proxy and publish changes; return the seconds until the next try if it cannot serve all yet."""
        if not self._proxy.answers:
            return None
        try:
            changed = await self._exposed.configure()
        except (ControlUnreachableError, ControlRefusedError) as error:
            # The proxy has just died or hangs: as after any other time-out, try again soon.
            raise TimeoutError(str(error)) from error
        if changed:
            self._publish_all()
        return None if self._exposed.serves_all else _EXPOSE_SECONDS

    async def _report_process(self, uid: str) -> None:
        """Write the status of one process."""
        if runner := self._runners.get(uid):
            await self._processes.report(runner, self._host.gate.displacement_condition(runner))

    async def _report_host(self) -> None:
        """Write the MetalHost, and missing records of engines; apply a changed limit of the GPU's memory first."""
        for runner in self._runners.values():
            runner.write_record()
        state = await asyncio.to_thread(host.state)
        if state.wired_limit_bytes != self._facts.wired_limit_bytes:
            await self._apply_wired_limit(state.wired_limit_bytes)
        runtimes = [*await asyncio.to_thread(engine_command.list_installed), *self._host.daemons.usable()]
        weights = await asyncio.to_thread(self._host.context.weights.store.identities)
        # Read after the last pause: with the ledger of another moment, memory could be reported as free that is not.
        assigned = [runner.assignment for runner in self._runners.values()]
        wanted = host_status.build_status(
            self._facts,
            state,
            self._exposed.address,
            self._ledger,
            assigned,
            runtimes=runtimes,
            weights=weights,
            reachability_port=self._listener.port,
        )
        if self._stopping.is_set():
            # The controller must not bind the successors of what is stopped to this very host.
            wanted = structs.replace(wanted, available_bytes=0, available=size_text(0))
        conditions = [self._host.watchdog.pressure_condition(), self._host.pauses.paused_condition()]
        await host_status.report_host(self._client, self._name, wanted, conditions)

    async def _apply_wired_limit(self, limit_bytes: int | None) -> None:
        """Compute the budget again, as the owner has changed how much memory the GPU may use."""
        self._facts = replace(await asyncio.to_thread(host.read), wired_limit_bytes=limit_bytes)
        allowed_bytes = budget_bytes(self._facts, self._options.memory_budget_bytes)
        if allowed_bytes is not None:
            self._ledger.change_budget(allowed_bytes)
        log.info("wired_limit_changed", limit_bytes=limit_bytes, budget_bytes=self._ledger.budget_bytes)

    async def _metrics_text(self) -> bytes:
        """Return the agent's metrics, and the proxy's metrics if the proxy answers."""
        from metal_agent.metrics import AgentMetrics  # noqa: PLC0415 - only for who reads them

        watchdog, gate, rates = self._host.watchdog, self._host.gate, self._proxy.service_rates
        prefix = self._options.metric_prefix
        metrics = AgentMetrics(self._ledger, self._runners, watchdog, gate, rates, host=self._name, prefix=prefix)
        try:
            proxied = await self._proxy.client.metrics()
        except (ControlUnreachableError, ControlRefusedError):
            proxied = b""
        return await metrics.render() + proxied


def _desired_state(obj: Obj) -> tuple[Any, ...]:
    """Return the desired state of a MetalProcess, or the data of our Secret."""
    return obj["metadata"]["uid"], obj["metadata"].get("deletionTimestamp"), obj.get("spec"), obj.get("data")
