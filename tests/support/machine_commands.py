"""The commands about this machine, as a person runs them beside a `pomona up`."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from tests.controlplane.process import CHECKOUT
from tests.support.terminal import Terminal, open_terminal

LIMIT_SECONDS = 120.0
"""Limit for a command, also on a busy machine: it is no claim about speed."""


class CommandEnd(NamedTuple):
    """The end of a command."""

    code: int
    output: str
    errors: str


class MachineCommands:
    """The command `pomona` with a state folder; it knows no cluster."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._environment = {**os.environ, "KUBECONFIG": str(state / "absent"), "TERM": "dumb"}

    def build_argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "cli.main", *words, f"--state-dir={self.state}"]

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.build_argv(*words),
            cwd=CHECKOUT,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *words: str) -> CommandEnd:
        process = await self.start(*words)
        async with asyncio.timeout(LIMIT_SECONDS):
            output, errors = await process.communicate()
        assert process.returncode is not None
        return CommandEnd(process.returncode, output.decode(), errors.decode())

    async def succeed(self, *words: str) -> str:
        ended = await self.run(*words)
        assert ended.code == 0, ended
        return ended.output

    @contextlib.asynccontextmanager
    async def on_terminal(self, *words: str) -> AsyncIterator[Terminal]:
        """Yield a terminal on which the command runs, and which ends with the block."""
        async with open_terminal(self.build_argv(*words), CHECKOUT, self._environment) as terminal:
            yield terminal


async def interrupt(process: asyncio.subprocess.Process) -> CommandEnd:
    """Press Ctrl-C for a command, and wait for its end."""
    process.send_signal(signal.SIGINT)
    output, errors = await process.communicate()
    assert process.returncode is not None
    return CommandEnd(process.returncode, output.decode(), errors.decode())
