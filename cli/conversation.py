"""A conversation in the terminal: questions that are typed, answers as they come, and Ctrl-C that stops an answer."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

import click

from cli.output import dim, show_raw

if TYPE_CHECKING:
    from standalone.ask import ChatAnswer, ChatMessage, Show

_PROMPT: Final = "> "
_LINE_BYTES: Final = 4096
"""The longest line that a terminal passes on."""

AskQuestion = Callable[["Sequence[ChatMessage]", "Show", "Show | None"], Awaitable["ChatAnswer"]]
"""Sends a conversation, and returns the answer, of which it shows each piece: those of the answer, and of thoughts."""


async def hold_conversation(question: str | None, ask: AskQuestion) -> None:
    """Ask the question, or those that are typed, each with the whole conversation before it, and print the answers.

    Ctrl-C while an answer comes ends that answer only, if the questions are typed: the part that came stays in the
    conversation. At the prompt it ends the conversation, as Ctrl-D does.

    Raises:
        KeyboardInterrupt: Ctrl-C at the prompt, or while the only question is answered.
        AskError: there is no complete answer.
    """
    from standalone.ask import ChatMessage  # noqa: PLC0415 - not needed for --help

    messages: list[ChatMessage] = []
    thoughts = _show_thought if sys.stdout.isatty() else None
    async for asked in _read_questions(question):
        messages.append(ChatMessage("user", asked))
        pieces: list[str] = []

        def show(text: str, pieces: list[str] = pieces) -> None:
            """Show a piece of the answer, and keep it in case that the answer is stopped."""
            pieces.append(text)
            print(show_raw(text), end="", flush=True)

        answer = await _run_until_interrupt(ask(messages, show, thoughts), is_caught=question is None)
        print(flush=True)  # the next line is of standard error
        if answer is not None:
            messages.append(ChatMessage("assistant", answer.text))
            print(answer.describe(), file=sys.stderr)
        elif pieces:
            messages.append(ChatMessage("assistant", "".join(pieces)))
        else:
            messages.pop()  # most models take no two questions in a row


async def _run_until_interrupt(asking: "Awaitable[ChatAnswer]", *, is_caught: bool) -> "ChatAnswer | None":
    """Return the answer; None if Ctrl-C has ended it, which closes its connection, so that the engine stops, too.

    Unless `is_caught`, Ctrl-C does what it did before.
    """
    if not is_caught:
        return await asking
    task = asyncio.ensure_future(asking)
    former, loop = signal.getsignal(signal.SIGINT), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, former)
    return None if task.cancelled() else task.result()


def read_standard_input() -> str:
    """Return the question that is piped into the command. Raises click.ClickException: it is empty."""
    if text := sys.stdin.read().strip():
        return text
    raise click.ClickException("standard input is empty: give a question")


async def _read_questions(question: str | None) -> AsyncIterator[str]:
    """Yield the question of the command line, or those that are typed."""
    if question is not None:
        yield question
        return
    while line := await read_line():
        if line.strip():
            yield line.strip()
    print()


async def read_line() -> str:
    """Return a line that is typed in the terminal; empty after Ctrl-D.

    It waits in the event loop and not in `readline`, which Ctrl-C could not interrupt.
    """
    print(_PROMPT, end="", flush=True)
    line, terminal = b"", sys.stdin.fileno()
    while not line.endswith(b"\n"):
        await _wait_for_input(terminal)
        # No bytes: the input has ended, by Ctrl-D.
        if not (typed := os.read(terminal, _LINE_BYTES)):
            break
        line += typed
    return line.decode(errors="replace")


async def _wait_for_input(descriptor: int) -> None:
    """Wait until a descriptor can be read, without blocking the event loop."""
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(descriptor)


def _show_thought(text: str) -> None:
    print(dim(show_raw(text)), end="", flush=True)
