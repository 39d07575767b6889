"""The sandbox, tested inside a sandbox: a nested one can be made there even if the machine forbids others."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controlplane.process import CHECKOUT
from tests.controlplane.sandbox import enter_command, find_sandbox
from tests.demo.shell import DEMO, NOTE
from tests.support.eventually import eventually

DEMO_SHELL = [sys.executable, "-m", "tests.demo.shell"]
SANDBOX = [sys.executable, "-m", "tests.controlplane.sandbox", "--"]


def shell(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SANDBOX, "sh", "-c", script], capture_output=True, text=True, check=False, timeout=90)


def running(marker: str) -> list[int]:
    """Return the processes with this argument, including those of inner sandboxes."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "cmdline").read_text().split("\0"):
                pids.append(int(folder.name))
        except OSError:
            continue  # the process has just ended
    return pids


@pytest.fixture
def held() -> Iterator[subprocess.Popen[str]]:
    """A sandbox that has the note of a demo and then prints a line, with a process that has left its session."""
    script = f"setsid sleep 4242 & echo 'export GREETING=hello' >{NOTE}; echo; exec sleep 4242"
    with subprocess.Popen([*SANDBOX, "sh", "-c", script, DEMO], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_exit_status_of_the_command_is_returned() -> None:
    assert shell("exit 7").returncode == 7


def test_signal_is_reported_as_by_a_shell() -> None:
    assert shell("kill -KILL $$").returncode == 128 + signal.SIGKILL


def test_files_and_links_outside_are_not_visible(tmp_path: Path) -> None:
    (tmp_path / "outside").touch()

    assert shell(f"ls {tmp_path}/outside; ip -oneline link | wc -l").stdout == "1\n"


def test_home_folder_below_tmp_stays_visible(tmp_path: Path) -> None:
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


def test_sandbox_can_be_entered_from_outside(held: subprocess.Popen[str]) -> None:
    assert held.stdout
    held.stdout.readline()
    pid = find_sandbox(DEMO)
    assert pid is not None
    command = [*enter_command(pid), "sh", "-c", "pwd; cat /proc/1/cmdline"]

    result = subprocess.run(command, capture_output=True, text=True, check=True)

    folder, _, first_process = result.stdout.partition("\n")
    assert folder == str(CHECKOUT)
    assert "--first" in first_process


def test_shell_of_the_demo_has_its_variables(held: subprocess.Popen[str]) -> None:
    assert held.stdout
    held.stdout.readline()

    result = subprocess.run([*DEMO_SHELL, "echo $GREETING"], capture_output=True, text=True, check=True)

    assert result.stdout == "hello\n"


def test_command_for_the_shell_is_not_expanded_by_make(held: subprocess.Popen[str]) -> None:
    assert held.stdout
    held.stdout.readline()
    make = ["make", "--silent", "demo-shell", "COMMAND=echo $GREETING $(echo world)"]

    result = subprocess.run(make, cwd=CHECKOUT, capture_output=True, text=True, check=True)

    assert result.stdout == "hello world\n"


def test_shell_of_a_demo_that_does_not_run_says_how_to_start_one() -> None:
    result = subprocess.run(DEMO_SHELL, capture_output=True, text=True, check=False)

    assert result.returncode == 1
    assert result.stderr == "make demo-shell: no demo runs: start one in another terminal with `make demo KEEP=1`\n"
