"""Native processes are started, adopted, watched and stopped; all of them are real."""

import errno
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

from devices import processes
from metal_agent.native.engine_handle import EngineExit
from metal_agent.native.process import (
    NativeProcess,
    adopt_process,
    identify_process,
    kill_strays,
    read_last_log_lines,
    spawn_process,
)
from tests.support.eventually import eventually
from tests.support.live_processes import is_alive

WAITS = [sys.executable, "-c", "import signal; print('ready', flush=True); signal.pause()"]
DEAF = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 60 & wait $!; done"]


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[Path]:
    yield tmp_path
    await kill_strays(tmp_path, ())


async def start(argv: list[str], owner: Path) -> NativeProcess:
    process = spawn_process(argv, dict(os.environ), owner / "it.log", owner)
    await eventually(lambda: "ready" in read_last_log_lines(owner / "it.log"))
    return process


async def test_process_leads_a_session_and_logs_to_a_file(owner: Path) -> None:
    process = await start(WAITS, owner)
    assert os.getsid(process.pid) == process.pid
    assert os.getpgid(process.pid) == process.pid
    assert (owner / "it.log").read_text() == "ready\n"
    await process.end(grace_seconds=5)


async def test_exit_has_code_or_signal(owner: Path) -> None:
    ended = await start(["sh", "-c", "echo ready; exit 7"], owner)
    assert await ended.wait() == EngineExit(code=7)
    killed = await start(WAITS, owner)
    os.kill(killed.pid, signal.SIGKILL)
    assert await killed.wait() == EngineExit(signal="SIGKILL")
    nameless = await start(WAITS, owner)
    os.kill(nameless.pid, 40)
    assert await nameless.wait() == EngineExit(signal="signal 40")


async def test_exit_that_is_reported_too_early_is_waited_for(monkeypatch: pytest.MonkeyPatch, owner: Path) -> None:
    # macOS reports an end a moment early. Here the process still runs, and the signal to the rest of its group ends it.
    told, tell = os.pipe()
    monkeypatch.setattr("metal_agent.native.process.watch_exit", lambda _: told)
    process = await start(DEAF, owner)
    os.close(tell)
    assert await process.wait() == EngineExit(signal="SIGKILL")
    process.release()
    assert not psutil.pid_exists(process.pid)


async def test_exit_of_a_child_before_its_watch_is_reported(monkeypatch: pytest.MonkeyPatch, owner: Path) -> None:
    def watch(pid: int) -> int:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        raise ProcessLookupError(errno.ESRCH, "macOS watches no zombie")

    monkeypatch.setattr("metal_agent.native.process.watch_exit", watch)
    process = spawn_process(["sh", "-c", "exit 7"], dict(os.environ), owner / "it.log", owner)
    assert await process.wait() == EngineExit(code=7)
    assert not psutil.pid_exists(process.pid)


async def test_no_descriptor_is_left_behind(owner: Path) -> None:
    before = psutil.Process().num_fds()
    for _ in range(20):
        process = spawn_process(["true"], dict(os.environ), owner / "it.log", owner)
        await process.wait()
        spawn_process(["true"], dict(os.environ), owner / "it.log", owner).release()
    # Fewer, if those of an earlier test are collected meanwhile.
    assert psutil.Process().num_fds() <= before


async def test_process_that_ignores_sigterm_is_killed_with_its_group(owner: Path) -> None:
    process = await start(DEAF, owner)
    helper = (await eventually(lambda: psutil.Process(process.pid).children()))[0]
    await process.end(grace_seconds=0.2)
    assert await process.wait() == EngineExit(signal="SIGKILL")
    await eventually(lambda: not is_alive(helper))


async def test_helpers_of_a_crashed_process_are_killed(owner: Path) -> None:
    process = await start(["sh", "-c", "sleep 60 & echo ready; wait"], owner)
    helper = (await eventually(lambda: psutil.Process(process.pid).children()))[0]
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await eventually(lambda: not is_alive(helper))


async def test_released_process_goes_on_and_is_adopted(owner: Path) -> None:
    first = await start(WAITS, owner)
    identity = identify_process(first.pid)
    assert identity
    first.release()
    adopted = adopt_process(identity)
    assert adopted
    await adopted.end(grace_seconds=5)
    assert adopt_process(identity) is None


