"""A process is alive until it ends, also if nothing has waited for it yet."""

import asyncio
import subprocess

import psutil

from tests.support.eventually import eventually
from tests.support.live_processes import find_processes, is_alive


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
