"""Wires the agent of one host: what comes from the API, what is written to it, and the processes between.

Everything that is written is a key of one queue, reconciled from the state of that moment, so that nothing is lost by
a failure and nothing is written twice. Unknown is not deleted: only a fresh and whole list of MetalProcesses (or a
deletion mark) takes a process away; an API server that is gone, slow or wrong takes none.
"""

import asyncio
import base64
import binascii
import contextlib
import time
from datetime import UTC, datetime
from typing import Any, Final
from weakref import WeakKeyDictionary

import aiohttp
import msgspec
import structlog

from crds.meta import HOSTS_NAMESPACE, host_secret_key
from devices import host, limits, pressure
from devices.facts import HostFacts
from gateway.proxy.client import ProxyRefusedError, ProxyUnreachableError
from kube.apply import apply_status, merge_conditions
from kube.client import Client, Obj, connect
from kube.credentials import Credentials
from kube.errors import Conflict, NotFound
from kube.events import EventType, Recorder
from kube.lease import HeldElsewhereError, renew
from kube.queue import WorkQueue, run_workers
from kube.resources import METAL_PROCESSES, SECRETS, Resource
from kube.store import Store
from kube.watch import reflect
from metal_agent import assignments, certificate, claims, daemons, engine, metrics, registration
from metal_agent.address import follow
from metal_agent.endpoints import FIELD_MANAGER
from metal_agent.exposure import Exposed, clocks
from metal_agent.freshness import LEASE_SECONDS, RENEW_SECONDS
from metal_agent.ledger import Ledger, budget_bytes
from metal_agent.metrics import Metrics
from metal_agent.ownership import own, take_over
from metal_agent.peaks import Peaks
from metal_agent.ports import Ports
from metal_agent.pressure import Action
from metal_agent.proxy import Proxy
from metal_agent.records import Records
from metal_agent.runner import Host, Runner
from metal_agent.start import Options, StartError, find_address, identity
from metal_agent.steps import Steps
from metal_agent.supervisor import Supervisor
from metal_agent.usage import Usage
from metal_agent.watchdog import Senses, Watchdog
from metal_agent.weights import Weights

PATIENCE_SECONDS: Final = 10.0
"""How long a starting agent waits for the API before it serves what it last knew."""
_REPORT_SECONDS: Final = 60.0
"""Between two looks at the own MetalHost and EndpointSlices, which somebody may have deleted."""
_EXPOSE_SECONDS: Final = 10.0
"""Between two tries to have the proxy serve what it cannot yet."""
_PROOF_SECONDS: Final = 5.0
"""For engines to show that they answer, before those that do are made ready again without the others."""
_WORKERS: Final = 4
_RECONCILE_SECONDS: Final = 30.0
_TOLD: Final[dict[str, EventType]] = {
    "Ready": "Normal",
    "Stopped": "Normal",
    "Failed": "Warning",
    "Rejected": "Warning",
}

Key = tuple[str, ...]
_ASSIGN: Final[Key] = ("assign",)
_REGAIN: Final[Key] = ("regain",)
_PROXY: Final[Key] = ("proxy",)
_REPORT: Final[Key] = ("host",)
_SLICES: Final[Key] = ("slices",)
_TELL: Final[Key] = ("tell",)

log = structlog.get_logger()


async def run(credentials: Credentials, options: Options) -> None:
    """Serve as host `options.name` until cancelled; engines and proxy go on then, for the next agent to adopt.

    Raises:
        StartError: the state folder is in use or cannot be read, address, budget or certificate cannot be found out or
            used, or another agent has this name.
    """
    address = find_address(options, credentials.server)
    if options.tls:
        await asyncio.to_thread(certificate.check, options.tls, address)
    known = await asyncio.to_thread(host.read)
    allowed_bytes = budget_bytes(known, options.memory_budget_bytes)
    if allowed_bytes is None:
        raise StartError("the memory of this host cannot be found out: give --memory-budget, such as 12GiB")

    async def prove() -> None:
        async with connect(credentials) as client:
            await client.list(METAL_PROCESSES, field_selector=f"spec.hostName={options.name}")

    # A mistake above ends nothing: only who can serve asks `pomona up` to hand over.
    await take_over(options.folder, prove)
    with own(options.folder):
        limits.raise_descriptors()
        async with connect(credentials) as client, aiohttp.ClientSession() as session:
            try:
                agent = Agent(
                    client,
                    session,
                    options,
                    server=credentials.server,
                    address=address,
                    host_facts=known,
                    ledger=Ledger(allowed_bytes, memory_bytes=known.memory_bytes),
                )
            except OSError as error:
                raise StartError(f"cannot use what is in --state-dir {options.folder}: {error}") from error
            try:
                await agent.run()
            except ExceptionGroup as group:
                if refused := group.subgroup(StartError):
                    raise refused.exceptions[0] from None
                raise


