"""The memory monitor measures engines, daemons and other programs, and the ledger counts their use."""

import asyncio
import os
from collections.abc import Callable
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from devices.footprint import footprint
from devices.pressure import PressureReading
from metal_agent.assignments import Assignment
from metal_agent.lifecycle import ProcessState
from metal_agent.memory.ledger import Ledger
from metal_agent.memory.peaks import Peaks
from metal_agent.native.engine_handle import ProcessIdentity
from metal_agent.supervise.memory_monitor import MemoryMonitor
from metal_agent.supervise.records import Record
from runtimes.daemon import LoadedModel
from tests.support.eventually import eventually

GIB = 2**30
MakeAssignment = Callable[..., Assignment]


def _runner(assignment: Assignment, pid: int | None = None) -> Any:
    """Return the attributes of a runner that the monitor reads; `pid` is the process of its engine."""
    spec = assignment.spec
    identity = ProcessIdentity(pid, "1", "boot") if pid else None
    record = Record("u1", "team-a", "chat", spec, identity, "2026-11-21T12:00:00Z")
    return SimpleNamespace(
        record=record,
        model=None if pid else "ours",
        state=ProcessState("Ready", exists=True, pid=pid),
        assignment=assignment,
    )


def _usage(
    runners: dict[str, Any], ledger: Ledger, available_bytes: int | None, told: list[int], *loaded: LoadedModel
) -> MemoryMonitor:
    return MemoryMonitor(
        runners,
        ledger,
        Peaks(),
        read=lambda: PressureReading("normal", 0, available_bytes),
        changed=lambda: told.append(ledger.available_bytes),
        loaded=lambda: list(loaded),
    )


async def test_engine_counts_with_its_measured_use(assignment: MakeAssignment) -> None:
    ledger, told = Ledger(48 * GIB, {"u1": 1}, memory_bytes=64 * GIB), list[int]()
    made = assignment("u1", memory_bytes=1)
    usage = _usage({"u1": _runner(made, os.getpid())}, ledger, 50 * GIB, told)
    await usage.measure()
    seen = footprint(os.getpid())
    assert seen
    assert 0.5 * seen.bytes < ledger.reserved["u1"] < 2 * seen.bytes + 2**26
    assert told == [ledger.available_bytes]
    assert usage.peaks.needed_bytes(made.spec) <= ledger.reserved["u1"] < usage.peaks.needed_bytes(made.spec) + 2**26
    ledger.reserved["u1"] = 2 * GIB
    await usage.measure()
    assert ledger.reserved["u1"] == 2 * GIB


async def test_use_of_other_programs_is_the_rest(assignment: MakeAssignment) -> None:
    ledger, told = Ledger(48 * GIB, memory_bytes=64 * GIB), list[int]()
    in_a_daemon = _runner(assignment("u1", memory_bytes=20 * GIB))
    ledger.take_over("u1", 20 * GIB)
    # 64 less 10 available less 20 of ours are 34, of which 16 are others' share.
    await _usage({"u1": in_a_daemon}, ledger, 10 * GIB, told).measure()
    assert (ledger.others_bytes, told) == (18 * GIB, [10 * GIB])
    await _usage({"u1": in_a_daemon}, ledger, None, told).measure()
    assert ledger.others_bytes == 18 * GIB
    await _usage({"u1": in_a_daemon}, ledger, 40 * GIB, told).measure()
    assert (ledger.others_bytes, told) == (0, [10 * GIB, 28 * GIB])


async def test_daemon_reports_use_of_our_models_and_the_owners(assignment: MakeAssignment) -> None:
    ledger = Ledger(48 * GIB, {"u1": 20 * GIB}, memory_bytes=64 * GIB)
    in_a_daemon = {"u1": _runner(assignment("u1", memory_bytes=20 * GIB))}
    ours, owners = LoadedModel("ours", 22 * GIB, ours=True), LoadedModel("owners", 26 * GIB, ours=False)
    await _usage(in_a_daemon, ledger, 60 * GIB, [], ours, owners).measure()
    assert (ledger.reserved["u1"], ledger.others_bytes) == (22 * GIB, 10 * GIB)
    await _usage(in_a_daemon, ledger, 60 * GIB, [], LoadedModel("ours", None, ours=True)).measure()
    assert (ledger.reserved["u1"], ledger.others_bytes) == (22 * GIB, 0)


async def test_concurrent_measurements_write_peaks_one_at_a_time(
    assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = _usage({"u1": _runner(assignment("u1"), os.getpid())}, Ledger(48 * GIB), None, [])
    writing, most = 0, 0

    def observe(_: object) -> None:
        nonlocal writing, most
        writing += 1
        most = max(most, writing)
        Event().wait(0.02)
        writing -= 1

    monkeypatch.setattr(usage.peaks, "observe", observe)
    await asyncio.gather(*(usage.measure() for _ in range(3)))
    assert most == 1


async def test_failed_measurement_does_not_end_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def read() -> PressureReading:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RuntimeError("a defect")
        return PressureReading()

    monkeypatch.setattr("metal_agent.supervise.memory_monitor.MEASURE_SECONDS", 0.001)
    watching = asyncio.create_task(MemoryMonitor({}, Ledger(GIB), Peaks(), read=read, changed=lambda: None).run())
    await eventually(lambda: looks > 1 or watching.done())
    assert not watching.done()
    watching.cancel()
