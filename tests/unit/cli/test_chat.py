"""`pomona chat` reads a terminal without holding up what else it does, Ctrl-C above all."""

import asyncio
import fcntl
import os
import pty
import sys
import termios
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from cli.service.chat import _read_line
from tests.support.eventually import eventually
from tests.support.terminal import CTRL_D


class TypedInput(NamedTuple):
    """Both sides of a terminal."""

    keyboard: int
    program: int

    def type(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def is_read(self) -> bool:
        unread = fcntl.ioctl(self.program, termios.FIONREAD, b"\0\0\0\0")
        return int.from_bytes(unread, sys.byteorder) == 0


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[TypedInput]:
    """Standard input as a terminal."""
    keyboard, program = pty.openpty()
    with os.fdopen(program) as stdin, os.fdopen(keyboard, "wb"):
        monkeypatch.setattr(sys, "stdin", stdin)
        yield TypedInput(keyboard, program)


async def test_lines_are_read_until_the_end_of_input(terminal: TypedInput) -> None:
    terminal.type(f"one\ntwo\n{CTRL_D}")
    assert [await _read_line() for _ in range(3)] == ["one\n", "two\n", ""]


async def test_half_a_line_holds_up_nothing(terminal: TypedInput) -> None:
    reading = asyncio.create_task(_read_line())
    terminal.type(f"half a{CTRL_D}")
    await asyncio.sleep(0)
    await eventually(terminal.is_read)
    assert not reading.done()
    terminal.type(" line\n")
    assert await reading == "half a line\n"
