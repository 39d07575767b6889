"""The program that keeps a machine awake runs exactly as long as a model is loaded, or its engine ends its answers."""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from metal_agent.lifecycle import ProcessState
from metal_agent.supervise import keep_awake
from metal_agent.supervise.keep_awake import KeepAwake, build_command
from tests.support.eventually import eventually

PROGRAM = (sys.executable, "-c", "import time; time.sleep(600)", "keeps awake")
LOADING = ProcessState("Starting", exists=True, pid=7)
SERVING = ProcessState("Ready", exists=True, pid=7)
DRAINING = ProcessState("Stopping", exists=True, pid=7)
NEEDS_NOTHING = [ProcessState("Pending"), ProcessState("Fetching"), ProcessState("Failed")]


def children() -> list[psutil.Process]:
    processes = psutil.Process().children()
    return [
        process
        for process in processes
        if process.status() != psutil.STATUS_ZOMBIE and PROGRAM[-1] in process.cmdline()
    ]


def test_mac_is_kept_awake_by_a_program_that_ends_with_the_agent() -> None:
    assert build_command(123, "darwin") == ("/usr/bin/caffeinate", "-i", "-s", "-w", "123")
    assert build_command(123, "linux") is None


async def test_program_runs_while_an_engine_exists_and_is_started_again_if_it_dies() -> None:
    runners: dict[str, Any] = {}
    keeper = KeepAwake(runners, PROGRAM)
    await keeper.check()
    assert children() == []
    for state in (LOADING, SERVING, DRAINING):
        runners["a"] = SimpleNamespace(state=state)
        await keeper.check()
        (program,) = children()
        await keeper.check()
        assert children() == [program]

    async def is_started_again() -> bool:
        # A program that dies loses its command line before its parent can see its end.
        await keeper.check()
        return [process != program for process in children()] == [True]

    program.kill()
    await eventually(is_started_again)
    for state in NEEDS_NOTHING:
        runners["a"] = SimpleNamespace(state=state)
        await keeper.check()
        assert children() == []


async def test_program_ends_with_the_agents_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_awake, "CHECK_SECONDS", 0.01)
    runners: dict[str, Any] = {"a": SimpleNamespace(state=SERVING)}
    task = asyncio.create_task(KeepAwake(runners, PROGRAM).run())
    await eventually(lambda: len(children()) == 1)
    task.cancel()
    await asyncio.wait([task])
    assert children() == []


async def test_missing_program_is_no_error_and_no_program_needs_no_loop() -> None:
    runners: dict[str, Any] = {"a": SimpleNamespace(state=SERVING)}
    await KeepAwake(runners, ("/no/such/caffeinate",)).check()
    await KeepAwake(runners, None).run()
