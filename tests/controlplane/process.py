"""A program that runs beside a test or the demo: its start, its log and its end.

It belongs to no event loop: a session's fixture may start a program that a test stops, and pytest-asyncio runs fixture
and test in different loops.
"""

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
TAIL_BYTES = 64 << 10
PATIENCE_SECONDS = 120.0
"""Limit for the end of a program, also on a busy machine: it is no claim about speed."""


class Process:
    """A program with its output in a file; after its end it may be started again, and appends to the same log.

    The file may have the output of earlier programs, as that of a controller of the test before.

    Args:
        name: name of the program in messages.
        argv: program and arguments.
        log: file for both outputs.
        environment: variables in addition to those of this process.
    """

    def __init__(self, name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        self.argv = list(argv)
        self._environment = {**os.environ, **(environment or {})}
        self._child: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        """Process id of the last start."""
        return self._started.pid

    @property
    def running(self) -> bool:
        """True from the start of the program to its end."""
        return self._child is not None and self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the program runs or before the first start."""
        return None if self._child is None else self._child.poll()

    def start(self) -> None:
        """Start the program.

        Raises:
            RuntimeError: the program runs already.
        """
        if self.running:
            raise RuntimeError(f"{self.name} runs already, as process {self.pid}")
        with self.log.open("ab") as output:
            if self._child is None:
                self._log_start = output.tell()
            self._child = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=CHECKOUT,
                start_new_session=True,
            )

    async def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait until the program has ended, and return its exit code.

        Raises:
            TimeoutError: the program still runs after `seconds`.
        """
        try:
            return await asyncio.to_thread(self._started.wait, seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} still runs after {seconds} s") from None

    async def stop(self, grace_seconds: float = PATIENCE_SECONDS) -> int:
        """Send SIGTERM, wait for the end of the program, and return its exit code.

        Raises:
            TimeoutError: the program still ran after the grace period, and was killed.
        """
        self._started.terminate()  # like kill(), it does nothing if the program has ended
        try:
            return await self.wait(grace_seconds)
        except TimeoutError:
            await self.kill()
            raise

    async def kill(self) -> None:
        """Kill the program, as in a crash; its children continue to run."""
        self._started.kill()
        await self.wait()

    def tail(self, lines: int) -> str:
        """Return the last lines of the log since the first start: a program before may have used the same file."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - TAIL_BYTES))
            return "\n".join(file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-lines:])

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._child
