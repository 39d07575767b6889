"""Engines whose records cannot be read: they are ended once a full list of assignments lacks them."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from metal_agent.memory.ledger import Ledger
from metal_agent.native.process import NativeProcess, identify_process, is_owned, spawn_process
from metal_agent.supervise.records import UnreadableRecord
from metal_agent.supervise.unreadable_engines import UnreadableEngines
from tests.support.eventually import eventually
from tests.unit.metal_agent.supervise.runner_context import build_context


async def test_unassigned_engine_is_ended_once_however_many_lists_lack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exposure: Any = None
    sleep = shutil.which("sleep")
    assert sleep
    ledger = Ledger(100)
    host = build_context(tmp_path, ledger, exposure)
    engine = spawn_process([sleep, "600"], os.environ, tmp_path / "engine.log", tmp_path)
    # Its environment is empty for a moment after the start.
    await eventually(lambda: is_owned(engine.pid, tmp_path))
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
        await engines.wait_until_ended()
        assert not engines.pids
    assert ended == [engine.pid]
    assert identify_process(engine.pid) is None
    assert ledger.available_bytes == 100
