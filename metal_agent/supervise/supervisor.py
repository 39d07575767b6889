"""Keep a runner for each process assigned to this host, and adopt engines that an earlier agent left running."""

import asyncio
import contextlib
from collections.abc import Collection, Iterable

import structlog
from msgspec import structs

from crds.metalprocess import HOLDS_NO_MEMORY, MetalProcessSpec
from metal_agent.assignments import UNREADABLE, Assignment
from metal_agent.lifecycle import STABLE_SECONDS, restart_backoff_seconds
from metal_agent.memory.pressure_watchdog import memory_stage
from metal_agent.native import log_files
from metal_agent.native.engine_handle import EngineHandle
from metal_agent.native.process import adopt_process, kill_strays
from metal_agent.periodic import run_periodically
from metal_agent.process_events import BackoffElapsed, MemoryFreed
from metal_agent.supervise import handover
from metal_agent.supervise.host_parts import RunnerContext
from metal_agent.supervise.records import Record
from metal_agent.supervise.runner import Runner

_STANDARD_ERROR = 2

log = structlog.get_logger()


class Supervisor:
    """The processes of one host: `runners` by uid of their MetalProcess, changed only here; they run in `group`."""

    def __init__(self, host: RunnerContext, runners: dict[str, Runner], group: asyncio.TaskGroup) -> None:
        """Run the processes of `runners` as tasks of `group`, and recheck rejected ones when memory is freed."""
        self.runners = runners
        self._host = host
        self._group = group
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sleeping: Collection[MetalProcessSpec] = ()
        """Specs of processes that do not run now, and will again: daemons keep their models."""
        self._has_full_list = False
        """True once a full list of assignments was seen; before, a process without a runner may still be assigned."""
        host.ledger.freed = self._recheck_rejected

    async def recover(self, other_pids: Iterable[int] = ()) -> None:
        """Adopt every recorded engine that still runs; kill processes of this agent without a record.

        Called once, before any start, so that no engine runs twice. In this order:
        1. Ask the daemons which models they have.
        2. Adopt the engine of each record, with its memory, by a new runner; delete records of engines that are gone.
        3. Delete keys that no adopted engine has, and kill strays: a process without a record is never used again.
        4. Begin to look after the logs.

        `other_pids` are processes of this agent that are no engines. Raises OSError if it cannot be found out which
        engines run.
        """
        daemons = self._host.daemons
        daemons.subscribe(self._daemon_changed)
        await daemons.check_models()  # step 1
        self._group.create_task(daemons.run())

        adopted = set()  # by what identifies an engine, not by process
        records = self._host.records.load()  # step 2
        # An engine of `pomona up` (standalone) that was handed over to the cluster may have a record of each. The
        # cluster's is the later one: it is adopted first, and the other is then a duplicate.
        for uid, record in sorted(records.items(), key=lambda entry: entry[1].assignment.is_standalone):
            engine_key = (record.identity, record.spec.runtime, record.model)
            # One model in a daemon can serve several MetalProcesses, each with a record of its own.
            is_duplicate = engine_key in adopted and (record.identity is not None or record.assignment.is_standalone)
            # _adopt returns None if the engine is gone.
            engine = None if is_duplicate else self._adopt(record)
            adopted.add(engine_key)
            if engine is None:
                log.info("recorded_engine_is_gone", process=f"{record.namespace}/{record.name}")
                self._host.records.remove(uid)
                continue
            self._host.ledger.take_over(uid, self._host.peaks.needed_bytes(record.spec))
            self._start(Runner(record.assignment, self._host, record, engine))

        self._host.keys.delete_others({runner.record.key_file for runner in self.runners.values() if runner.record})
        pids = {runner.state.pid for runner in self.runners.values() if runner.state.pid is not None}
        await kill_strays(self._host.folder, pids | set(other_pids))  # the rest of step 3
        self._group.create_task(run_periodically(self._trim_logs, log_files.LOOK_SECONDS, name="log rotation"))

    def add(self, assignments: Iterable[Assignment]) -> None:
        """Start the assignments that have no runner, and stop those that are marked as deleted.

        An engine that `pomona up` left running is handed over to an assignment of the same engine.
        """
        assignments = list(assignments)
        self._hand_over_unclaimed(assignments)
        for assignment in assignments:
            if assignment.uid not in self.runners:
                self._start(Runner(assignment, self._host))
            elif assignment.spec is not UNREADABLE:  # UNREADABLE: this version cannot read the spec
                self.runners[assignment.uid].apply_edits(assignment.spec)
            if assignment.deleted:
                self.runners[assignment.uid].remove()

    def assign(
        self,
        assignments: Iterable[Assignment],
        *,
        keep_unclaimed: bool = False,
        is_complete: bool = True,
        sleeping: Collection[MetalProcessSpec] = (),
    ) -> None:
        """Run `assignments`, a fresh and full list, and nothing else: processes that it lacks are stopped.

        1. Hand over engines that `pomona up` left running to assignments of the same engine.
        2. Decide about the others of them, the unclaimed ones: with `keep_unclaimed` they stay, unless a new
           assignment needs their memory.
        3. Stop what is neither assigned nor kept, and forget what has stopped.
        4. Start what is new.

        Models in daemons that no assignment needs are removed from them, unless others may follow (not `is_complete`)
        or the model is one of `sleeping`.
        """
        wanted = {assignment.uid: assignment for assignment in assignments}
        self._hand_over_unclaimed(wanted.values())  # step 1
        unclaimed = {uid: spec for uid, spec in self.unclaimed().items() if uid not in wanted}

        # Is there enough memory for the new ones beside the unclaimed ones?
        new = [assignment for uid, assignment in wanted.items() if uid not in self.runners]
        if unclaimed and keep_unclaimed and handover.exceeds_memory(new, self._host.ledger.available_bytes):
            keep_unclaimed = False
            # Not started yet: a later call does so, once the unclaimed engines have ended and freed their memory.
            for assignment in new:
                del wanted[assignment.uid]

        kept = set(unclaimed) if keep_unclaimed else set()  # step 2
        for uid, runner in list(self.runners.items()):  # step 3
            if runner.state.phase == "Stopped":
                self._forget_stopped(runner, wanted.get(uid))  # so that `add` starts it again if it is assigned
            elif uid not in wanted and uid not in kept:
                runner.remove()

        self.add(wanted.values())  # step 4
        self._has_full_list |= is_complete
        self._sleeping = sleeping
        self._unload_unwanted()

    def _forget_stopped(self, runner: Runner, assigned: Assignment | None) -> None:
        """Forget a runner that is Stopped, so that `add` starts the process again if it is still assigned.

        It is kept while its engine exists, and while its assignment is marked as deleted: that is not started again.
        """
        is_deleted = assigned is not None and assigned.deleted
        if not runner.state.exists and not is_deleted:
            del self.runners[runner.assignment.uid]

    def unclaimed(self) -> dict[str, MetalProcessSpec]:
        """Return, by uid, the specs of engines that `pomona up` runs or left running here and that are not ending."""
        return {
            uid: runner.assignment.spec
            for uid, runner in self.runners.items()
            if runner.assignment.is_standalone
            and not runner.assignment.problem
            and runner.record
            and memory_stage(runner.state) in {"loading", "serving"}
        }

    def _hand_over_unclaimed(self, assignments: Collection[Assignment]) -> None:
        """Hand over engines that `pomona up` left running to new assignments of the same engine."""
        wanted = {assignment.uid for assignment in assignments}
        unclaimed = {uid: spec for uid, spec in self.unclaimed().items() if uid not in wanted}
        new = [assignment for assignment in assignments if assignment.uid not in self.runners]
        for uid, assignment in handover.match_engines(unclaimed, new).items():
            self._hand_over_engine(uid, assignment)

    def _hand_over_engine(self, uid: str, assignment: Assignment) -> bool:
        """Replace the runner of `uid` by one of `assignment`, which adopts the engine; return whether that succeeded.

        It fails if the engine is gone, or if its new record cannot be written; then the old runner stays. The new
        record is written before the old one is deleted, and the new reservation made before the old one is released,
        so that at no moment an engine is without a record or its memory looks free.
        """
        runner = self.runners[uid]  # of `pomona up`
        if runner.record is None:
            return False
        record = structs.replace(
            runner.record,
            uid=assignment.uid,
            namespace=assignment.namespace,
            name=assignment.name,
            spec=assignment.spec,
        )

        # Adopt the engine by a record of the new assignment.
        engine = None
        try:
            engine = self._adopt(record)
            if engine is None:
                return False
            # Two records of one engine are better than none: `recover` adopts the first of them.
            self._host.records.write(record)
        except OSError as error:
            log.warning("handover_failed", process=f"{record.namespace}/{record.name}", error=str(error))
            if engine:
                engine.release()
            return False

        # Replace the runner, then what it had: log, record and reservation.
        self._tasks[uid].cancel()  # ends the old runner; its engine goes on
        self._host.loads.rename(uid, assignment.uid)  # the load slot, if the engine has it
        del self.runners[uid]
        successor = Runner(assignment, self._host, record, engine)
        with contextlib.suppress(OSError):
            runner.log_path.rename(successor.log_path)  # the engine has it open
        self._host.records.remove(uid)
        self._host.ledger.take_over(assignment.uid, self._host.peaks.needed_bytes(assignment.spec))
        self._host.ledger.release(uid)
        log.info("engine_handed_over", process=f"{record.namespace}/{record.name}", of=uid, pid=engine.pid)
        self._start(successor)
        return True

    def _recheck_rejected(self) -> None:
        """Notify processes that were rejected for lack of memory, by priority, as far as they fit now."""
        free_bytes = self._host.ledger.available_bytes
        for runner in sorted(self.runners.values(), key=lambda runner: runner.priority_rank):
            needed_bytes = runner.state.needed_bytes  # None unless memory was lacking
            if runner.state.phase == "Rejected" and needed_bytes is not None and needed_bytes <= free_bytes:
                free_bytes -= needed_bytes
                runner.notify(MemoryFreed())

    def _daemon_changed(self, runtime: str) -> None:
        """Retry failed processes of a daemon once it is usable, and unload models that it should no longer have."""
        if runtime not in self._host.daemons.usable():
            return
        for runner in self.runners.values():
            if runner.assignment.spec.runtime == runtime:
                runner.notify(BackoffElapsed())  # the cause of the failure may be gone
        self._unload_unwanted()

    def _unload_unwanted(self) -> None:
        """Unload models that no process needs, once all assignments are known."""
        if self._has_full_list:
            self._group.create_task(self._host.daemons.remove_unwanted(self._list_wanted))

    def _list_wanted(self) -> list[MetalProcessSpec]:
        """List the specs of the processes that serve here, or that will serve once they can."""
        runners = self.runners.values()
        serving = [runner.assignment.spec for runner in runners if runner.state.phase not in HOLDS_NO_MEMORY]
        return [*serving, *self._sleeping]

    async def _trim_logs(self) -> None:
        """Truncate long logs of engines, proxy and agent, and delete old logs of engines that are gone."""
        folder = self._host.folder / "logs"
        own = (log_files.PROXY_LOG, log_files.AGENT_LOG, log_files.START_LOG, *log_files.DAEMON_LOGS.values())
        written = [*(folder / name for name in own), *(runner.log_path for runner in self.runners.values())]
        await asyncio.to_thread(log_files.trim_logs, folder, written)
        log_files.trim_own_log(_STANDARD_ERROR)

    def _start(self, runner: Runner) -> None:
        """Register a runner, and run it in a task of its own."""
        uid = runner.assignment.uid
        self.runners[uid] = runner
        task = self._tasks[uid] = self._group.create_task(self._supervise(runner))
        # The task is forgotten, unless the task of a later runner has taken its place.
        task.add_done_callback(lambda ended: self._tasks.pop(uid) if self._tasks.get(uid) is ended else None)

    async def _supervise(self, runner: Runner) -> None:
        """Run `runner` to its end; after a crash, run a new one in its place after a pause.

        A defect in a runner ends no other process and no engine: the next runner adopts the engine.
        """
        loop, crashes_in_a_row = asyncio.get_running_loop(), 0
        while True:
            started = loop.time()
            try:
                if crashes_in_a_row:  # not at the first turn
                    runner = self._replace_crashed(runner)
                await runner.run()
            except Exception as error:
                log.exception("runner_crashed", uid=runner.assignment.uid)
                crashes_in_a_row = 1 if loop.time() - started >= STABLE_SECONDS else crashes_in_a_row + 1
                problem = f"{type(error).__name__}: {error}"
            else:
                return

            seconds = restart_backoff_seconds(crashes_in_a_row)
            message = f"internal error of the agent: {problem}; next try in {seconds:.0f} s"
            runner.state = structs.replace(runner.state, reason="InternalError", message=message)
            self._host.changed(runner)
            await asyncio.sleep(seconds)

    def _replace_crashed(self, crashed: Runner) -> Runner:
        """Return a new runner in the place of `crashed`, which has adopted the engine if that still runs."""
        record = crashed.record
        engine = self._adopt(record) if record else None
        runner = Runner(crashed.assignment, self._host, record if engine else None, engine)
        if crashed.removed:  # no longer assigned to this host
            runner.remove()
        self.runners[crashed.assignment.uid] = runner
        self._host.changed(runner)
        return runner

    def _adopt(self, record: Record) -> EngineHandle | None:
        """Adopt the engine of `record`; None if it is gone. Raises OSError if that cannot be found out."""
        daemon = self._host.daemons.get(record.spec.runtime) if record.model else None
        if daemon:
            return daemon.adopt(record.model)
        process = adopt_process(record.identity) if record.identity else None
        if process:
            process.key = self._host.keys.read(record.key_file)
            if process.key is None:
                # Without its key nobody can use it: it is killed as a stray, and started again.
                process.release()
                return None
        return process
