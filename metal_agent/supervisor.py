"""Keeps one runner for each process that this host is to run, and takes over what an earlier agent left running."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import structlog

from crds.metalprocess import MetalProcessSpec
from metal_agent import logs, spawn
from metal_agent.assignments import Assignment
from metal_agent.handle import Handle
from metal_agent.lifecycle import STABLE_SECONDS, backoff_seconds
from metal_agent.proxy import LOG as PROXY_LOG
from metal_agent.records import Record
from metal_agent.runner import Host, Runner

_STANDARD_ERROR = 2

log = structlog.get_logger()


class Supervisor:
    """The processes of one host: `runners` by uid of their MetalProcess, changed only here and living in `group`."""

    def __init__(self, host: Host, runners: dict[str, Runner], group: asyncio.TaskGroup) -> None:
        self.runners = runners
        self._host = host
        self._group = group
        self._assigned = False
        """Whether a whole list was seen: before, what has no runner may still be wanted."""

    async def recover(self, others: Iterable[int] = ()) -> None:
        """Adopt every engine that a record describes and that still runs; kill what runs without a record.

        `others` are the pids of processes of this agent that are no engines. Call it once, before anything is started.

        Raises OSError when it cannot be found out what runs.
        """
        daemons = self._host.daemons
        daemons.subscribe(self._daemon_changed)
        await daemons.look()
        self._group.create_task(daemons.run())
        for uid, record in self._host.records.load().items():
            engine = self._adopt(record)
            if engine is None:
                log.info("engine of an earlier agent is gone", process=f"{record.namespace}/{record.name}")
                self._host.records.remove(uid)
                continue
            self._host.ledger.take_over(uid, record.spec.memory_bytes)
            self._start(Runner(record.assignment, self._host, record, engine))
        adopted = {runner.state.pid for runner in self.runners.values() if runner.state.pid is not None}
        await spawn.kill_strays(self._host.folder, adopted | set(others))
        self._group.create_task(self._tend_logs())

    def add(self, assignments: Iterable[Assignment]) -> None:
        """Run what is not running yet, and stop what is marked as deleted."""
        for assignment in assignments:
            if assignment.uid not in self.runners:
                self._start(Runner(assignment, self._host))
            if assignment.deleted:
                self.runners[assignment.uid].remove()

    def assign(self, assignments: Iterable[Assignment]) -> None:
        """Make `assignments`, a fresh and whole list, all that this host runs: what it lacks is stopped."""
        wanted = {assignment.uid: assignment for assignment in assignments}
        for uid, runner in list(self.runners.items()):
            if uid in wanted:
                continue
            if runner.state.phase == "Stopped":
                del self.runners[uid]
            else:
                runner.remove()
        self.add(wanted.values())
        self._assigned = True
        self._clear_up()

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
        while True:
            written = [folder / PROXY_LOG, *(runner.log_path for runner in self.runners.values())]
            await asyncio.to_thread(logs.tend, folder, written)
            logs.tend_own(_STANDARD_ERROR)
            await asyncio.sleep(logs.LOOK_SECONDS)

    def _start(self, runner: Runner) -> None:
        self.runners[runner.assignment.uid] = runner
        self._group.create_task(self._supervise(runner))

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
