"""`pomona chat` reads a terminal without holding up what else it does, Ctrl-C above all."""

import asyncio
import fcntl
import os
import pty
import signal
import sys
import termios
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest
from aiohttp import web

from cli import up
from cli.conversation import hold_conversation, read_line
from standalone.ask import ChatAnswer, ChatMessage, Show
from standalone.client_access import ClientAccess
from standalone.machine import Machine
from tests.support.eventually import eventually
from tests.support.stub_server import serve_stub
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
    assert [await read_line() for _ in range(3)] == ["one\n", "two\n", ""]


async def test_half_a_line_holds_up_nothing(terminal: TypedInput) -> None:
    reading = asyncio.create_task(read_line())
    terminal.type(f"half a{CTRL_D}")
    await asyncio.sleep(0)
    await eventually(terminal.is_read)
    assert not reading.done()
    terminal.type(" line\n")
    assert await reading == "half a line\n"


async def test_interrupted_answer_stays_in_the_conversation_as_far_as_it_came(terminal: TypedInput) -> None:
    asked: list[list[tuple[str, str]]] = []

    async def ask(messages: Sequence[ChatMessage], show: Show, _thoughts: Show | None) -> ChatAnswer:
        asked.append([(message.role, message.content) for message in messages])
        if len(asked) == 1:
            show("half an ")
        if len(asked) < 3:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        return ChatAnswer("whole", 1, 0.0, 0.0)

    terminal.type(f"one\ntwo\nthree\n{CTRL_D}")
    before = signal.getsignal(signal.SIGINT)
    await hold_conversation(None, ask)
    assert signal.getsignal(signal.SIGINT) is before
    first = [("user", "one"), ("assistant", "half an ")]
    assert asked == [first[:1], [*first, ("user", "two")], [*first, ("user", "three")]]


async def test_answer_to_pomona_up_moves_no_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model, or whoever answers in the place of its engine, can generate anything."""
    chunk = b'data: {"choices": [{"delta": {"content": "a\\u001b]52;c;Y3Vy\\u0007"}}]}\n\n'
    bodies = iter([chunk + b"data: [DONE]\n\n", b"\x1b]52;c;Y3Vy\x07"])

    async def answer(_: web.BaseRequest) -> web.Response:
        body = next(bodies)
        return web.Response(status=200 if body.startswith(b"data") else 500, body=body)

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    async with serve_stub(answer) as url:

        async def find(_: object) -> tuple[str, str]:
            return url, "tiny"

        stop = asyncio.Event()
        machine = SimpleNamespace(
            wait_until_reachable=find,
            manifests=SimpleNamespace(services={"tiny": None}),
            signals=SimpleNamespace(stop=stop),
            exposure=SimpleNamespace(access=ClientAccess()),
        )
        assert await up._ask_and_stop(cast("Machine", machine), "Who?")
        assert not await up._ask_and_stop(cast("Machine", machine), "Who?")
    shown = capsys.readouterr()
    assert shown.out == "a\\x1b]52;c;Y3Vy\\x07\n"
    assert shown.err == "pomona up: tiny answered 500: \\x1b]52;c;Y3Vy\\x07\n"
