"""Tools that hang, flood, fail or leave children behind: each is a phrase, and none stays or blocks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from devices.node import vendor_tool
from devices.node.vendor_tool import MOST_OUTPUT_BYTES, run_tool
from tests.support.eventually import eventually
from tests.unit.devices.node.stand_ins import ToolFolder


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_output_is_without_the_users_locale(tools: ToolFolder) -> None:
    assert run_tool(str(tools.add("tool", 'echo "$LC_ALL $1"')), "-L") == ("C -L\n", "")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'NVIDIA-SMI has failed'; exit 9", "exited with 9 and printed `NVIDIA-SMI has failed`"),
        ("exit 0", "exited with 0 and printed nothing"),
        ("echo gone >&2; kill -9 $$", "exited with -9 and printed `gone`"),
    ],
)
def test_failure_is_told_with_what_was_printed(tools: ToolFolder, script: str, problem: str) -> None:
    assert run_tool(str(tools.add("tool", script))).problem == problem


def test_program_that_cannot_start_is_a_problem(tools: ToolFolder) -> None:
    assert "could not be started" in run_tool(str(tools.folder / "absent")).problem
    garbage = tools.add("garbage", "")
    garbage.write_bytes(b"\x7fELF\x00")
    assert "could not be started" in run_tool(str(garbage)).problem


async def test_hung_tool_is_killed_with_its_children(tools: ToolFolder, tmp_path: Path) -> None:
    tool = tools.add("tool", f"sleep 600 & echo $! > {tmp_path}/child; echo half; wait")
    answer = run_tool(str(tool), timeout_seconds=0.5)
    assert answer == ("", "did not answer within 0.5 s")
    child = int((tmp_path / "child").read_text())
    await eventually(lambda: not is_alive(child))
    assert not vendor_tool._hung


def test_tool_that_closes_its_output_and_stays_is_ended(tools: ToolFolder) -> None:
    tool = tools.add("tool", "echo answer; exec >&- 2>&-; sleep 600")
    assert run_tool(str(tool)).text == "answer\n"


def test_flood_is_cut_off(tools: ToolFolder) -> None:
    answer = run_tool(str(tools.add("tool", "exec yes")))
    assert answer == ("", f"printed more than {MOST_OUTPUT_BYTES >> 20} MiB")


def test_tool_that_survives_its_end_is_not_started_again(tools: ToolFolder, tmp_path: Path) -> None:
    # What the kernel does to a tool of a stuck driver: SIGKILL waits. A stopped process stands for it here.
    tool = str(tools.add("tool", f"echo started >> {tmp_path}/starts; echo answer"))
    with subprocess.Popen(("/bin/sleep", "600")) as stuck:
        vendor_tool._hung[tool] = stuck
        assert "is not started again" in run_tool(tool).problem
        assert not (tmp_path / "starts").exists()
        os.kill(stuck.pid, signal.SIGKILL)
        stuck.wait()
    assert run_tool(tool) == ("answer\n", "")
    assert not vendor_tool._hung


AS_FIRST_PROCESS = """
import ctypes, functools, sys
import psutil
from devices.node.vendor_tool import run_tool

assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # orphans are its children, as those of a container's first process
children = functools.partial(psutil.Process().children, recursive=True)
for _ in range(4):
    run_tool(sys.argv[1], timeout_seconds=0.2)
while any(child.status() != psutil.STATUS_ZOMBIE for child in children()):
    pass
run_tool("/bin/true")
print(len(children()))
"""


@pytest.mark.parametrize(
    "script", ["sleep 600 & wait", "sleep 600 >&- 2>&- & echo answer", "(sleep 0.01; echo late) &"]
)
def test_children_of_a_tool_pile_up_nowhere_in_a_container(tools: ToolFolder, script: str) -> None:
    tool = tools.add("tool", script)
    argv = [sys.executable, "-c", AS_FIRST_PROCESS, str(tool)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout == "0\n"
