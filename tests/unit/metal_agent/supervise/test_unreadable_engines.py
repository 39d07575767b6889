"""Engines whose records cannot be read: they are ended once a full list of assignments lacks them."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from metal_agent.memory.ledger import Ledger
from metal_agent.native.engine_keys import EngineKeys
from metal_agent.native.process import NativeProcess, identify_process, spawn_process
from metal_agent.supervise.host_parts import RunnerContext
from metal_agent.supervise.records import Records, UnreadableRecord
from metal_agent.supervise.unreadable_engines import UnreadableEngines
from metal_agent.weights import HostWeights
from tests.support.eventually import eventually


async def test_unassigned_engine_is_ended_once_however_many_lists_lack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused: Any = None
    sleep = shutil.which("sleep")
    assert sleep
    ledger = Ledger(100)
    host = RunnerContext(
        folder=tmp_path,
        records=Records(tmp_path / "processes"),
        keys=EngineKeys(tmp_path / "keys"),
        weights=HostWeights(tmp_path / "weights", tmp_path),
        ledger=ledger,
        session=unused,
        exposure=unused,
        secret=lambda _namespace, _name: None,
        changed=lambda _runner: None,
    )
    engine = spawn_process([sleep, "600"], os.environ, tmp_path / "engine.log", tmp_path)
    ended, end = [], NativeProcess.end

    async def count_ends(self: NativeProcess, grace_seconds: float, *, for_all: bool = False) -> None:
        ended.append(self.pid)
        await end(self, grace_seconds, for_all=for_all)

    monkeypatch.setattr(NativeProcess, "end", count_ends)
    async with asyncio.TaskGroup() as group:
        engines = UnreadableEngines(host, [UnreadableRecord("u1", engine.pid, 40, "")], group)
        engines.end_others({"u1"})
        assert ledger.available_bytes == 60
        for _ in range(3):
            engines.end_others(())
        await eventually(lambda: not engines.pids)
    assert ended == [engine.pid]
    assert identify_process(engine.pid) is None
    assert ledger.available_bytes == 100
