"""The runner of one process: it performs the actions that `lifecycle.step` returns, and feeds back their outcome."""

import asyncio
import time
from datetime import UTC, datetime
from functools import partial
from typing import Final

import structlog
from msgspec import structs

from artifacts.errors import ArtifactError
from artifacts.source import parse
from artifacts.transfer_rate import TransferMeter
from crds.meta import PRIORITY_RANK
from crds.metalprocess import HOLDS_NO_MEMORY, FetchProgress, LastExit, MetalProcessSpec, MetalProcessStatus, with_edits
from kube.time import rfc3339
from metal_agent import lifecycle
from metal_agent import process_events as events
from metal_agent.assignments import Assignment
from metal_agent.daemons import SharedDaemon
from metal_agent.engine_health import Suspicion
from metal_agent.lifecycle import ProcessAction, ProcessState, step
from metal_agent.memory.admission import admit, explain_artifact_error, find_understatement
from metal_agent.native import engine_command, log_files
from metal_agent.native.engine_handle import EngineHandle
from metal_agent.native.process import read_last_log_lines, spawn_process
from metal_agent.process_events import MemoryFreed, ProcessEvent
from metal_agent.supervise import engine_checks
from metal_agent.supervise.engine_checks import LivenessCheck, LivenessWatch, ProbedEngine, read_cpu_seconds
from metal_agent.supervise.host_parts import RunnerContext
from metal_agent.supervise.records import Record
from metal_agent.weights import PinnedWeights
from runtimes.daemon import UNKNOWN_MODEL, DaemonError
from runtimes.registry import RUNTIMES

_ANSWER_SECONDS: Final = 1.0
"""Time for the proxy to answer at the end of a drain."""
_END_AGAIN_SECONDS: Final = 5.0

log = structlog.get_logger()


