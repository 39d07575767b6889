"""Keeps one runner for each process that this host is to run, and takes over what an earlier agent left running."""

import asyncio
import contextlib
from collections.abc import Collection, Iterable
from dataclasses import replace

import structlog
from msgspec import structs

from crds.metalprocess import MetalProcessSpec
from metal_agent import claims, logs, spawn
from metal_agent.assignments import Assignment
from metal_agent.handle import Handle
from metal_agent.lifecycle import STABLE_SECONDS, Freed, backoff_seconds
from metal_agent.proxy import LOG as PROXY_LOG
from metal_agent.records import Record
from metal_agent.runner import Host, Runner
from metal_agent.upkeep import again_and_again
from metal_agent.watchdog import stage

_STANDARD_ERROR = 2

log = structlog.get_logger()


class Supervisor:
    """The processes of one host: `runners` by uid of their MetalProcess, changed only here and living in `group`."""

    def __init__(self, host: Host, runners: dict[str, Runner], group: asyncio.TaskGroup) -> None:
        self.runners = runners
        self._host = host
        self._group = group
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._assigned = False
        """Whether a whole list was seen: before, what has no runner may still be wanted."""
        host.ledger.freed = self._look_again

    async def recover(self, others: Iterable[int] = ()) -> None:
        """Adopt every engine that a record describes and that still runs; kill what runs without a record.

        `others` are the pids of processes of this agent that are no engines. Call it once, before anything is started.

        Raises OSError when it cannot be found out what runs.
        """
        daemons = self._host.daemons
        daemons.subscribe(self._daemon_changed)
        await daemons.look()
        self._group.create_task(daemons.run())
        taken = set()
        records = self._host.records.load()
        # An engine that was handed over may have two records: that of the cluster is the later one.
        for uid, record in sorted(records.items(), key=lambda each: each[1].assignment.is_standalone):
            what = (record.identity, record.spec.runtime, record.model)
            # One model in a daemon serves several of a cluster's, each with a record of its own.
            is_second = what in taken and (record.identity is not None or record.assignment.is_standalone)
            engine = None if is_second else self._adopt(record)
            taken.add(what)
            if engine is None:
                log.info("engine of an earlier agent is gone", process=f"{record.namespace}/{record.name}")
                self._host.records.remove(uid)
                continue
            self._host.ledger.take_over(uid, self._host.peaks.needed_bytes(record.spec))
            self._start(Runner(record.assignment, self._host, record, engine))
        adopted = {runner.state.pid for runner in self.runners.values() if runner.state.pid is not None}
        await spawn.kill_strays(self._host.folder, adopted | set(others))
        self._group.create_task(again_and_again(self._tend_logs, logs.LOOK_SECONDS, failed="logs not looked after"))

    def add(self, assignments: Iterable[Assignment]) -> None:
        """Run what is not running yet, and stop what is marked as deleted.

        What a `pomona up` left running is taken over by an assignment of the same engine.
        """
        assignments = list(assignments)
        self._claim(assignments)
        for assignment in assignments:
            if assignment.uid not in self.runners:
                self._start(Runner(assignment, self._host))
            if assignment.deleted:
                self.runners[assignment.uid].remove()

    def assign(self, assignments: Iterable[Assignment], *, keep_unclaimed: bool = False) -> None:
        """Make `assignments`, a fresh and whole list, all that this host runs: what it lacks is stopped.

        What a `pomona up` left running is taken over by an assignment of the same engine. With `keep_unclaimed` the
        rest of it stays, unless something that is assigned needs its memory, and then waits until that is free.
        """
        wanted = {assignment.uid: assignment for assignment in assignments}
        self._claim(wanted.values())
        left = {uid: spec for uid, spec in self.unclaimed().items() if uid not in wanted}
        new = [assignment for uid, assignment in wanted.items() if uid not in self.runners]
        if left and keep_unclaimed and claims.needs_room(new, self._host.ledger.available_bytes):
            keep_unclaimed = False
            for assignment in new:
                del wanted[assignment.uid]
        for uid, runner in list(self.runners.items()):
            asked = wanted.get(uid)
            if runner.state.phase == "Stopped" and not (asked and asked.deleted):
                del self.runners[uid]  # also where it is asked for again: a list of the past had left it out
            elif asked is None and not (keep_unclaimed and uid in left):
                runner.remove()
        self.add(wanted.values())
        self._assigned = True
        self._clear_up()

    def unclaimed(self) -> dict[str, MetalProcessSpec]:
        """Return by uid what a `pomona up` runs, or left running here, with an engine that is not being ended."""
        return {
            uid: runner.assignment.spec
            for uid, runner in self.runners.items()
            if runner.assignment.is_standalone
            and runner.record
            and runner.assignment.spec
            and stage(runner.state) in {"loading", "serving"}
        }

    def _claim(self, assignments: Collection[Assignment]) -> None:
        """Have what a `pomona up` left running, and nobody asks for by its uid, serve for a new assignment of it."""
        wanted = {assignment.uid for assignment in assignments}
        left = {uid: spec for uid, spec in self.unclaimed().items() if uid not in wanted}
        new = [assignment for assignment in assignments if assignment.uid not in self.runners]
        for uid, assignment in claims.match(left, new).items():
            self._hand_over(uid, assignment)

    def _hand_over(self, uid: str, assignment: Assignment) -> bool:
        """Have the engine of `uid` serve for `assignment`; False where it is gone, or cannot be written down."""
        runner = self.runners[uid]
        if runner.record is None or assignment.spec is None:
            return False
        record = structs.replace(
            runner.record,
            uid=assignment.uid,
            namespace=assignment.namespace,
            name=assignment.name,
            spec=assignment.spec,
        )
        engine = None
        try:
            engine = self._adopt(record)
            if engine is None:
                return False
            # Two records of one engine are better than none: `recover` takes the first of them.
            self._host.records.write(record)
        except OSError as error:
            log.warning("not handed over", process=f"{record.namespace}/{record.name}", error=str(error))
            if engine:
                engine.release()
            return False
        self._tasks[uid].cancel()
        self._host.loads.rename(uid, assignment.uid)
        del self.runners[uid]
        successor = Runner(assignment, self._host, record, engine)
        with contextlib.suppress(OSError):
            runner.log_path.rename(successor.log_path)  # which the engine has open
        self._host.records.remove(uid)
        self._host.ledger.take_over(assignment.uid, self._host.peaks.needed_bytes(assignment.spec))
        self._host.ledger.release(uid)
        log.info("handed over", process=f"{record.namespace}/{record.name}", of=uid, pid=engine.pid)
        self._start(successor)
        return True

    def _look_again(self) -> None:
        """Have what was refused for the lack of memory looked at again, the most important first, as far as it fits."""
        free_bytes = self._host.ledger.available_bytes
        for runner in sorted(self.runners.values(), key=lambda each: each.rank):
            needed_bytes = runner.state.needed_bytes
            if runner.state.phase == "Rejected" and needed_bytes is not None and needed_bytes <= free_bytes:
                free_bytes -= needed_bytes
                runner.tell(Freed())

    def _daemon_changed(self, runtime: str) -> None:
        """Have what waits for this daemon tried at once when it is back, and what it still has of ours cleared up."""
        if runtime not in self._host.daemons.usable():
            return
        for runner in self.runners.values():
            if runner.assignment.spec and runner.assignment.spec.runtime == runtime:
                runner.try_again()
        self._clear_up()

    def _clear_up(self) -> None:
        if self._assigned:
            self._group.create_task(self._host.daemons.clean(self._wanted))

    def _wanted(self) -> list[MetalProcessSpec]:
        """List what is served here, or will be once it can."""
        runners = [runner for runner in self.runners.values() if runner.state.phase not in {"Stopped", "Rejected"}]
        return [runner.assignment.spec for runner in runners if runner.assignment.spec]

    async def _tend_logs(self) -> None:
        folder = self._host.folder / "logs"
        written = [folder / PROXY_LOG, *(runner.log_path for runner in self.runners.values())]
        await asyncio.to_thread(logs.tend, folder, written)
        logs.tend_own(_STANDARD_ERROR)

    def _start(self, runner: Runner) -> None:
        uid = runner.assignment.uid
        self.runners[uid] = runner
        task = self._tasks[uid] = self._group.create_task(self._supervise(runner))
        task.add_done_callback(lambda ended: self._tasks.pop(uid) if self._tasks.get(uid) is ended else None)

    async def _supervise(self, runner: Runner) -> None:
        """See it to its end. A defect in one ends no other, and not its own engine: the next runner takes that over."""
        loop, crashes = asyncio.get_running_loop(), 0
        while True:
            started = loop.time()
            try:
                if crashes:
                    runner = self._successor(runner)
                await runner.run()
            except Exception as error:
                log.exception("runner crashed", uid=runner.assignment.uid)
                crashes = 1 if loop.time() - started >= STABLE_SECONDS else crashes + 1
                problem = f"{type(error).__name__}: {error}"
            else:
                return
            seconds = backoff_seconds(crashes)
            message = f"a defect of the agent, which goes on in {seconds:.0f} s: {problem}"
            runner.state = replace(runner.state, reason="InternalError", message=message)
            self._host.changed(runner)
            await asyncio.sleep(seconds)

    def _successor(self, crashed: Runner) -> Runner:
        """Put a runner in the place of `crashed`, with its engine where that still runs."""
        record = crashed.record
        engine = self._adopt(record) if record else None
        runner = Runner(crashed.assignment, self._host, record if engine else None, engine)
        if crashed.removed:
            runner.remove()
        self.runners[crashed.assignment.uid] = runner
        self._host.changed(runner)
        return runner

    def _adopt(self, record: Record) -> Handle | None:
        """Take over the engine that `record` describes; None when it is gone. Raises OSError when nobody can tell."""
        daemon = self._host.daemons.get(record.spec.runtime) if record.model else None
        if daemon:
            return daemon.adopt(record.model)
        return spawn.adopt(record.identity) if record.identity else None