class Agent:
    """One host's agent."""

    def __init__(
        self,
        client: Client,
        session: aiohttp.ClientSession,
        options: Options,
        *,
        server: str,
        address: str,
        host_facts: HostFacts,
        ledger: Ledger,
    ) -> None:
        self._client = client
        self._options = options
        self._name = options.name
        self._server = server
        self._facts = host_facts
        self._ledger = ledger
        self._store = Store()
        self._synced = asyncio.Event()
        self._queue: WorkQueue[Key] = WorkQueue()
        self._recorder = Recorder(client, "pomona.dev/metal-agent", options.name)
        self._identity = identity(options.folder)
        self._renewed_once = asyncio.Event()
        """This name is ours: before that, nothing is written in it and nothing new is run."""
        self._memory = assignments.Memory(options.folder / "assignments.json")
        self._known = self._memory.load()
        self._ports = Ports(options.folder / "ports.json", options.first_port, options.last_port)
        self._proxy = Proxy(options.folder, self._proxy_changed)
        self._told: WeakKeyDictionary[Runner, str] = WeakKeyDictionary()
        self._runners: dict[str, Runner] = {}
        self._claims_end: float | None = None
        """Until then (monotonic seconds) the cluster may claim what a `pomona up` left running here."""
        self._doubted = False
        """The host was out of touch since engines were last known to answer."""
        self._exposed = Exposed(
            client=client,
            host=options.name,
            address=address,
            proxy=self._proxy,
            ports=self._ports,
            runners=self._runners,
            secret=self._secret,
            tls=options.tls,
        )
        senses = Senses(read=pressure.read, idle_seconds=self._exposed.idle_seconds, ledger=ledger)
        self._watchdog = Watchdog(options.folder / "pressure.json", self._runners, senses, self._pressed)
        self._metrics = Metrics(ledger, self._runners, self._watchdog)
        self._metrics_place = options.metrics_place
        self._steps = Steps(client, self._recorder, options.name, self._runners)
        peaks = Peaks(options.folder / "peaks.json")
        shared = daemons.of_this_machine(options.folder)
        self._usage = Usage(
            self._runners,
            ledger,
            peaks,
            read=pressure.read,
            changed=lambda: self._queue.add(_REPORT),
            loaded=shared.loaded,
        )
        self._host = Host(
            folder=options.folder,
            records=Records(options.folder / "processes"),
            weights=Weights(options.folder / "weights", options.file_root),
            ledger=ledger,
            session=session,
            exposure=self._exposed,
            secret=self._secret,
            changed=self._changed,
            hold=self._watchdog.hold,
            daemons=shared,
            peaks=peaks,
            look=self._usage.look,
        )
        self._host.daemons.subscribe(lambda _runtime: self._queue.add(_REPORT))

    async def run(self) -> None:
        """Adopt what runs, then follow the API for ever."""
        log.info("agent starts", host=self._name, address=self._exposed.address, budget_bytes=self._ledger.budget_bytes)
        self._store.subscribe(self._heard)
        selector = f"metadata.name={self._name}"
        async with asyncio.TaskGroup() as group:
            self._proxy.adopt()
            self._supervisor = Supervisor(self._host, self._runners, group)
            await self._recover()
            group.create_task(self._proxy.run())
            group.create_task(run_workers(self._queue, self._reconcile, _WORKERS, _RECONCILE_SECONDS))
            group.create_task(reflect(self._client, self._store, SECRETS, HOSTS_NAMESPACE, field_selector=selector))
            group.create_task(
                reflect(
                    self._client,
                    self._store,
                    METAL_PROCESSES,
                    field_selector=f"spec.hostName={self._name}",
                    synced=self._synced,
                )
            )
            group.create_task(follow(self._options, self._server, self._exposed.address, self._moved))
            group.create_task(self._renew())
            group.create_task(self._watchdog.run())
            group.create_task(self._usage.run())
            if self._metrics_place:
                group.create_task(metrics.serve(self._metrics_place, self._metrics_text))
            await self._await_api()

    async def _recover(self) -> None:
        """Take over what runs. Raises StartError: to start without knowing it could run it twice."""
        others = [self._proxy.process.pid] if self._proxy.process else []
        try:
            await self._supervisor.recover(others)
        except OSError as error:
            raise StartError(
                f"cannot find out what an earlier agent left running, all of which goes on: {error}; mend that, or "
                "delete that file and have its model loaded anew"
            ) from error

    async def _renew(self) -> None:
        """Keep the host's Lease. Raises StartError when another agent has it."""
        try:
            await renew(
                self._client,
                HOSTS_NAMESPACE,
                self._name,
                identity=self._identity,
                field_manager=FIELD_MANAGER,
                duration_seconds=LEASE_SECONDS,
                interval_seconds=RENEW_SECONDS,
                on_renewed=self._renewed,
            )
        except HeldElsewhereError as error:
            raise StartError(
                f"another agent is host {self._name}: of Lease {HOSTS_NAMESPACE}/{self._name}, {error}; this one is "
                f"{self._identity}: stop one of the two, or give it another --name"
            ) from error

    async def _await_api(self) -> None:
        """Begin with what the API says or, when it says nothing for a while, with what it last said."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._synced.wait()
        except TimeoutError:
            log.warning("no API server: serving what it last said", processes=len(self._known.processes))
            self._supervisor.add(assignments.read(obj) for obj in self._known.processes)
            await self._synced.wait()
        await self._renewed_once.wait()
        for key in (_ASSIGN, _REPORT, _SLICES, _TELL):
            self._queue.add(key)

    def _heard(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Look at a change of the store; a change of status alone is our own writing."""
        if resource == SECRETS:
            self._queue.add(_PROXY)
        if old is None or new is None or _asked(old) != _asked(new):
            self._queue.add(_ASSIGN)

    def _renewed(self) -> None:
        self._renewed_once.set()
        known = self._exposed.freshness.renewed_at is not None
        if self._exposed.freshness.renewed(clocks()):
            self._doubted = self._doubted or known
            self._queue.add(_REGAIN)

    async def _moved(self, address: str) -> None:
        """Be reached at another address: the old one is withdrawn at once, the new one ready when it is served."""
        self._exposed.move(address)
        await self._client.reconnect()
        self._publish_all()
        for key in (_PROXY, _REPORT):
            self._queue.add(key)

    def _proxy_changed(self) -> None:
        if self._proxy.answers:
            self._queue.add(_PROXY)
        else:
            self._exposed.accepted = frozenset()
            self._publish_all()

    def _changed(self, runner: Runner) -> None:
        assignment = runner.assignment
        self._queue.add(("process", assignment.uid))
        if runner.state.phase == "Fetching" and runner.progress:
            return
        self._queue.add(_PROXY)
        self._queue.add(_REPORT)
        if assignment.service and not assignment.is_standalone:
            self._queue.add(("slice", *assignment.service))
        if runner.state.phase == "Stopped":
            self._queue.add(_ASSIGN)

    def _pressed(self, step: Action, note: str) -> None:
        """Have what a step against memory pressure changes written, and the step told."""
        self._metrics.count(step)
        self._steps.add(step, note)
        for key in (_REPORT, _TELL):
            self._queue.add(key)
        if uid := getattr(step, "uid", None):
            self._queue.add(("process", uid))

    def _publish_all(self) -> None:
        for service in self._exposed.services():
            self._queue.add(("slice", *service))
        for uid in self._runners:
            self._queue.add(("process", uid))

    async def _reconcile(self, key: Key) -> float | None:
        match key:
            case ("assign",):
                return self._assign()
            case ("regain",):
                await self._regain()
            case ("proxy",):
                return await self._configure_proxy()
            case ("slice", namespace, name):
                await self._exposed.publish((namespace, name))
            case ("process" | "host" | "tell", *_) if not self._renewed_once.is_set():
                pass  # who has this name may be another; what is ours to write is written when it is ours
            case ("process", uid):
                await self._report_process(uid)
            case ("host",):
                await self._report_host()
                return _REPORT_SECONDS
            case ("tell",):
                await self._steps.tell()
            case ("slices",):
                for service in await self._exposed.endpoints.missed():
                    self._queue.add(("slice", *service))
                return _REPORT_SECONDS
        return None

    def _assign(self) -> float | None:
        """Run what the API assigns; only a whole list counts. Answers when to look again, without anything new."""
        if not (self._synced.is_set() and self._renewed_once.is_set()):
            return None
        processes = self._store.list(METAL_PROCESSES)
        now = time.monotonic()
        self._claims_end = self._claims_end or now + claims.CLAIM_SECONDS
        open_seconds = self._claims_end - now
        self._supervisor.assign(map(assignments.read, processes), keep_unclaimed=open_seconds > 0)
        self._known = assignments.LastKnown(processes, self._tokens())
        self._memory.save(processes, self._known.secret)
        self._watchdog.keep({obj["metadata"]["uid"] for obj in processes})
        self._ports.keep({"/".join(service) for service in self._exposed.services()})
        return open_seconds if open_seconds > 0 and self._supervisor.unclaimed() else None

    async def _regain(self) -> None:
        """After a gap: see what is still assigned, then make endpoints for that again, and write what could not be."""
        if self._doubted:
            # Connections of before may be dead without a word, and a watch would wait for long to find that out.
            await self._client.reconnect()
        # Not those that are added while the list is on its way, which it cannot have.
        before = set(self._runners)
        fresh = await self._client.list(METAL_PROCESSES, field_selector=f"spec.hostName={self._name}")
        found = await self._exposed.endpoints.found()
        assigned = {obj["metadata"]["uid"] for obj in fresh.items}
        if self._doubted:
            await self._prove()
        self._exposed.suspended = frozenset(before - assigned)
        self._exposed.endpoints.forget()
        self._exposed.freshness.confirmed = True
        log.info("regained", assigned=len(assigned), suspended=len(self._exposed.suspended))
        for service in found:
            self._queue.add(("slice", *service))
        self._publish_all()
        for key in (_ASSIGN, _PROXY, _REPORT):
            self._queue.add(key)

    async def _prove(self) -> None:
        """Have each engine show that it answers, as the machine may have slept; one that does not becomes not ready."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PROOF_SECONDS):
                await asyncio.gather(*(runner.prove() for runner in self._runners.values()))
        self._doubted = False

    async def _configure_proxy(self) -> float | None:
        if not self._proxy.answers:
            return None
        try:
            changed = await self._exposed.configure()
        except (ProxyUnreachableError, ProxyRefusedError) as error:
            # It died or is stuck just now: as with any other time-out, soon again.
            raise TimeoutError(str(error)) from error
        if changed:
            self._publish_all()
        return None if self._exposed.complete else _EXPOSE_SECONDS

    async def _report_host(self) -> None:
        """Write what this host is and has, to the API and of what runs to disk."""
        for runner in self._runners.values():
            runner.remember()
        state = await asyncio.to_thread(host.state)
        assigned = (runner.assignment for runner in self._runners.values())
        runtimes = [*await asyncio.to_thread(engine.installed), *self._host.daemons.usable()]
        address = self._exposed.address
        wanted = registration.status(self._facts, state, address, self._ledger, assigned, runtimes=runtimes)
        await registration.report(self._client, self._name, wanted, [self._watchdog.condition()])

    async def _report_process(self, uid: str) -> None:
        """Write the status of one process, if the object is still there."""
        runner = self._runners.get(uid)
        if runner is None:
            return
        assignment = runner.assignment
        observed = self._store.get(METAL_PROCESSES, assignment.name, assignment.namespace)
        if observed is None or observed["metadata"]["uid"] != uid:
            return
        body = self._status(runner)
        if target := self._watchdog.disruption(runner):
            before = observed.get("status", {}).get("conditions", [])
            body["conditions"] = merge_conditions(before, [target], datetime.now(UTC))
        with contextlib.suppress(NotFound, Conflict):
            self._store.put(
                METAL_PROCESSES, await apply_status(self._client, METAL_PROCESSES, observed, body, FIELD_MANAGER)
            )
        await self._tell(runner, observed)

    async def _metrics_text(self) -> bytes:
        """The agent's metrics, and the proxy's where that answers."""
        try:
            proxied = await self._proxy.client.metrics()
        except (ProxyUnreachableError, ProxyRefusedError):
            proxied = b""
        return self._metrics.text() + proxied

    def _status(self, runner: Runner) -> dict[str, Any]:
        service = runner.assignment.service
        status = runner.status(self._exposed.port(service) if service else None)
        problem = self._exposed.problem(service) if service else ""
        if problem and status.phase == "Ready":
            status = msgspec.structs.replace(status, reason="NotExposed", message=problem)
        body: dict[str, Any] = {"phase": status.phase, **msgspec.to_builtins(status)}
        return body

    async def _tell(self, runner: Runner, observed: Obj) -> None:
        """Record an Event for each new outcome."""
        state = runner.state
        outcome = f"{state.phase} {state.reason} {state.failures}"
        kind = _TOLD.get(state.phase)
        if kind and self._told.get(runner) != outcome:
            note = state.message or f"{state.phase} on host {self._name}"
            await self._recorder.event(observed, kind, state.reason or state.phase, note, "Serving")
            self._told[runner] = outcome

    def _secret(self, namespace: str, name: str) -> str | None:
        """The token in Secret `namespace/name`, from the copy that the controller keeps for this host."""
        try:
            token = self._tokens()[host_secret_key(namespace, name)]
            return base64.b64decode(token, validate=True).decode().strip() or None
        except (KeyError, binascii.Error, UnicodeDecodeError):
            return None

    def _tokens(self) -> dict[str, str]:
        """The data of the host's Secret; where that is not there, what it last had, for what is gone says nothing."""
        secret = self._store.get(SECRETS, self._name, HOSTS_NAMESPACE)
        return (secret.get("data") or {}) if secret else self._known.secret


def _asked(obj: Obj) -> tuple[Any, ...]:
    """What the API asks for, of a MetalProcess or of our Secret."""
    return obj["metadata"]["uid"], obj["metadata"].get("deletionTimestamp"), obj.get("spec"), obj.get("data")
