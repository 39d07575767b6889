"""A process is alive until it ends, also if nothing has waited for it yet."""

import asyncio
import signal
import subprocess

import psutil
import pytest

from tests.support.eventually import eventually
from tests.support.live_processes import find_processes, is_alive, run_beside


async def test_killed_process_is_not_alive_before_and_after_it_is_reaped() -> None:
    duration = "61.0407"  # no other test sleeps as long
    with subprocess.Popen(["sleep", duration]) as child:  # noqa: ASYNC220 - asyncio's would be reaped at once
        process = psutil.Process(child.pid)
        assert is_alive(process)
        assert await eventually(lambda: find_processes("sleep", duration)) == [process]
        assert find_processes(duration, "sleep") == []
        child.kill()
        await eventually(lambda: process.status() == psutil.STATUS_ZOMBIE)
        assert not is_alive(process)
        assert find_processes("sleep", duration) == []
        await asyncio.to_thread(child.wait)
    assert not is_alive(process)


async def test_process_beside_a_test_ends_with_it_even_if_it_fails() -> None:
    with pytest.raises(AssertionError):
        async with run_beside("sleep", "61.0408") as process:
            assert process.returncode is not None, "it runs still"
    assert process.returncode == -signal.SIGKILL


async def test_process_that_has_ended_keeps_its_status() -> None:
    async with run_beside("false") as process:
        await process.wait()
    assert process.returncode == 1
