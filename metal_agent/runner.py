"""The thin shell around one process's life: performs the actions that `lifecycle.step` decides, and reports back."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol, get_args

import aiohttp
import structlog
from msgspec import structs

from artifacts.errors import ArtifactError
from artifacts.source import parse
from crds.meta import Priority
from crds.metalprocess import LastExit, MetalProcessSpec, MetalProcessStatus, Progress
from kube.time import rfc3339
from metal_agent import engine, lifecycle, liveness, logs, spawn
from metal_agent.admission import admit, refusal
from metal_agent.assignments import Assignment
from metal_agent.daemons import Daemons, SharedDaemon
from metal_agent.handle import Handle
from metal_agent.ledger import Ledger
from metal_agent.lifecycle import Event, Evicted, Freed, Held, Released, State, step
from metal_agent.liveness import Look, cpu_seconds
from metal_agent.loads import Loads
from metal_agent.peaks import Peaks
from metal_agent.records import Record, Records
from metal_agent.weights import Pinned, Weights
from runtimes.daemon import UNKNOWN_MODEL, DaemonError
from runtimes.probe import generate_token
from runtimes.registry import RUNTIMES

GRACE_SECONDS: Final = 10.0
"""Between SIGTERM and SIGKILL; requests were drained before, and llama-server may hang on SIGTERM."""
DRAIN_SECONDS: Final = 30.0
PROGRESS_SECONDS: Final = 1.0
RANKS: Final[dict[Priority, int]] = {priority: rank for rank, priority in enumerate(get_args(Priority))}
"""The enumeration begins with the most important."""
_PROBE_SECONDS: Final = 60.0
_END_AGAIN_SECONDS: Final = 5.0
_FIRST_PAUSE_SECONDS: Final = 0.02
_LAST_PAUSE_SECONDS: Final = 0.2
"""An engine that has loaded for long is known to be ready so much later at most."""

log = structlog.get_logger()


class Exposure(Protocol):
    """How requests come to a process."""

    async def withdraw(self, assignment: Assignment) -> None:
        """Route no new request to the process; bounded, and never raises for what the API server does."""

    async def drain(self, uid: str, timeout_seconds: float) -> None:
        """Wait until the process answers no request, for a bounded time."""

    def requests(self, uid: str) -> int | None:
        """Count the requests that the process answered when the proxy was last asked; None: nobody knows."""


async def _nothing() -> None:
    """Look at nothing."""


@dataclass(frozen=True, slots=True)
class Host:
    """What every process of this host shares."""

    folder: Path
    records: Records
    weights: Weights
    ledger: Ledger
    session: aiohttp.ClientSession
    exposure: Exposure
    secret: Callable[[str, str], str | None]
    """Gives the token in a Secret by namespace and name, as far as it is known."""
    changed: Callable[["Runner"], None]
    """Told after each change of state or progress."""
    daemons: Daemons = field(default_factory=lambda: Daemons(Path(), ()))
    loads: Loads = field(default_factory=Loads)
    peaks: Peaks = field(default_factory=Peaks)
    look: Callable[[], Awaitable[None]] = _nothing
    """Has the ledger know what memory is in use now."""
    hold: Callable[[str], Held | None] = lambda _uid: None
    """Gives why a process, by uid, may not start an engine when its runner is made; later changes are events."""


class Runner:
    """One MetalProcess on this host, from assignment (or adoption of `record`'s running `adopted`) to Stopped."""

    def __init__(
        self, assignment: Assignment, host: Host, record: Record | None = None, adopted: Handle | None = None
    ) -> None:
        self.assignment = assignment
        self.record = record
        self._recorded = True
        self.progress: Progress | None = None
        self.removed = False
        """The API no longer wants it here."""
        self.proven = True
        """A Ready engine is taken to answer, unless it was doubted and has not shown it since."""
        self._host = host
        self._engine = adopted
        self._weights = host.weights.pin(assignment.spec) if assignment.spec else None
        self._daemon = host.daemons.get(assignment.spec.runtime) if assignment.spec else None
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._work: asyncio.Task[None] | None = None
        self.log_path = host.folder / "logs" / f"{assignment.namespace}_{assignment.name}.log"
        self._reported_at = 0.0
        self._log = log.bind(process=f"{assignment.namespace}/{assignment.name}")
        hold = host.hold(assignment.uid)
        self.state, self._first = lifecycle.start(hold)
        if record and adopted:
            self.state, self._first = lifecycle.adopt(
                adopted.pid, ready=bool(record.ready_at), restarts=record.restarts, now=time.monotonic(), hold=hold
            )
            self._log.info("adopted", pid=adopted.pid, model=adopted.model, phase=self.state.phase)

    @property
    def url(self) -> str | None:
        """Where the engine answers, once it has generated a token."""
        return self.record.url if self.record and self.state.phase in {"Ready", "Stopping"} else None

    @property
    def model(self) -> str | None:
        """Name by which the engine knows what it serves, where that is not the service's own."""
        spec = self.assignment.spec
        if self._engine is None or spec is None:
            return None
        return self._engine.model or engine.served_name(spec)

    @property
    def api_key(self) -> str | None:
        """What the engine itself wants to be asked with. Never logged."""
        return self._engine.token if self._engine else None

    def remove(self) -> None:
        """Have it stopped: the API no longer wants it here."""
        self.removed = True
        if not self.state.leaving:
            self._events.put_nowait(lifecycle.Removed())

    def try_again(self) -> None:
        """Let it not wait for its back-off to end: what it failed for may be mended."""
        self._events.put_nowait(lifecycle.Elapsed())

    @property
    def rank(self) -> int:
        """Its place among the priorities, the most important first."""
        return RANKS[self.assignment.spec.priority] if self.assignment.spec else len(RANKS)

    def tell(self, event: Held | Evicted | Released | Freed) -> None:
        """Let it know what the host's memory allows."""
        self._events.put_nowait(event)

    async def prove(self) -> None:
        """Doubt that the engine still answers, as after a sleep of the machine, and look at it now."""
        if self.state.phase == "Ready" and self.state.pid is not None:
            self.proven = False
            await self._look(await cpu_seconds(self.state.pid))

    async def run(self) -> None:
        """Live until Stopped. When cancelled, the engine goes on, for the next agent to adopt."""
        try:
            async with asyncio.TaskGroup() as group:
                if self._engine:
                    group.create_task(self._watch(self._engine))
                self._enter(group, self.state, self._first)
                while self.state.phase != "Stopped":
                    event = await self._events.get()
                    self._enter(group, *step(self.state, event, time.monotonic()))
        finally:
            self._pin(None)
            if self._engine:
                self._engine.release()

    def status(self, port: int | None) -> MetalProcessStatus:
        """Report where it stands; `port` is the service's on the host's address."""
        state, record = self.state, self.record if self.state.exists else None
        return MetalProcessStatus(
            phase=state.phase,
            reason=state.reason,
            message=state.message[:4096],
            progress=self.progress if state.phase == "Fetching" else None,
            pid=state.pid,
            port=port,
            restarts=state.restarts or None,
            started_at=record.started_at if record else None,
            ready_at=record.ready_at if record else None,
            last_exit=state.last_exit,
        )

    def remember(self) -> None:
        """Write down what the next agent needs to adopt the engine, unless it is; call it again now and then.

        Until it succeeds, an agent that restarts would not adopt the engine, and would start another in its place.
        """
        if self.record is None or self._recorded:
            return
        try:
            self._host.records.write(self.record)
        except OSError as error:
            self._log.error("cannot write the process's record", error=str(error))
        else:
            self._recorded = True

    def _enter(self, group: asyncio.TaskGroup, state: State, actions: tuple[lifecycle.Action, ...]) -> None:
        """Take on a state and begin its actions, in the place of those that still run."""
        self._take_on(state)
        while lifecycle.Spawn() in actions:
            # At once, so that no event comes between the start of an engine and the state that knows of it.
            state, actions = step(self.state, self._spawn(group), time.monotonic())
            self._take_on(state)
        if self._work and (actions or self.state.phase in {"Stopped", "Rejected"}):
            self._work.cancel()
        if actions:
            self._work = group.create_task(self._perform_all(actions))

    def _take_on(self, state: State) -> None:
        before, self.state = self.state, state
        if state.exists and state.phase == "Starting" and not state.reason:
            self._host.loads.occupy(self.assignment.uid)
        elif state.phase != "Starting" and not state.queued:
            self._host.loads.leave(self.assignment.uid)
        if state.phase in {"Rejected", "Stopped"}:
            self._host.ledger.release(self.assignment.uid)
            self._pin(None)
        if state.needed_bytes is not None and state.needed_bytes <= self._host.ledger.available_bytes:
            self.tell(Freed())  # that memory came free while the refusal was on its way
        if state.phase == "Ready" and before.phase != "Ready":
            self.proven = True
            self._remember_ready()
        if (state.phase, state.reason, state.pid) != (before.phase, before.reason, before.pid):
            self._log.info("phase", phase=state.phase, reason=state.reason, message=state.message, pid=state.pid)
        self._host.changed(self)

    async def _perform_all(self, actions: tuple[lifecycle.Action, ...]) -> None:
        for action in actions:
            try:
                event = await self._perform(action)
            except Exception as error:  # noqa: BLE001 - a defect in one action must not end the host's other processes
                self._log.exception("action failed", action=action)
                event = lifecycle.Failed("InternalError", f"{type(action).__name__}: {error}")
            if event:
                self._events.put_nowait(event)

    async def _perform(self, action: lifecycle.Action) -> Event | None:
        match action:
            case lifecycle.Check():
                return await self._check()
            case lifecycle.Fetch():
                return await self._fetch()
            case lifecycle.Queue():
                await self._host.loads.turn(self.assignment.uid, self.rank)
                return lifecycle.Turn()
            case lifecycle.Probe():
                return await self._probe(action.timeout_seconds)
            case lifecycle.Attend():
                return await self._attend()
            case lifecycle.Wait():
                await asyncio.sleep(action.seconds)
                return lifecycle.Elapsed()
            case lifecycle.Withdraw():
                await self._host.exposure.withdraw(self.assignment)
            case lifecycle.Drain():
                await self._host.exposure.drain(self.assignment.uid, DRAIN_SECONDS)
            case lifecycle.End() if self._engine:
                await self._end(self._engine)
        return None

    async def _end(self, running: Handle) -> None:
        """End the engine, whatever goes wrong on the way: nobody else would, and its memory stays reserved."""
        while True:
            try:
                return await running.end(GRACE_SECONDS)
            except Exception:  # noqa: BLE001 - whatever it is, the engine still has to go
                self._log.exception("cannot end the engine, trying again", seconds=_END_AGAIN_SECONDS)
                await asyncio.sleep(_END_AGAIN_SECONDS)

    async def _check(self) -> Event:
        if self._daemon:
            await self._daemon.look()
            if self._daemon.problem and self._daemon.daemon.installed():
                return lifecycle.Failed("DaemonNotUsable", self._daemon.problem)
        host = self._host
        await host.look()
        return await admit(self.assignment, host.weights, host.ledger, host.peaks, host.daemons.usable())

    async def _fetch(self) -> Event:
        assert self.assignment.spec, "only what was admitted is fetched"  # noqa: S101 - for the type checker
        spec = self.assignment.spec
        names = [spec.source_secret, *(each.source_secret for each in spec.further_artifacts)]
        tokens = [name and self._host.secret(self.assignment.namespace, name) for name in names]
        for name, token in zip(names, tokens, strict=True):
            if name and token is None:
                return lifecycle.Failed("SecretUnknown", f"the token in Secret {name} has not arrived here")
        try:
            if self._daemon and parse(spec.artifact.source).is_library:
                await self._bring(self._daemon, spec, spec.artifact.source)
            else:
                self._pin(await self._host.weights.fetch(spec, tokens, self._on_progress))
                if self._daemon and self._weights:
                    await self._bring(self._daemon, spec, str(self._weights.model))
        except ArtifactError as error:
            self._pin(self._host.weights.pin(spec))  # or what is here would make room for another, and come back
            return refusal(spec.artifact.source, error)
        except DaemonError as error:
            return lifecycle.Failed(error.reason, str(error))
        return lifecycle.Fetched()

    async def _bring(self, shared: SharedDaemon, spec: MetalProcessSpec, model: str) -> None:
        """Have the daemon know the model, a path or what it pulls by itself. Raises DaemonError."""
        serving = replace(engine.serving(spec, Path()), model=model)
        await shared.bring(shared.name(spec), serving, self._on_progress)
        if shared.daemon.copies:
            self._pin(None)

    def _pin(self, weights: Pinned | None) -> None:
        """Hold these weights in place of others; an engine that has them holds them by itself."""
        if self._weights:
            self._weights.release()
        self._weights = weights

    def _on_progress(self, here_bytes: int, total_bytes: int | None) -> None:
        self.progress = Progress(bytes=here_bytes, total_bytes=total_bytes)
        if time.monotonic() - self._reported_at >= PROGRESS_SECONDS:
            self._reported_at = time.monotonic()
            self._host.changed(self)

    def _spawn(self, group: asyncio.TaskGroup) -> Event:
        """Start the engine and write it down; between the two it is marked, and a later agent clears it up."""
        spec = self.assignment.spec
        there = self._daemon or (self._weights and self._weights.exists)
        if spec is None or not there:
            return lifecycle.Failed("WeightsMissing", "the weights are gone, and are fetched again")
        if not self._host.loads.take(self.assignment.uid):
            return lifecycle.Busy()
        try:
            started = self._start(spec)
        except (OSError, ValueError) as error:
            # ValueError: arguments that no process can have, such as one with a NUL.
            return lifecycle.Failed("SpawnFailed", f"the engine cannot be started: {error}")
        self._engine = started
        group.create_task(self._watch(started))
        if started.identity or started.model:
            self._keep(
                Record(
                    uid=self.assignment.uid,
                    namespace=self.assignment.namespace,
                    name=self.assignment.name,
                    spec=spec,
                    identity=started.identity,
                    model=started.model or "",
                    started_at=rfc3339(datetime.now(UTC)),
                    restarts=self.state.restarts,
                )
            )
        return lifecycle.Spawned(started.pid)

    def _start(self, spec: MetalProcessSpec) -> Handle:
        """Start a process, or the loading into a daemon. Raises OSError and ValueError."""
        if self._daemon:
            return self._daemon.start(self._daemon.name(spec))
        weights = self._weights
        assert weights, "no process is started without weights"  # noqa: S101 - for the type checker
        if self.log_path.exists():
            self.log_path.replace(logs.previous(self.log_path))
        argv = engine.argv(spec, weights.model, weights.further)
        return spawn.spawn(argv, engine.environment(spec), self.log_path, self._host.folder, weights.descriptors)

    async def _watch(self, running: Handle) -> None:
        how = await running.wait()
        self._engine = self.record = None
        self._host.records.remove(self.assignment.uid)
        self._events.put_nowait(
            lifecycle.Exited(
                LastExit(
                    code=how.code,
                    signal=how.signal or "",
                    time=rfc3339(datetime.now(UTC)),
                    log=spawn.last_lines(self.log_path),
                ),
                how.reason,
                how.message,
                fetched=how.reason != UNKNOWN_MODEL,
            )
        )

    async def _probe(self, timeout_seconds: float) -> Event:
        """Ask until a token comes: the kernel where the engine listens, then the engine."""
        problem, pause = "it does not listen yet", _FIRST_PAUSE_SECONDS
        spec = self.assignment.spec
        assert spec, "only what was admitted is started"  # noqa: S101 - for the type checker
        url: str | None = None
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    # Who listens has been found once: to ask the kernel again takes longer than to ask the engine.
                    url = url or (await asyncio.to_thread(self._engine.url) if self._engine else None)
                    if self._engine and url:
                        found = await generate_token(
                            self._host.session,
                            url,
                            model=self.model or spec.service_name,
                            token=self._engine.token,
                            timeout_seconds=_PROBE_SECONDS,
                            mode=spec.mode,
                        )
                        if found.ok:
                            self._remember_url(url)
                            return lifecycle.Answered()
                        # A process that listens and does not know our question never will; a daemon may be loading.
                        if found.reason == "Broken" or (found.reason == "NotFound" and self.state.pid is not None):
                            return lifecycle.Failed("EngineBroken", found.message)
                        problem = found.message
                        if found.reason == "Unreachable":
                            url = None
                    await asyncio.sleep(pause)
                    pause = min(_LAST_PAUSE_SECONDS, pause * 1.2)
        except TimeoutError:
            return lifecycle.Failed("StartTimeout", f"no token within {timeout_seconds:.0f} s: {problem}")

    async def _attend(self) -> Event | None:
        """Look at the Ready engine now and then, until it is found to hang."""
        spec = self.assignment.spec
        if self.state.pid is None or spec is None:
            return None  # the model of a shared daemon is watched by its handle
        failures, before = 0, await cpu_seconds(self.state.pid)
        while True:
            await asyncio.sleep(liveness.pause_seconds(RUNTIMES[spec.runtime].pulse, failures))
            try:
                look = await self._look(before)
            except Exception:  # noqa: BLE001 - a defect in looking is no reason to end an engine
                self._log.exception("cannot look at the engine")
                continue
            failures, before = liveness.failures(failures, look), look.after
            if look.alive:
                continue
            self._log.warning("engine shows no life", pid=self.state.pid, looks=failures, problem=look.problem)
            if failures >= liveness.HUNG_LOOKS:
                return lifecycle.Hung(f"the engine hangs: {look.problem}; it is ended and started again")

    async def _look(self, before: float | None) -> Look:
        """Look once at the Ready engine; `before` is its processor time at the last look."""
        url, pid, spec = self.url, self.state.pid, self.assignment.spec
        assert url and pid and spec, "only what is Ready is looked at"  # noqa: S101, PT018 - for the type checker
        requests = self._host.exposure.requests(self.assignment.uid)
        asked, after = None, await cpu_seconds(pid) if requests else None
        if liveness.should_ask(requests, before, after):
            pulse = RUNTIMES[spec.runtime].pulse
            model = self.model or spec.service_name
            asked = await liveness.ask(self._host.session, url, pulse=pulse, model=model, mode=spec.mode)
            # Of one that rests and answers nobody needs to know it: that is most of all looks.
            after = await cpu_seconds(pid) if asked.silent or requests else None
        look = Look(asked, before, after)
        if look.alive and not self.proven:
            self.proven = True
            self._host.changed(self)
        return look

    def _remember_url(self, url: str) -> None:
        if self.record:
            self.record = structs.replace(self.record, url=url)

    def _remember_ready(self) -> None:
        if self.record and not self.record.ready_at:
            self._keep(structs.replace(self.record, ready_at=rfc3339(datetime.now(UTC))))

    def _keep(self, record: Record) -> None:
        self.record, self._recorded = record, False
        self.remember()
