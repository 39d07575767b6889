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
from typing import Final

import aiohttp
import structlog
from msgspec import structs

from crds.meta import HOSTS_NAMESPACE
from crds.size import size_text
from devices import host, shutdown
from devices.facts import HostFacts
from gateway.change_counter import ChangeCounter
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
from metal_agent import agent_work, assignments
from metal_agent.agent_work import ASSIGN, EVENTS, LIST_AGAIN, PROXY, REPORT, SLICES, WorkKey
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
from metal_agent.host import Host, HostCallbacks, recover_or_refuse
from metal_agent.memory.ledger import Ledger, budget_bytes
from metal_agent.memory.pressure_policy import HoldAction
from metal_agent.metrics_listener import serve_metrics
from metal_agent.native import engine_command
from metal_agent.options import AgentOptions
from metal_agent.state_folder import identify_agent
from metal_agent.supervise import handover, keep_awake
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.proxy_process import Proxy

PATIENCE_SECONDS: Final = 10.0
"""Time that a starting agent waits for the API before it serves the last known assignments."""
_WORKERS: Final = 4

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
        """Build the parts of the agent and connect them by callbacks; nothing runs before `run`."""
        self._client, self.connection = client, connection
        self._options, self._name = options, options.name
        self._facts, self._ledger = host_facts, ledger
        self._store = Store()  # caches this host's MetalProcesses and its Secret, by two watches
        self._synced = asyncio.Event()  # set once the first list of MetalProcesses is in the store
        self._queue: WorkQueue[WorkKey] = WorkQueue()  # of work to do: see `agent_work`
        self._identity = identify_agent(options.folder)  # the name under which it holds the Lease
        self._renewed_once = asyncio.Event()  # set once it has the Lease; then it takes new assignments and reports
        self._last_known_file = assignments.LastKnownFile(options.folder / "assignments.json")
        self._last_known = self._last_known_file.load(options.name)  # processes and data of the Secret
        self._tokens = HostTokens(self._store, options.name, self._last_known.secret)
        self._ports = ServicePorts(options.folder / "ports.json", options.first_port, options.last_port)
        self._proxy = Proxy(options.folder, self._proxy_changed)
        self._runners: dict[str, Runner] = {}  # by uid of the MetalProcess; changed by the supervisor only
        self._claim_deadline: float | None = None  # monotonic time until which engines of `pomona up` may be claimed
        self._may_have_slept = False  # True: contact with the API was lost, as in a sleep, since engines were checked
        self._started = datetime.now(UTC)
        self._stopping = asyncio.Event()  # set when everything is to be drained and stopped
        self._recovered = asyncio.Event()  # set once the engines that an earlier agent left running are adopted
        self._changes = ChangeCounter()  # of processes; awaited until all have stopped

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
            # After a change of a process, of the memory that is available, and after a step of a hold.
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
        """Add the parts that report to the cluster (reachability, Events, statuses), and subscribe to changes.

        The reachability listener borrows a port that no service has, so it gives up a port that a service gets.
        """
        client, name = self._client, self._name
        recorder = EventRecorder(client, "pomona.dev/metal-agent", name)
        self._host.daemons.subscribe(lambda _runtime: self._enqueue_report())
        self._listener = ReachabilityListener(name, self._exposed.address, self._ports.list_spare, self._enqueue_report)
        self._ports.on_assign = self._listener.give_up
        self._hold_events = HoldEvents(client, recorder, name, self._runners)  # of steps such as an eviction
        self._processes = ProcessReporter(client, self._store, recorder, name, self._exposed)  # writes statuses
        self._exposed.traffic.on_change = lambda uid: self._enqueue(("process", uid))

    def _enqueue(self, *keys: WorkKey) -> None:
        """Add work to the queue."""
        for key in keys:
            self._queue.add(key)

    def _enqueue_report(self) -> None:
        """Enqueue a report of the host."""
        self._enqueue(REPORT)

    async def run(self) -> None:
        """Adopt running engines and the proxy, then follow the API until cancelled.

        Raises StartError, and EverythingStopped after everything was stopped, each in a group.
        """
        budget_bytes = self._ledger.budget_bytes
        log.info("agent_started", host=self._name, address=self._exposed.address, budget_bytes=budget_bytes)
        with serve_control(self._options.folder, self._describe, self._stopping):
            forget_exit(self._options.folder)  # the note of how the last agent ended
            await self._run_loops()

    async def _run_loops(self) -> None:
        """Adopt the running engines, then run all loops until everything was stopped, which raises EverythingStopped.

        Adoption comes first: else an assignment could start a second engine beside one that runs already. If this
        task is cancelled instead, the engines go on, for the next agent to adopt.
        """
        self._store.subscribe(self._object_changed)
        secret = Selection(SECRETS, HOSTS_NAMESPACE, field_selector=f"metadata.name={self._name}")
        assigned = Selection(METAL_PROCESSES, field_selector=f"spec.hostName={self._name}")
        async with asyncio.TaskGroup() as group:
            await recover_or_refuse(self._host, group)
            self._recovered.set()
            keep_awake_command = keep_awake.build_command(os.getpid()) if self._options.keep_awake else None
            loops = self._host.start_loops(group, keep_awake_command, has_benchmarks=self._options.benchmarks)
            group.create_task(run_workers(self._queue, self._reconcile, _WORKERS, agent_work.RECONCILE_SECONDS))
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

            # Serve until POST /stop, which sets this event, or until cancelled.
            try:
                await self._stopping.wait()
            except asyncio.CancelledError:  # only the agent ends, unless the machine shuts down
                await self._withdraw_at_shutdown()
                raise

            # Stop: `loops` (proxy, watchdogs) run until all processes are drained; the exception ends all other tasks.
            api_task.cancel()  # it could still start the last known assignments
            await self._stop_everything(loops)
            raise EverythingStopped

    async def _stop_everything(self, loops: Collection[asyncio.Task[None]]) -> None:
        """Withdraw, drain and stop every process, report that once, and end the proxy; the API server may be away.

        `loops` keep proxy and watchdogs running: they end last, as a drain needs the proxy.
        """
        log.info("agent_stopping", processes=len(self._runners))
        self._enqueue(REPORT)  # the MetalHost, without free memory: the controller must bind nothing to it
        served = set(self._exposed.services())  # before the stop: a stopped process serves no service
        await self._host.stop_processes(self._changes)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(agent_work.LAST_REPORT_SECONDS):
                # Slices, statuses and MetalHost, each alone: one that is refused must not keep back the others.
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
        if self._renewed_once.is_set():  # it has the Lease of its name: the endpoints are its own
            await self._exposed.withdraw_all(agent_work.WITHDRAWAL_SECONDS)

    def _describe(self) -> AgentStatus:
        """Return the status for the control socket; `ready` needs adopted engines, and the Lease or no API server."""
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

    async def _await_api(self) -> None:
        """Wait for the list of assignments and for the Lease; then enqueue the work that needs the API.

        If the list does not come in time, the last known assignments on disk are started meanwhile.
        The Lease proves that no other agent serves under this host's name.
        """
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._synced.wait()
        except TimeoutError:
            log.warning("api_server_unreachable", serving_last_known=len(self._last_known.processes))
            self._host.supervisor.add(assignments.read_assignment(obj) for obj in self._last_known.processes)
            await self._synced.wait()
        await self._renewed_once.wait()
        self._enqueue(ASSIGN, REPORT, SLICES, EVENTS)  # processes, MetalHost, EndpointSlices, Events

    def _object_changed(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Enqueue the work that a change in the store requires; a change of status alone was written by this agent.

        `old` is None if the object is new, `new` if it was deleted.
        """
        if resource == SECRETS:
            self._enqueue(PROXY)  # the Secret has the tokens that the proxy accepts
        if old is None or new is None or assignments.desired_state(old) != assignments.desired_state(new):
            self._enqueue(ASSIGN)
        if resource == METAL_PROCESSES and new and (old is None or old["metadata"]["uid"] != new["metadata"]["uid"]):
            # New here. It may run already, from the last known assignments; its status can be written from now on only.
            self._enqueue(("process", new["metadata"]["uid"]))

    def _lease_renewed(self) -> None:
        """Note a renewal of the Lease; after the first one and after a gap, have the assignments listed again.

        In a gap, as in a sleep of the machine, the controller may have declared this host lost and started its
        processes elsewhere: no endpoint is ready before a list shows which ones are still assigned here.
        """
        self._renewed_once.set()
        is_first = self._exposed.freshness.renewed_at is None  # asked first, as `note_renewal` sets it
        must_list_again = self._exposed.freshness.note_renewal(read_clocks())
        if must_list_again:
            self._may_have_slept = self._may_have_slept or not is_first  # no contact was lost before the first
            self._enqueue(LIST_AGAIN)

    async def _address_changed(self, address: str) -> None:
        """Serve at another address: withdraw the old one at once; the new one is ready once the proxy listens there."""
        self._exposed.move(address)
        self._listener.move(address)
        await self._client.reconnect()  # connections from the old address are dead
        self._publish_all()  # not ready before the proxy listens there
        self._enqueue(PROXY, REPORT)

    def _proxy_changed(self) -> None:
        """Configure the proxy if it answers again; if it has ceased to answer, make all endpoints not ready."""
        if self._proxy.answers:
            self._enqueue(PROXY)
        else:
            self._exposed.proxied_uids = frozenset()  # the proxy serves no process
            self._publish_all()

    def _process_changed(self, runner: Runner) -> None:
        """Enqueue the work that a change of a process requires."""
        assignment = runner.assignment
        self._changes.note()
        self._enqueue(("process", assignment.uid))
        if runner.state.phase == "Fetching" and runner.progress:
            # Only the download advanced: no route, report or slice changes.
            return
        self._enqueue(PROXY, REPORT)
        if assignment.service.name and not assignment.is_standalone:
            self._enqueue(("slice", *assignment.service))
        if runner.state.phase == "Stopped":
            self._enqueue(ASSIGN)  # which forgets the runner, or starts a new one if the process is assigned again

    def _hold_handled(self, step: HoldAction, note: str) -> None:
        """Enqueue the Event of a step by memory pressure or a pause of the owner, and the reports that it changes."""
        self._hold_events.add(step, note)
        uids = [step.uid] if step.uid else list(self._runners)
        self._enqueue(REPORT, EVENTS, *(("process", uid) for uid in uids))

    async def _publish(self, service: ObjectKey) -> float | None:
        """Write a service's EndpointSlice; return the seconds until the next try if the controller has not granted it.

        If that changes whether the service is reachable, the statuses of its processes, which show it, are enqueued.
        """
        problem_before = self._exposed.find_problem(service)
        try:
            await self._exposed.publish(service)
        except Forbidden:
            if refusal := self._exposed.endpoints.refusals.get(service):
                return refusal.retry_seconds  # the controller has not granted the slice yet
            raise
        finally:
            if self._exposed.find_problem(service) != problem_before:
                runners = self._exposed.services().get(service, [])
                self._enqueue(*(("process", runner.assignment.uid) for runner in runners))
        return None

    def _publish_all(self) -> None:
        """Enqueue the writes of all slices and of the status of all processes."""
        self._enqueue(*(("slice", *service) for service in self._exposed.services()))
        self._enqueue(*(("process", uid) for uid in self._runners))

    async def _reconcile(self, key: WorkKey) -> float | None:
        """Do the work of one key (see `agent_work`); return the seconds until it is to be done again, if any."""
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
                return agent_work.REPORT_SECONDS
            case ("events",):
                await self._hold_events.send()
            case ("slices",):
                self._enqueue(*(("slice", *service) for service in await self._exposed.endpoints.find_outdated()))
                return agent_work.REPORT_SECONDS
        return None

    def _assign(self) -> float | None:
        """Start and stop runners by the assignments, and keep these on disk; return the seconds until the next call.

        Nothing is done before the list and the Lease are there. Engines that `pomona up` left running stay for
        CLAIM_SECONDS, so that the cluster may claim them by a process with the same engine; then they are stopped.
        """
        if not (self._synced.is_set() and self._renewed_once.is_set()) or self._stopping.is_set():
            return None
        processes = self._store.list(METAL_PROCESSES)
        now = time.monotonic()
        self._claim_deadline = self._claim_deadline or now + handover.CLAIM_SECONDS  # set at the first call
        seconds_left = self._claim_deadline - now
        self._host.supervisor.assign(map(assignments.read_assignment, processes), keep_unclaimed=seconds_left > 0)
        self._last_known = assignments.LastKnown(processes, self._tokens.data())
        self._last_known_file.save(processes, self._last_known.secret)
        self._host.retain_holds({obj["metadata"]["uid"] for obj in processes})  # forget evictions of the others
        self._ports.keep({str(service) for service in self._exposed.services()})  # forget ports of the others
        return seconds_left if seconds_left > 0 and self._host.supervisor.unclaimed() else None

    async def _list_again(self) -> None:
        """List the assignments after a gap in contact; then endpoints may be ready, except of processes it lacks.

        In the gap the controller may have moved processes to other hosts. One that runs here and is not listed any
        more is suspended: not ready until `_assign` stops it.
        """
        gap_count = self._exposed.freshness.gap_count  # grows with each gap in contact
        if self._may_have_slept:
            # Old connections may be dead without an error, and a watch would notice that only after a long wait.
            await self._client.reconnect()

        # Only processes from before the request: the list may lack those that are added meanwhile.
        uids_before = set(self._runners)
        fresh = await self._client.list(METAL_PROCESSES, field_selector=f"spec.hostName={self._name}")
        services = await self._exposed.endpoints.list_services()
        assigned = {obj["metadata"]["uid"] for obj in fresh.items}

        if self._may_have_slept:
            # The machine may have slept: an engine that does not answer becomes not ready.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(agent_work.LIVENESS_SECONDS):
                    await asyncio.gather(*(runner.check_liveness() for runner in self._runners.values()))

        if self._exposed.freshness.gap_count != gap_count:
            return  # another gap has begun since the request; this is enqueued again after it

        self._may_have_slept = False
        self._exposed.suspended = frozenset(uids_before - assigned)
        self._exposed.endpoints.forget()  # others may have deleted slices meanwhile: each is written again
        self._exposed.freshness.has_fresh_list = True  # endpoints may be ready again
        log.info("contact_regained", assigned=len(assigned), suspended=len(self._exposed.suspended))
        self._enqueue(*(("slice", *service) for service in services))
        self._publish_all()
        self._enqueue(ASSIGN, PROXY, REPORT)

    async def _configure_proxy(self) -> float | None:
        """Configure the proxy and publish changes; return the seconds until the next try if it cannot serve all yet.

        Raises TimeoutError, after which the queue tries again, if the proxy does not answer.
        """
        if not self._proxy.answers:
            return None
        try:
            changed = await self._exposed.configure()
        except (ControlUnreachableError, ControlRefusedError) as error:
            raise TimeoutError(str(error)) from error
        if changed:
            self._publish_all()
        return None if self._exposed.serves_all else agent_work.EXPOSE_SECONDS  # a token may be missing

    async def _report_process(self, uid: str) -> None:
        """Write the status of one process."""
        if runner := self._runners.get(uid):
            await self._processes.report(runner, self._host.gate.displacement_condition(runner))

    async def _report_host(self) -> None:
        """Write the MetalHost; before, apply a limit of the GPU's memory that the owner has changed.

        Also retry the records on disk that could not be written, by which the next agent adopts the engines.
        """
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
        return await metrics.render() + await self._proxy.read_metrics()