@pytest.mark.parametrize("lie", [{"start_time": "1"}, {"boot_id": "another boot"}])
async def test_a_pid_that_is_another_process_now_is_not_adopted(owner: Path, lie: dict[str, object]) -> None:
    process = await start(WAITS, owner)
    identity = identify_process(process.pid)
    assert identity
    assert adopt_process(msgspec.structs.replace(identity, **lie)) is None
    assert identify_process(process.pid) == identity, "what is not ours is left alone"
    await process.end(grace_seconds=5)


async def test_process_that_executes_another_program_is_adopted(owner: Path) -> None:
    process = spawn_process(["sh", "-c", 'exec "$@"', "sh", *WAITS], dict(os.environ), owner / "it.log", owner)
    await eventually(lambda: "ready" in read_last_log_lines(owner / "it.log"))
    process.release()
    assert process.identity
    adopted = adopt_process(process.identity)
    assert adopted
    await adopted.end(grace_seconds=5)


async def test_a_pid_that_is_a_thread_now_is_not_adopted() -> None:
    with ThreadPoolExecutor(1) as threads:
        thread = threads.submit(threading.get_native_id).result()
        ours = identify_process(os.getpid())
        assert ours
        assert adopt_process(msgspec.structs.replace(ours, pid=thread)) is None


async def test_process_that_cannot_be_watched_is_not_left_behind(owner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("metal_agent.native.process.watch_exit", no_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        spawn_process(WAITS, dict(os.environ), owner / "it.log", owner)
    assert WAITS not in [child.cmdline() for child in psutil.Process().children() if is_alive(child)]


async def test_process_of_unknown_start_time_is_not_gone(owner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    process = await start(WAITS, owner)
    assert process.identity
    with monkeypatch.context() as broken:
        broken.setattr(processes, "start_time", unknown)
        with pytest.raises(OSError, match="Too many open files"):
            adopt_process(process.identity)
    assert identify_process(process.pid) == process.identity
    await process.end(grace_seconds=5)


async def test_strays_are_killed_but_not_of_others(owner: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    stray, native_process = await start(WAITS, owner), await start(DEAF, owner)
    elsewhere = tmp_path_factory.mktemp("other-agent")
    foreign = await start(WAITS, elsewhere)
    helper = (await eventually(lambda: psutil.Process(native_process.pid).children()))[0]
    assert await kill_strays(owner, {native_process.pid}) == [stray.pid]
    assert identify_process(stray.pid) is None, "it is gone before anything is started"
    assert helper.is_running()
    assert identify_process(foreign.pid)
    for process in (native_process, foreign):
        await process.end(grace_seconds=0.1)


async def test_missing_program_is_named(owner: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-engine"):
        spawn_process(["no-such-engine"], {}, owner / "it.log", owner)


def test_last_lines_of_a_log_are_few_and_printable(tmp_path: Path) -> None:
    log = tmp_path / "it.log"
    assert read_last_log_lines(log) == ""
    log.write_bytes(
        b"x" * 9000 + b"\n" + b"".join(b"line %d\n" % number for number in range(100)) + b"\x1b[31mlast \xff\n"
    )
    lines = read_last_log_lines(log).splitlines()
    assert len(lines) == 40
    assert lines[0] == "line 61"
    assert "\x1b" not in lines[-1]


async def test_process_runs_without_a_log_that_cannot_be_written(owner: Path) -> None:
    (owner / "full").touch()
    process = spawn_process(["true"], dict(os.environ), owner / "full" / "it.log", owner)
    assert await process.wait() == EngineExit(code=0)


async def test_program_name_cut_by_the_kernel_inside_a_character_is_accepted(owner: Path) -> None:
    program = owner / ("ä" * 8)
    program.symlink_to(sys.executable)
    process = spawn_process([str(program), *WAITS[1:]], dict(os.environ), owner / "it.log", owner)
    assert process.identity == identify_process(process.pid)
    await process.end(grace_seconds=5)


async def test_error_after_the_start_leaves_no_process_behind(owner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def senseless(_: int) -> str:
        raise ValueError("no line as ps writes them")

    monkeypatch.setattr(processes, "start_time", senseless)
    with pytest.raises(ValueError, match="no line"):
        spawn_process(WAITS, dict(os.environ), owner / "it.log", owner)
    assert WAITS not in [child.cmdline() for child in psutil.Process().children() if is_alive(child)]
