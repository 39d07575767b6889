"""Engines whose records this version cannot read: they run on with their memory reserved, and get no requests here.

A newer version of the agent started them, and will serve them again. They are ended only when a full list of
assignments lacks them.
"""

import asyncio
from collections.abc import Collection, Iterable
from typing import Final

import structlog

from metal_agent.lifecycle import GRACE_SECONDS
from metal_agent.native.process import NativeProcess, is_owned
from metal_agent.supervise.host_parts import RunnerContext
from metal_agent.supervise.records import UnreadableRecord

_RESERVATION: Final = "unreadable/"
"""Begin of the uid of a reservation: a process of the same MetalProcess that this version starts needs memory too."""

_END_SECONDS: Final = GRACE_SECONDS + 5
"""Time to end: the grace after SIGTERM, then a while for SIGKILL."""

log = structlog.get_logger()


class UnreadableEngines:
    """The engines of `records`, watched by tasks of `group` until they end."""

    def __init__(self, host: RunnerContext, records: Iterable[UnreadableRecord], group: asyncio.TaskGroup) -> None:
        self._host = host
        self._engines: dict[str, NativeProcess] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._ending: set[str] = set()
        """The uids of those that are being ended."""
        self._group = group
        for record in records:
            self._watch(record)

    @property
    def pids(self) -> set[int]:
        """The process ids of those that run."""
        return {engine.pid for engine in self._engines.values()}

    def end_others(self, assigned: Collection[str]) -> None:
        """End the engines whose uid is not among `assigned`, a full list."""
        for uid, engine in self._engines.items():
            if uid not in assigned and uid not in self._ending:
                self._ending.add(uid)
                log.info("unreadable_engine_ended", uid=uid, pid=engine.pid)
                self._group.create_task(engine.end(GRACE_SECONDS))

    async def wait_until_ended(self) -> None:
        """Wait until they have ended; return also if they do not end, which SIGKILL would have done long ago."""
        if self._watches:
            await asyncio.wait(self._watches.values(), timeout=_END_SECONDS)

    def _watch(self, record: UnreadableRecord) -> None:
        try:
            engine = NativeProcess(record.pid) if record.pid is not None else None
        except ProcessLookupError:
            engine = None
        if engine is None or not is_owned(engine.pid, self._host.folder):
            log.info("recorded_engine_is_gone", process=record.uid)
            if engine:
                engine.release()
            self._host.records.remove(record.uid)
            return
        log.warning("unreadable_engine_kept", uid=record.uid, pid=engine.pid, memory_bytes=record.memory_bytes)
        self._engines[record.uid] = engine
        self._host.ledger.take_over(f"{_RESERVATION}{record.uid}", record.memory_bytes)
        self._watches[record.uid] = self._group.create_task(self._wait(record, engine))

    async def _wait(self, record: UnreadableRecord, engine: NativeProcess) -> None:
        try:
            await engine.wait()
        finally:
            engine.release()
        self._engines.pop(record.uid, None)
        self._watches.pop(record.uid, None)
        self._ending.discard(record.uid)
        self._host.ledger.release(f"{_RESERVATION}{record.uid}")
        self._host.records.remove(record.uid)
