"""Run a vendor's tool so that it can neither block the node agent nor fill its memory.

A driver that is stuck makes its tool hang, often where not even SIGKILL ends it. So each run has a time limit, after
which the tool and its children are killed, and a tool whose last run has not ended yet is not started again. The tools
are run instead of a library such as NVML: a driver that crashes or hangs takes a process with it, not the agent, a
container gets tool and library from the same runtime, and one reader serves all vendors.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from typing import IO, Final, NamedTuple

from devices.node.checked_values import clean_text

MOST_OUTPUT_BYTES: Final = 1 << 20
_TIMEOUT_SECONDS: Final = 10.0
"""nvidia-smi takes some seconds if no process keeps the driver loaded."""
_QUOTED: Final = 120
"""Characters of a tool's output that a problem shows."""
_hung: Final[dict[str, "subprocess.Popen[bytes]"]] = {}
"""Runs, by the path of the tool, that were killed and have not ended: one for each tool at most."""
_groups: Final[set[int]] = set()
"""Process groups of runs, of which children may be left: those of a container's first process become its own."""


class ToolAnswer(NamedTuple):
    """Output of a tool, or why there is none."""

    text: str = ""
    problem: str = ""
    """Empty if the tool answered; else a phrase such as `did not answer within 10 s`."""


def run_tool(program: str, *arguments: str, timeout_seconds: float = _TIMEOUT_SECONDS) -> ToolAnswer:
    """Run a vendor's program, given by its full path, and return its output, or a problem in words; raises nothing.

    A run that takes too long, or prints too much, is killed. While a killed run has not ended, no new one is started.
    """
    # _hung: the run of each tool that was killed and has not ended
    earlier = _hung.get(program)
    if earlier is not None and earlier.poll() is None:
        return ToolAnswer(problem="still hangs since an earlier probe, and is not started again before it ends")
    _hung.pop(program, None)
    _reap_children()

    # Start the tool.
    try:
        process = subprocess.Popen(
            (program, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
            start_new_session=True,  # its own process group, so that its children are killed with it
        )
    except OSError as error:
        return ToolAnswer(problem=f"could not be started: {clean_text(str(error))}")

    # Read what it prints, within the limits.
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    with process.stdout:
        output = _read_bounded(process.stdout, time.monotonic() + timeout_seconds)
    if output is None:
        _kill(program, process)
        return ToolAnswer(problem=f"did not answer within {timeout_seconds:g} s")
    if len(output) > MOST_OUTPUT_BYTES:
        _kill(program, process)
        return ToolAnswer(problem=f"printed more than {MOST_OUTPUT_BYTES >> 20} MiB")

    return _finish_run(program, process, output.decode(errors="replace"))


def quote_output(text: str) -> str:
    """Return the beginning of what a tool printed, for a message."""
    shown = clean_text(text)
    return f"printed `{shown[:_QUOTED]}`" if shown else "printed nothing"


def _finish_run(program: str, process: "subprocess.Popen[bytes]", text: str) -> ToolAnswer:
    """Return the answer of a tool that has closed its output; a failure or an empty output is a problem.

    A tool that does not end is killed, but its answer, which is complete, counts.
    """
    try:
        status = process.wait(1)  # it closed its output, so it is about to end
    except subprocess.TimeoutExpired:
        _kill(program, process)
        return ToolAnswer(text)
    _end_group(process)
    if status or not text.strip():
        # Some versions print what is wrong on standard output and exit with 0.
        return ToolAnswer(text, f"exited with {status} and {quote_output(text)}")
    return ToolAnswer(text)


def _read_bounded(stream: IO[bytes], deadline: float) -> bytes | None:
    """Return the output, at most a little more than the limit; None if the stream is still open at the deadline."""
    chunks, size = [], 0
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while size <= MOST_OUTPUT_BYTES:
            # select returns nothing if the deadline comes before further output.
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return None

            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                break
            chunks.append(chunk)
            size += len(chunk)
            if time.monotonic() > deadline:
                return None
    return b"".join(chunks)


def _kill(program: str, process: "subprocess.Popen[bytes]") -> None:
    """Kill the tool with all its children; remember it if it does not end."""
    _end_group(process)
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        # `run_tool` does not start this tool again before this run has ended.
        _hung[program] = process
    _reap_children()


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the tool, if it runs, and what it has started and left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    _groups.add(process.pid)


def _reap_children() -> None:
    """Read the exit status of processes that earlier runs have left, so that they do not stay zombies.

    A child of a tool that has ended becomes a child of this process if this is the first process of its container.
    """
    # _groups: the process groups of earlier runs. A negative number waits for any child in the group.
    for group in tuple(_groups):
        try:
            while os.waitpid(-group, os.WNOHANG)[0]:  # the pid of a child that has ended; 0: the others still run
                pass
        except ChildProcessError:  # no child is left
            _groups.discard(group)
