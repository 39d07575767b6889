"""A program beside a test: its log, its end, and its independence of event loops."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from tests.controlplane.process import Process
from tests.support.eventually import eventually

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def python(tmp_path: Path, script: str) -> Process:
    return Process("sample", [sys.executable, "-c", script], tmp_path / "sample.log")


async def test_all_starts_append_to_one_log(tmp_path: Path) -> None:
    process = python(tmp_path, "import os, sys; print('run', flush=True); sys.exit(3)")

    for _ in range(2):
        process.start()
        assert await process.wait() == 3

    assert process.tail(5) == "run\nrun"
    assert process.tail(1) == "run"
    assert not process.running


async def test_stop_returns_the_exit_code(tmp_path: Path) -> None:
    process = python(tmp_path, "import time; time.sleep(60)")
    process.start()
    assert process.exit_code is None

    assert await process.stop() == -signal.SIGTERM


async def test_process_that_ignores_sigterm_is_killed_and_reported(tmp_path: Path) -> None:
    process = python(tmp_path, STUBBORN)
    process.start()
    await eventually(lambda: process.tail(1) == "up")

    with pytest.raises(TimeoutError, match=r"sample still runs after 0\.1 s"):
        await process.stop(grace_seconds=0.1)

    assert process.exit_code == -signal.SIGKILL


def test_process_is_started_in_one_event_loop_and_stopped_in_another(tmp_path: Path) -> None:
    process = python(tmp_path, "import time; time.sleep(60)")

    async def start() -> None:
        process.start()

    asyncio.run(start())
    asyncio.run(process.kill())

    assert process.exit_code == -signal.SIGKILL
