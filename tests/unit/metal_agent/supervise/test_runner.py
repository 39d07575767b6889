"""The runner and events between a decision and its outcome."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metal_agent.assignments import Assignment
from metal_agent.lifecycle import Admitted, Failed, Refused
from metal_agent.memory.ledger import Ledger
from metal_agent.native.engine_handle import EngineExit, ProcessIdentity
from metal_agent.supervise import runner as module
from metal_agent.supervise.records import Record, Records
from metal_agent.supervise.runner import Runner, RunnerContext
from metal_agent.weights import HostWeights
from tests.support.api_objects import GIB
from tests.support.eventually import eventually

MakeAssignment = Callable[..., Assignment]


class _Unreached:
    """The exposure of a process that gets no requests."""

    async def withdraw(self, assignment: Assignment) -> None:
        """Do nothing, since no request is routed here."""

    async def drain(self, uid: str, timeout_seconds: float) -> None:
        """Do nothing, since no request is in progress."""

    def requests(self, uid: str) -> int | None:
        """Return None, for unknown."""


class _Stubborn:
    """An engine whose first end fails."""

    pid = identity = model = token = None

    def __init__(self) -> None:
        self.ends = 0
        self._exit: asyncio.Future[EngineExit] = asyncio.get_running_loop().create_future()

    def url(self) -> str | None:
        return None

    async def wait(self) -> EngineExit:
        return await self._exit

    async def end(self, grace_seconds: float) -> None:
        assert grace_seconds > 0
        self.ends += 1
        if self.ends == 1:
            raise ValueError("an answer that nobody foresaw")
        self._exit.set_result(EngineExit())

    def release(self) -> None:
        """Do nothing, since nothing is watched."""


def _host(folder: Path, ledger: Ledger) -> RunnerContext:
    session: Any = None
    return RunnerContext(
        folder=folder,
        records=Records(folder / "processes"),
        weights=HostWeights(folder / "weights", folder),
        ledger=ledger,
        session=session,
        exposure=_Unreached(),
        secret=lambda _namespace, _name: None,
        changed=lambda _runner: None,
    )


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
        async with asyncio.timeout(5):
            await admitted.wait()
    finally:
        living.cancel()


async def test_failed_end_of_an_engine_is_retried(
    tmp_path: Path, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_END_AGAIN_SECONDS", 0.01)
    made = assignment("u1")
    assert made.spec
    record = Record(
        "u1", "team-a", "chat", made.spec, ProcessIdentity(1, "1", "boot"), "t", ready_at="t", url="http://x"
    )
    engine = _Stubborn()
    runner = Runner(made, _host(tmp_path, Ledger(GIB)), record, engine)
    living = asyncio.create_task(runner.run())
    runner.remove()
    try:
        await eventually(living.done, 5)
    finally:
        living.cancel()
    assert (runner.state.phase, engine.ends) == ("Stopped", 2)
