"""Keep the machine awake while a model is loaded or loading: a sleeping host answers no request.

On macOS a child `caffeinate` does that. It watches the agent, so that it ends with it however the agent ends; a closed
lid, or a notebook on battery, sleeps all the same. Other systems are not kept awake.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from metal_agent.holds.hold_gate import HoldableProcess
from metal_agent.memory.pressure_watchdog import memory_stage
from metal_agent.periodic import run_periodically

CHECK_SECONDS: Final = 5.0
"""Interval of the checks, and so the least time between two starts of a program that ends at once."""

log = structlog.get_logger()


def build_command(agent_pid: int, platform: str = sys.platform) -> tuple[str, ...] | None:
    """Return the program that keeps the machine awake as long as the agent runs; None if there is none."""
    return ("/usr/bin/caffeinate", "-i", "-s", "-w", str(agent_pid)) if platform == "darwin" else None


class KeepAwake:
    """The program that keeps this machine awake, which runs exactly as long as one of `runners` has an engine."""

    def __init__(self, runners: Mapping[str, HoldableProcess], command: Sequence[str] | None) -> None:
        self._runners = runners
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self) -> None:
        """Start and end the program that keeps the machine awake as needed until cancelled; then end it."""
        if self._command is None:
            return
        try:
            await run_periodically(self.check, CHECK_SECONDS, name="keep awake")
        finally:
            self._end()

    async def check(self) -> None:
        """Start `caffeinate` if an engine needs the machine awake and it does not run; end it if none does.

        An engine does while it loads, serves or drains. One that ended by itself is started again.
        """
        stages = {memory_stage(runner.state) for runner in self._runners.values()}  # such as loading
        is_needed = not stages.isdisjoint({"loading", "serving", "draining"})
        if self._process is not None and self._process.poll() is not None:  # it has ended by itself
            log.warning("keep_awake_ended", code=self._process.returncode)
            self._process = None
        if is_needed and self._process is None:
            self._start()
        elif not is_needed:
            self._end()

    def _start(self) -> None:
        """Start the program that keeps the machine awake (`caffeinate`); if it fails, the machine may sleep."""
        command = self._command or ()
        try:
            # Without a session of its own and with open files Popen does not fork: see `metal_agent/native/process.py`.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath},
                close_fds=False,
            )
        except OSError as error:
            log.warning("keep_awake_not_started", command=command, error=str(error))
        else:
            log.info("keep_awake_started", pid=self._process.pid)

    def _end(self) -> None:
        """End the program that keeps the machine awake, if it runs."""
        if self._process is None:
            return
        self._process.kill()  # the system forgets what it held
        self._process.wait()
        log.info("keep_awake_ended", pid=self._process.pid)
        self._process = None
