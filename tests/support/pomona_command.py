"""The command `pomona` as a person runs it: in the test's own process, in one of its own, or on a terminal."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import NamedTuple

from click.testing import CliRunner

from cli.main import main
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.terminal import Terminal, open_terminal

ANSWER = "Hello from a tiny model"
"""Begin of the answer of the tiny model of tests."""
PROMPT = "> "
LIMIT_SECONDS = 120.0
"""Limit for a command, also on a busy machine: it is no claim about speed."""


class Result(NamedTuple):
    """The end of a command."""

    code: int
    output: str
    errors: str


class Pomona:
    """The command `pomona`, as an administrator runs it in a namespace."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.kubeconfig = plane.kubeconfig()
        self._namespace = namespace

    @property
    def options(self) -> str:
        """The options of each command, as hints repeat them."""
        return f" -n {self._namespace} --kubeconfig {self.kubeconfig}"

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cli.main", *self._complete(arguments)),
            cwd=CHECKOUT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    @contextlib.asynccontextmanager
    async def on_terminal(self, *arguments: str) -> AsyncIterator[Terminal]:
        """Yield a terminal on which the command runs, and which ends with the block."""
        command = [sys.executable, "-m", "cli.main", *self._complete(arguments)]
        async with open_terminal(command, CHECKOUT) as terminal:
            yield terminal

    def _complete(self, arguments: tuple[str, ...]) -> list[str]:
        is_of_cluster = arguments[0] in {"host", "hosts"} or arguments[:2] in {("plan", "add"), ("plan", "drain")}
        namespace = [] if is_of_cluster else [f"--namespace={self._namespace}"]
        return [*arguments, f"--kubeconfig={self.kubeconfig}", *namespace]

    async def run(self, *arguments: str) -> Result:
        """Run a command in a thread: a process for each would take the processors longer than all that it does."""
        words = self._complete(arguments)
        async with asyncio.timeout(LIMIT_SECONDS):
            done = await asyncio.to_thread(CliRunner().invoke, main, words, prog_name="pomona")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        return Result(done.exit_code, done.stdout, done.stderr)

    async def succeed(self, *arguments: str) -> str:
        result = await self.run(*arguments)
        assert result.code == 0, result
        return result.output


async def ask_on_terminal(terminal: Terminal, question: str) -> None:
    """Type a question at the prompt of `pomona chat`, and wait for its whole answer."""
    await terminal.wait_for(PROMPT)
    terminal.type(f"{question}\n")
    await terminal.wait_for(ANSWER)
    await terminal.wait_for(" tokens in ")
