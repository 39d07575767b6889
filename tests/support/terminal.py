"""A pseudo-terminal with a program on it, for tests of what a person types and sees."""

import asyncio
import codecs
import contextlib
import os
import pty
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from tests.support.eventually import LIMIT_SECONDS as SHOWN_SECONDS
from tests.support.eventually import eventually

LIMIT_SECONDS = 180.0
"""Limit for the end of a program, also on a busy machine: it is no claim about speed."""
AGAIN_SECONDS = 5.0
"""Pause before keys are typed again."""
CTRL_C, CTRL_D = "\x03", "\x04"
CHUNK_BYTES = 1 << 16


class Terminal:
    """A program whose input and output are a terminal, as a person has it.

    Args:
        descriptor: the terminal's own side.
        process: the program.
    """

    def __init__(self, descriptor: int, process: asyncio.subprocess.Process) -> None:
        self.output = ""
        """All that the terminal has shown, with the line ends of a terminal."""
        self._descriptor = descriptor
        self._process = process
        self._seen = 0
        self._has_ended = False
        # A character may come in two chunks.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def type(self, text: str) -> None:
        """Type keys; CTRL_C and CTRL_D do what they do in a shell."""
        os.write(self._descriptor, text.encode())

    async def type_until(self, keys: str, text: str) -> None:
        """Type keys until the terminal shows a text; the program may not read those that come just after its prompt.

        Raises:
            RuntimeError: as `wait_for`.
        """
        while True:
            self.type(keys)
            with contextlib.suppress(AssertionError):
                return await self.wait_for(text, AGAIN_SECONDS)

    async def wait_for(self, text: str, within_seconds: float = SHOWN_SECONDS) -> None:
        """Wait until the terminal shows a text after the one that was waited for before.

        Raises:
            RuntimeError: the program ended without it; the message has all that was shown.
        """

        def is_shown() -> bool:
            if text not in self.output[self._seen :] and self._has_ended:
                raise RuntimeError(f"the program ended without {text!r}: {self.output}")
            return text in self.output[self._seen :]

        await eventually(is_shown, within_seconds)
        self._seen = self.output.index(text, self._seen) + len(text)

    async def end(self) -> int:
        """Wait for the end of the program and for all that it shows, and return its exit code."""
        async with asyncio.timeout(LIMIT_SECONDS):
            code = await self._process.wait()
        await eventually(lambda: self._has_ended)
        return code

    def close(self) -> None:
        """Close the terminal; a program that still runs is killed."""
        if self._process.returncode is None:
            self._process.kill()
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _read(self) -> None:
        try:
            self.output += self._decoder.decode(os.read(self._descriptor, CHUNK_BYTES))
        except OSError:  # the program has ended, and nobody else has the terminal open
            self._has_ended = True
            asyncio.get_running_loop().remove_reader(self._descriptor)


@contextlib.asynccontextmanager
async def open_terminal(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Terminal]:
    """Yield a terminal on which a command runs in a folder, and which ends with the block.

    `environment` replaces that of this process.
    """
    own_side, other_side = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *("setsid", "--ctty", *command),
            cwd=folder,
            env=environment,
            stdin=other_side,
            stdout=other_side,
            stderr=other_side,
        )
    finally:
        os.close(other_side)
    terminal = Terminal(own_side, process)
    try:
        yield terminal
    finally:
        terminal.close()
        await process.wait()
