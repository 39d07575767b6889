"""The runner and events between a decision and its outcome."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from metal_agent import lifecycle
from metal_agent.assignments import Assignment
from metal_agent.engine_health import Suspicion
from metal_agent.memory.ledger import Ledger
from metal_agent.native.engine_handle import EngineExit, EngineHandle, ProcessIdentity
from metal_agent.process_events import Admitted, Evicted, Failed, Refused, Suspected
from metal_agent.supervise import runner as module
from metal_agent.supervise.host_parts import Exposure, RunnerContext
from metal_agent.supervise.records import Record
from metal_agent.supervise.runner import Runner
from tests.support import virtual_time
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.unit.metal_agent.supervise.runner_context import build_context

MakeAssignment = Callable[..., Assignment]


class _Unreached:
    """The exposure of a process that gets no requests."""

    async def withdraw(self, assignment: Assignment, timeout_seconds: float) -> None:
        """Do nothing, since no request is routed here."""

    async def drain(self, uid: str, timeout_seconds: float) -> None:
        """Do nothing, since no request is in progress."""

    async def clear_suspicion(self, uid: str) -> None:
        """Do nothing, since no proxy suspects it."""

    def requests(self, uid: str) -> int | None:
        """Return None, for unknown."""


class _Stubborn(EngineHandle):
    """An engine whose first end fails."""

    ends = 0

    def url(self) -> str | None:
        return None

    async def end(self, grace_seconds: float, *, even_if_shared: bool = False) -> None:
        assert grace_seconds > 0
        assert not even_if_shared
        self.ends += 1
        if self.ends == 1:
            raise ValueError("an answer that nobody foresaw")
        self._exit.set_result(EngineExit())

    def release(self) -> None:
        """Do nothing, since nothing is watched."""


class _Silent(_Unreached):
    """The exposure while neither the API server nor the proxy answers."""

    async def withdraw(self, assignment: Assignment, timeout_seconds: float) -> None:
        assert assignment.uid == "u1"
        await asyncio.sleep(timeout_seconds)

    async def drain(self, uid: str, timeout_seconds: float) -> None:
        assert (uid, timeout_seconds > 0) == ("u1", True)
        await asyncio.Event().wait()


class _Deaf(_Stubborn):
    """An engine that ignores SIGTERM."""

    async def end(self, grace_seconds: float, *, even_if_shared: bool = False) -> None:
        assert not even_if_shared
        await asyncio.sleep(grace_seconds)
        self._exit.set_result(EngineExit(signal="SIGKILL"))


def _host(folder: Path, ledger: Ledger, exposure: Exposure | None = None) -> RunnerContext:
    return build_context(folder, ledger, exposure or _Unreached())


async def test_memory_freed_before_the_refusal_arrives_is_not_missed(
    tmp_path: Path, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(GIB, {"other": GIB})
    admitted = asyncio.Event()

    async def admit(*_: object) -> Admitted | Refused | Failed:
        problem = ledger.reserve("u1", GIB)
        ledger.release("other")  # the listener finds no rejected process yet
        admitted.set() if not problem else None
        return Refused("InsufficientMemory", problem, GIB) if problem else Admitted()

    monkeypatch.setattr(module, "admit", admit)
    living = asyncio.create_task(Runner(assignment("u1"), _host(tmp_path, ledger)).run())
    try:
        async with asyncio.timeout(60):
            await admitted.wait()
    finally:
        living.cancel()


def _ready_record(made: Assignment) -> Record:
    identity = ProcessIdentity(1, "1", "boot")
    return Record("u1", "team-a", "chat", made.spec, identity, "t", ready_at="t", url="http://x")


def test_eviction_frees_the_memory_within_ten_seconds(tmp_path: Path, assignment: MakeAssignment) -> None:
    async def main() -> None:
        made, evicted = assignment("u1"), asyncio.Event()
        host = replace(
            _host(tmp_path, Ledger(GIB), _Silent()),
            changed=lambda runner: evicted.set() if runner.state.phase == "Pending" else None,
        )
        runner = Runner(made, host, _ready_record(made), _Deaf())
        living = asyncio.create_task(runner.run())
        runner.notify(Evicted("MemoryPressure", "short of memory"))
        await evicted.wait()
        assert 8 <= asyncio.get_running_loop().time() <= 10
        living.cancel()

    virtual_time.run(main())


class _Immortal(_Stubborn):
    """A process that not even SIGKILL ends, before `die` is called."""

    async def end(self, grace_seconds: float, *, even_if_shared: bool = False) -> None:
        assert grace_seconds > 0
        assert not even_if_shared
        await self._exit

    def die(self) -> None:
        self._exit.set_result(EngineExit(signal="SIGKILL"))


async def test_process_that_cannot_be_killed_is_stopped_and_its_memory_stays_reserved(
    tmp_path: Path, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "END_LIMIT_SECONDS", -9.9)
    made, engine, ledger = assignment("u1"), _Immortal(), Ledger(GIB)
    ledger.take_over("u1", GIB)
    runner = Runner(made, _host(tmp_path, ledger), _ready_record(made), engine)
    living = asyncio.create_task(runner.run())
    runner.remove()
    try:
        await eventually(lambda: runner.state.phase == "Stopped")
        assert runner.state.reason == "EngineNotEnded"
        assert "has not ended in 0 s" in runner.state.message
        assert ledger.reserved == {"u1": GIB}
        engine.die()
        await eventually(living.done)
    finally:
        living.cancel()
    assert ledger.reserved == {}


async def test_failed_end_of_an_engine_is_retried(
    tmp_path: Path, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_END_AGAIN_SECONDS", 0.01)
    made, engine = assignment("u1"), _Stubborn()
    runner = Runner(made, _host(tmp_path, Ledger(GIB)), _ready_record(made), engine)
    living = asyncio.create_task(runner.run())
    runner.remove()
    try:
        await eventually(living.done)
    finally:
        living.cancel()
    assert (runner.state.phase, engine.ends) == ("Stopped", 2)


class _Suspicious(_Unreached):
    """The exposure of a process that its proxy suspects."""

    def __init__(self) -> None:
        self.cleared: list[str] = []

    async def clear_suspicion(self, uid: str) -> None:
        self.cleared.append(uid)


async def test_suspect_engine_that_cannot_be_checked_serves_on_and_can_be_suspected_again(
    tmp_path: Path, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, exposure = assignment("u1"), _Suspicious()
    runner = Runner(made, _host(tmp_path, Ledger(GIB), exposure), _ready_record(made), _Stubborn())

    async def find_engine() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(runner, "find_engine", find_engine)
    monkeypatch.setattr(runner._liveness, "find_engine", find_engine)
    monkeypatch.setattr(lifecycle, "FAILED_CHECK_SECONDS", 60.0)
    living = asyncio.create_task(runner.run())
    try:
        runner.notify(Suspected(Suspicion("Failing", "the last 5 requests failed: 500")))
        await eventually(lambda: exposure.cleared == ["u1"] and not runner.state.is_drained)
        assert (runner.state.phase, runner.state.reason) == ("Ready", "")
    finally:
        living.cancel()
