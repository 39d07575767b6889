"""The end of a container's processes: terminated, awaited, killed; a foreign process is never touched."""

import asyncio
import subprocess
import time
from pathlib import Path
from typing import cast

import pytest

from tests.controlplane.kubelet.containers import Container, kill_leftover
from tests.controlplane.kubelet.supervisor import StopRequest


def start_time(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_a_leftover_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        (tmp_path / "pid").write_text(f"{process.pid} {start_time(process.pid)}")
        assert kill_leftover(tmp_path)
        assert process.wait() == -9
    assert not kill_leftover(tmp_path)


def test_other_process_with_the_pid_of_a_leftover_is_not_killed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        (tmp_path / "pid").write_text(f"{process.pid} {int(start_time(process.pid)) - 1}")
        assert not kill_leftover(tmp_path)
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize("content", ["", "12", "x y"])
def test_incomplete_pid_file_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "pid").write_text(content)
    assert not kill_leftover(tmp_path)
    assert not kill_leftover(tmp_path / "absent")


class Recorded:
    """A process that records its signals, and the seconds until SIGKILL."""

    def __init__(self) -> None:
        self.signals: list[str] = []
        self.terminated = asyncio.Event()
        self._began = time.monotonic()
        self.killed_after_seconds = 0.0

    def terminate(self) -> None:
        self.signals.append("TERM")
        self.terminated.set()

    def kill(self) -> None:
        self.signals.append("KILL")
        self.killed_after_seconds = time.monotonic() - self._began


async def test_stop_terminates_first_and_kills_after_the_grace_period() -> None:
    stop, process = StopRequest(), Recorded()
    assert not stop
    stop.request(0.1)
    await stop.carry_out(cast("Container", process))
    assert process.signals == ["TERM", "KILL"]
    assert process.killed_after_seconds >= 0.1


async def test_a_later_request_may_shorten_the_grace_and_never_lengthen_it() -> None:
    stop, process = StopRequest(), Recorded()
    stop.request(600)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(stop.carry_out(cast("Container", process)))
        await process.terminated.wait()
        stop.request(900)
        stop.request(0.05)
    assert process.signals == ["TERM", "KILL"]


async def test_sleep_before_the_stop_is_a_part_of_the_grace_period() -> None:
    stop, process = StopRequest(), Recorded()
    stop.request(0.1)
    async with asyncio.timeout(60):
        await stop.carry_out(cast("Container", process), pre_stop_seconds=600)
    assert process.signals == ["TERM", "KILL"]
    assert process.killed_after_seconds >= 0.1


async def test_stop_wakes_a_sleeping_worker() -> None:
    stop = StopRequest()
    assert not await stop.sleep(0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        sleeper = group.create_task(stop.sleep(600))
        stop.request(0)
    assert sleeper.result() is True