class Runner:
    """The runner of one MetalProcess, from its assignment, or the adoption of the engine of `record`, to Stopped."""

    def __init__(
        self,
        assignment: Assignment,
        host: RunnerContext,
        record: Record | None = None,
        adopted: EngineHandle | None = None,
    ) -> None:
        """Begin as Pending or, with `record` and `adopted`, go on with an engine that an earlier agent started."""
        self.assignment = assignment
        self.record = record
        self._record_written = True  # False: the last write failed, and `write_record` tries again
        self.progress: FetchProgress | None = None
        self.transfer = TransferMeter()  # measures its fetches
        self.removed = False  # True if the process is no longer assigned to this host
        self.is_answering = True
        """False from a call of `check_liveness` until a check finds the engine alive; True when it becomes Ready."""

        self._host = host
        self._engine = adopted
        self._key = adopted.key if adopted else None  # that of the engine's process, or of the last one
        self._weights = host.weights.pin(assignment.spec)  # those on disk, locked; None if there are none
        self._daemon = host.daemons.get(assignment.spec.runtime)  # None if the engine has a process of its own
        self._events: asyncio.Queue[ProcessEvent] = asyncio.Queue()  # handled by `run`, one after the other
        self._actions_task: asyncio.Task[None] | None = None  # performs the actions of the state
        self.log_path = host.folder / "logs" / log_files.engine_log_name(assignment.namespace, assignment.name)
        self._log = log.bind(process=f"{assignment.namespace}/{assignment.name}")
        count_requests = partial(host.exposure.requests, assignment.uid)
        self._liveness = LivenessWatch(self.find_engine, count_requests, on_check=self._note_check, log=self._log)

        hold = host.hold(assignment.uid)  # None if nothing keeps its engine from starting
        self.state, self._first_actions = lifecycle.start_lifecycle(hold)
        if record and adopted:
            self.state, self._first_actions = lifecycle.resume_lifecycle(
                adopted.pid, ready=bool(record.ready_at), restarts=record.restarts, now=time.monotonic(), hold=hold
            )
            self._log.info("engine_adopted", pid=adopted.pid, model=adopted.model, phase=self.state.phase)

    @property
    def url(self) -> str | None:
        """URL of the engine, once it has generated a token."""
        return self.record.url if self.record and self.state.phase in {"Ready", "Stopping"} else None

    @property
    def model(self) -> str | None:
        """Name of the model in requests to the engine, if it is not the service's name."""
        if self._engine is None:
            return None
        return self._engine.model or engine_command.find_served_name(self.assignment.spec)

    @property
    def api_key(self) -> str | None:
        """Bearer token that the engine itself requires. Never logged."""
        return self._engine.token if self._engine else None

    def remove(self) -> None:
        """Request the end of the process, which is no longer assigned to this host; `run` then drains and stops it."""
        self.removed = True
        if not self.state.leaving:
            self._events.put_nowait(events.Removed())

    def apply_edits(self, spec: MetalProcessSpec) -> None:
        """Apply those fields of `spec` that may change while the engine runs, here and in the record on disk."""
        before = self.assignment.spec
        if with_edits(before, spec) == before:
            return  # nothing that may change differs
        self.assignment = structs.replace(self.assignment, spec=with_edits(before, spec))
        if self.record:
            self._set_record(structs.replace(self.record, spec=with_edits(self.record.spec, spec)))
        self._host.changed(self)

    @property
    def priority_rank(self) -> int:
        """Position in the order of importance; 0 is the most important."""
        return PRIORITY_RANK[self.assignment.spec.priority]

    def notify(self, event: ProcessEvent) -> None:
        """Send an event about the host, or about the answers that the proxy sees of the engine."""
        self._events.put_nowait(event)

    async def check_liveness(self) -> None:
        """Check the Ready engine now, as after a sleep of the machine; until it is alive, its endpoint is not ready."""
        if self.state.phase == "Ready" and self.state.pid is not None:
            self.is_answering = False
            await self._liveness.check_once(await read_cpu_seconds(self.state.pid))

    async def run(self) -> None:
        """Run until Stopped. When cancelled, the engine goes on, for the next agent to adopt."""
        try:
            async with asyncio.TaskGroup() as group:
                if self._engine:
                    group.create_task(self._watch_exit(self._engine))
                self._enter_state(group, self.state, self._first_actions)
                while self.state.phase != "Stopped" or self.state.exists:
                    event = await self._events.get()
                    self._enter_state(group, *step(self.state, event, time.monotonic()))
        finally:
            self._hold_weights(None)
            if self._engine:
                self._engine.release()

    def build_status(self, port: int | None) -> MetalProcessStatus:
        """Return the status; `port` is the service's port on the host's address."""
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
            performance=self._host.measurements.find(self.assignment.spec),
        )

    def write_record(self) -> None:
        """Write the record that the next agent needs to adopt the engine, unless it is written.

        It is called again until it succeeds: without a record, the next agent would kill the engine and start another.
        """
        if self.record is None or self._record_written:
            return
        try:
            self._host.records.write(self.record)
        except OSError as error:
            self._log.error("record_not_written", error=str(error))
        else:
            self._record_written = True

    def _enter_state(self, group: asyncio.TaskGroup, state: ProcessState, actions: tuple[ProcessAction, ...]) -> None:
        """Enter a state and start its actions, in place of those that still run.

        Without actions, those that run go on, except for a process at rest: Rejected or Stopped, without an engine.
        """
        self._apply_state(state)
        while lifecycle.Spawn() in actions:
            # Not in a task, so that no event is handled between the start of an engine and its state. The outcome is an
            # event, which leads to the next state; that may spawn again.
            state, actions = step(self.state, self._spawn(group), time.monotonic())
            self._apply_state(state)
        is_at_rest = self.state.phase in HOLDS_NO_MEMORY and not self.state.exists
        if self._actions_task and (actions or is_at_rest):
            self._actions_task.cancel()
        if actions:
            self._actions_task = group.create_task(self._perform_all(actions))

    def _apply_state(self, state: ProcessState) -> None:
        """Set `state`, and bring everything that depends on it into line; log and report the change.

        An engine that loads occupies the load slot of the host. At rest (Rejected or Stopped, without an engine) the
        process gives back its memory, its key and the lock on its weights. Its first Ready is noted in the record.
        """
        before, self.state = self.state, state
        # The slot is held from the start of the engine to its first token; with a reason, it is being ended.
        is_loading = state.exists and state.phase == "Starting" and not state.reason
        if is_loading:
            self._host.loads.occupy(self.assignment.uid)
        elif state.phase != "Starting" and not state.queued:  # queued: it waits for the slot
            self._host.loads.release(self.assignment.uid)
        # At rest: it needs nothing of the host any more.
        if state.phase in HOLDS_NO_MEMORY and not state.exists:
            self._host.ledger.release(self.assignment.uid)
            if self._key:
                self._host.keys.remove(self._key.path)
                self._key = None
            self._hold_weights(None)

        if state.needed_bytes is not None and state.needed_bytes <= self._host.ledger.available_bytes:
            self.notify(MemoryFreed())  # the memory became free before the refusal arrived
        if state.phase == "Ready" and before.phase != "Ready":
            self.is_answering = True
            if self.record and not self.record.ready_at:
                self._set_record(structs.replace(self.record, ready_at=rfc3339(datetime.now(UTC))))

        if (state.phase, state.reason, state.pid) != (before.phase, before.reason, before.pid):
            phase, reason = state.phase, state.reason
            self._log.info("phase_changed", phase=phase, reason=reason, message=state.message, pid=state.pid)
        self._host.changed(self)

    async def _perform_all(self, actions: tuple[ProcessAction, ...]) -> None:
        """Perform actions in order, and put the outcome of each into the queue of events."""
        for action in actions:
            try:
                event = await self._perform(action)
            except Exception as error:  # noqa: BLE001 - a defect in one action must not end the host's other processes
                self._log.exception("action_failed", action=action)
                event = events.Failed("InternalError", f"{type(action).__name__}: {error}")
            if event:
                self._events.put_nowait(event)

    async def _perform(self, action: ProcessAction) -> ProcessEvent | None:
        """Perform one action; return its outcome, if it has one."""
        match action:
            case lifecycle.CheckAdmission():
                return await self._check_admission()
            case lifecycle.Fetch():
                return await self._fetch()
            case lifecycle.AwaitLoadSlot():
                await self._host.loads.acquire(self.assignment.uid, self.priority_rank)
                return events.LoadSlotGranted()
            case lifecycle.ProbeEngine():
                return await self._probe(action.timeout_seconds)
            case lifecycle.WatchLiveness():
                return await self._liveness.watch()  # Hung; None: it has ended, or is a daemon's model
            case lifecycle.CheckSuspect():
                await asyncio.sleep(action.pause_seconds)
                return await self._check_suspect(action.suspicion)
            case lifecycle.BackOff():
                await asyncio.sleep(action.seconds)
                return events.BackoffElapsed()
            case lifecycle.Withdraw(timeout_seconds):
                await self._host.exposure.withdraw(self.assignment, timeout_seconds)
            case lifecycle.Drain(timeout_seconds):
                await self._drain(timeout_seconds)
            case lifecycle.End(grace_seconds, even_if_shared) if self._engine:
                await self._end(self._engine, grace_seconds, even_if_shared=even_if_shared)
        return None

    async def _drain(self, timeout_seconds: float | None) -> None:
        """Send the process no new request, and wait until it has none, or for the time; None: that of its spec."""
        if timeout_seconds is None:
            timeout_seconds = self.assignment.spec.drain_seconds
        try:
            async with asyncio.timeout(timeout_seconds + _ANSWER_SECONDS):
                await self._host.exposure.drain(self.assignment.uid, timeout_seconds)
        except TimeoutError:
            self._log.warning("drain_gave_up", after_seconds=timeout_seconds)

    async def _end(self, running: EngineHandle, grace_seconds: float, *, even_if_shared: bool) -> None:
        """End the engine; retry for ever after an error, since nothing else would end it and its memory stays reserved.

        If it has not ended after the usual time, an event says so, and the end goes on.
        """
        limit_seconds = lifecycle.UNLOAD_LIMIT_SECONDS if self._daemon else lifecycle.END_LIMIT_SECONDS
        limit_seconds += grace_seconds
        overdue = events.EndOverdue(self._describe_overdue(running, limit_seconds))
        timer = asyncio.get_running_loop().call_later(limit_seconds, self._events.put_nowait, overdue)
        try:
            while True:
                try:
                    return await running.end(grace_seconds, even_if_shared=even_if_shared)
                except Exception:  # noqa: BLE001 - whatever it is, the engine still has to end
                    self._log.exception("engine_end_failed", retry_seconds=_END_AGAIN_SECONDS)
                    await asyncio.sleep(_END_AGAIN_SECONDS)
        finally:
            timer.cancel()

    def _describe_overdue(self, running: EngineHandle, seconds: float) -> str:
        """Return the message of an engine that does not end."""
        kept = "its memory stays reserved as long as it exists"
        if self._daemon:
            name, model = self._daemon.daemon.runtime, running.model
            return f"{name} has not unloaded {model} in {seconds:.0f} s; {kept}: unload it or restart {name}"
        return f"process {running.pid} has not ended in {seconds:.0f} s; {kept}: restart the machine"

    async def _check_admission(self) -> ProcessEvent:
        """Ask the daemon for its models and measure the memory, then admit or refuse the process.

        Return the outcome as an event; on Admitted its memory is reserved.
        """
        if self._daemon:
            await self._daemon.ensure_running()
            if self._daemon.problem and self._daemon.daemon.installed():
                return events.Failed("DaemonNotUsable", self._daemon.problem)
        host = self._host
        await host.measure_memory()
        return await admit(self.assignment, host.weights, host.ledger, host.peaks, host.daemons.usable())

    async def _fetch(self) -> ProcessEvent:
        """Fetch and check the weights, and make them known to a daemon; return the outcome as an event.

        Files are locked, so that they are not deleted to make room while they are needed. Models of the scheme
        `ollama` are fetched by the daemon itself. Refused and Failed: the weights need more memory than is reserved,
        this runtime cannot serve them, a Secret is missing, or the source or the daemon failed.
        """
        spec = self.assignment.spec
        # 1. The tokens for private sources, which the controller copies to this host.
        names = [spec.source_secret, *(artifact.source_secret for artifact in spec.further_artifacts)]
        tokens = [self._host.secret(self.assignment.namespace, name) if name else None for name in names]
        for name, token in zip(names, tokens, strict=True):
            if name and token is None:
                message = (
                    f"waiting for the key `token` of Secret {name}, which the controller copies to this host if its "
                    "owner gave it to sources: see condition SourceSecretAccepted of the Model"
                )
                return events.Failed("SecretUnknown", message)

        try:
            # 2. Fetch the weights, and check what has arrived.
            if self._daemon and parse(spec.artifact.source).scheme == "ollama":
                await self._provide_to_daemon(self._daemon, spec, spec.artifact.source)
            else:
                fetched = await self._host.weights.fetch(self.assignment.namespace, spec, tokens, self._on_progress)
                if understated := find_understatement(spec, fetched.layout, fetched.draft_layout):
                    fetched.release()
                    return understated
                if obstacle := engine_command.find_obstacle(spec, fetched.headers):
                    fetched.release()
                    return events.Failed("Unsupported", obstacle, permanent=True)
                self._hold_weights(fetched)  # keep them locked
                if self._daemon and self._weights:
                    await self._provide_to_daemon(self._daemon, spec, str(self._weights.model))
        except ArtifactError as error:
            # Without a lock the files on disk could be deleted to make room, and would be fetched again.
            self._hold_weights(self._host.weights.pin(spec))
            return explain_artifact_error(spec.artifact.source, error)
        except DaemonError as error:
            return events.Failed(error.reason, str(error))
        return events.Fetched()

    async def _provide_to_daemon(self, shared: SharedDaemon, spec: MetalProcessSpec, model: str) -> None:
        """Make `model`, a path or a name in the daemon's library, known to the daemon. Raises DaemonError.

        The lock on the weights is released if the daemon has copied them.
        """
        serving = engine_command.build_process_serving(spec, model)
        await shared.add_model(shared.build_name(spec), serving, self._on_progress)
        if shared.daemon.copies:  # the daemon needs our copy no more
            self._hold_weights(None)

    def _hold_weights(self, weights: PinnedWeights | None) -> None:
        """Keep the lock on these weights in place of the earlier ones, or on none; an engine has locks of its own."""
        if self._weights:
            self._weights.release()
        self._weights = weights

    def _on_progress(self, fetched_bytes: int, total_bytes: int | None) -> None:
        """Note the progress of a fetch, and report it about once a second."""
        self.progress = FetchProgress(bytes=fetched_bytes, total_bytes=total_bytes)
        if self.transfer.note(fetched_bytes, total_bytes, time.monotonic()):
            self._host.changed(self)

    def _spawn(self, group: asyncio.TaskGroup) -> ProcessEvent:
        """Start the engine, or its load in a daemon, and write its record; return the outcome as an event.

        LoadSlotBusy: another engine loads. Without a record, the next agent would find and kill the engine.
        """
        spec = self.assignment.spec
        # A daemon keeps a copy of its own; that it has lost it is found out by the load.
        has_weights = self._daemon or (self._weights and self._weights.exists)
        if self.assignment.problem:
            return events.Failed("Unsupported", self.assignment.problem, permanent=True)
        if not has_weights:
            return events.Failed("WeightsMissing", "the weights were deleted from this host, and are fetched again")
        if not self._host.loads.try_acquire(self.assignment.uid):
            return events.LoadSlotBusy()
        try:
            started = self._start_engine(spec)
        except (OSError, ValueError) as error:
            # ValueError: the runtime is no longer installed, or an argument is impossible, such as one with a NUL.
            return events.Failed("SpawnFailed", f"the engine cannot be started: {error}")

        self._engine = started
        group.create_task(self._watch_exit(started))
        if started.identity or started.model:  # else its process has ended at once
            self._set_record(
                Record(
                    uid=self.assignment.uid,
                    namespace=self.assignment.namespace,
                    name=self.assignment.name,
                    spec=spec,
                    identity=started.identity,
                    key_file=str(self._key.path) if self._key else "",
                    model=started.model or "",
                    started_at=rfc3339(datetime.now(UTC)),
                    restarts=self.state.restarts,
                )
            )
        return events.Spawned(started.pid)

    def _start_engine(self, spec: MetalProcessSpec) -> EngineHandle:
        """Start a process with a new key and log, or load the model in the daemon. Raises OSError and ValueError."""
        if self._daemon:
            return self._daemon.start(self._daemon.build_name(spec))
        weights = self._weights
        assert weights, "no process is started without weights"  # noqa: S101 - for the type checker
        if self.log_path.exists():
            self.log_path.replace(log_files.previous_log_path(self.log_path))
        self._key = key = self._host.keys.create(self.assignment.uid, self._key)
        argv = engine_command.build_argv(spec, weights.model, key.path, weights.further, weights.layout)
        environment = engine_command.build_environment(spec)
        started = spawn_process(argv, environment, self.log_path, self._host.folder, weights.descriptors)
        started.key = key
        return started

    async def _watch_exit(self, running: EngineHandle) -> None:
        """Wait for the end of the engine, delete its record, and put the exit into the queue of events."""
        ended = await running.wait()
        self._engine = self.record = None
        self._host.records.remove(self.assignment.uid)
        now, log = rfc3339(datetime.now(UTC)), read_last_log_lines(self.log_path)
        last_exit = LastExit(code=ended.code, signal=ended.signal or "", time=now, log=log)
        is_fetched = ended.reason != UNKNOWN_MODEL  # a daemon that does not know the model has lost its weights
        self._events.put_nowait(events.Exited(last_exit, ended.reason, ended.message, fetched=is_fetched))

    async def find_engine(self) -> ProbedEngine | None:
        """Return where and how to send requests to the engine, once it listens; None before that and after its end."""
        spec, engine = self.assignment.spec, self._engine
        url = self.url  # noted at its first token; before that the kernel, or the daemon, is asked
        if url is None and engine:
            url = await asyncio.to_thread(engine.url)
        if engine is None or url is None:
            return None
        return ProbedEngine(
            session=self._host.session,
            url=url,
            model=self.model or spec.service_name,  # the name in requests
            token=engine.token,
            mode=spec.mode,
            pid=self.state.pid,
            pulse=RUNTIMES[spec.runtime].pulse,  # a path whose answer proves that it works, if it has one
            engine=spec.runtime,
        )

    async def _probe(self, timeout_seconds: float) -> ProcessEvent:
        """Request a token until the engine generates one, and note its URL; return the outcome as an event."""
        report = self._events.put_nowait
        engine, outcome = await engine_checks.await_first_token(self.find_engine, timeout_seconds, report)
        if engine and self.record:
            self.record = structs.replace(self.record, url=engine.url)
        return outcome

    def _note_check(self, check: LivenessCheck) -> None:
        """Note the outcome of a check: an engine that answers again makes its endpoint ready."""
        if check.alive and not self.is_answering:
            self.is_answering = True
            self._host.changed(self)

    async def _check_suspect(self, suspicion: Suspicion) -> ProcessEvent | None:
        """Request a token from the suspect engine; return Trusted or Hung, or None if it ended meanwhile.

        If it works, the proxy forgets its suspicion, so that it reports the engine if that fails again.
        """
        try:
            engine = await self.find_engine()
            if engine is None:
                return None
            self._log.warning("engine_suspect", reason=suspicion.reason, problem=suspicion.message, pid=engine.pid)
            outcome = await engine_checks.check_suspect(engine, suspicion)
            self._log.info("suspect_checked", healthy=outcome == events.Trusted(), pid=engine.pid)
        except Exception:
            await self._host.exposure.clear_suspicion(self.assignment.uid)
            raise
        if outcome == events.Trusted():
            await self._host.exposure.clear_suspicion(self.assignment.uid)
        return outcome

    def _set_record(self, record: Record) -> None:
        """Replace the record in memory, and write it; a write that fails is tried again by `write_record`."""
        self.record, self._record_written = record, False
        self.write_record()
