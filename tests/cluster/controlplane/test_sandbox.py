"""The sandbox, tried inside a sandbox, since one can be made there whatever the machine allows outside."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controlplane.process import CHECKOUT
from tests.support.eventually import eventually

SANDBOX = [sys.executable, "-m", "tests.controlplane.sandbox", "--"]
ENTER = "from tests.controlplane.sandbox import enter_command; print(enter_command())"


def shell(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SANDBOX, "sh", "-c", script], capture_output=True, text=True, check=False, timeout=90)


def running(marker: str) -> list[int]:
    """Processes with this word among their arguments, also those of inner sandboxes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "cmdline").read_text().split("\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has just ended
    return found


@pytest.fixture
def held() -> Iterator[subprocess.Popen[str]]:
    """A sandbox that says how to enter it, and then holds a process that left its session."""
    script = f"setsid sleep 4242 & {shlex.quote(sys.executable)} -c {shlex.quote(ENTER)}; exec sleep 4242"
    with subprocess.Popen([*SANDBOX, "sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_exit_status_is_the_command_s() -> None:
    assert shell("exit 7").returncode == 7


def test_a_signal_is_reported_as_a_shell_does() -> None:
    assert shell("kill -KILL $$").returncode == 128 + signal.SIGKILL


def test_what_is_outside_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / "outside").touch()

    assert shell(f"ls {tmp_path}/outside; ip -oneline link | wc -l").stdout == "1\n"


def test_a_folder_below_tmp_that_is_needed_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("here")
    environment = {**os.environ, "HOME": str(tmp_path)}

    result = subprocess.run(
        [*SANDBOX, "cat", str(tmp_path / "kept")], env=environment, capture_output=True, check=False
    )

    assert result.stdout == b"here"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
async def test_nothing_outlives_the_outer_process(held: subprocess.Popen[str], end: signal.Signals) -> None:
    await eventually(lambda: len(running("4242")) == 2)

    held.send_signal(end)

    await eventually(lambda: running("4242") == [])


def test_it_can_be_entered_from_outside(held: subprocess.Popen[str]) -> None:
    assert held.stdout
    command = [*shlex.split(held.stdout.readline()), "sh", "-c", "pwd; cat /proc/1/cmdline"]

    result = subprocess.run(command, capture_output=True, text=True, check=True)

    folder, _, first_process = result.stdout.partition("\n")
    assert folder == str(CHECKOUT)
    assert "--first" in first_process
