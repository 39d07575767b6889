"""`pomona chat`: ask a service of the cluster, in a pod or on a host, from anywhere."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import click

from cli.cluster_access import INTERRUPTED_EXIT, Cluster, run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_services
from cli.options import hosts_ca_option
from cli.output import dim, show_raw

_PROMPT: Final = "> "
_LINE_BYTES: Final = 4096
"""The longest line that a terminal passes on."""


@click.command("chat")
@click.argument("name", shell_complete=complete_services)
@click.argument("question", required=False)
@click.option("--url", help="Address of the service, such as http://127.0.0.1:8080, instead of one of its replicas.")
@hosts_ca_option
@namespaced_cluster_options
def command(name: str, question: str | None, *, target: ClusterOptions, url: str | None, hosts_ca: Path | None) -> None:
    """Ask the service NAME one QUESTION, or have a conversation.

    A replica in a pod is reached by way of the API server, as with `kubectl port-forward`; one on a host directly at
    the address of the host. The token is read from the Secret of the service. Without QUESTION, questions are read from
    the terminal until Ctrl-D, or one from standard input.

    \b
    Examples:
      pomona chat chat 'Who are you?'
      pomona chat chat
      pomona chat chat < question.txt
    """
    from standalone.ask import AskError  # noqa: PLC0415 - not needed for --help

    try:
        if question is None:
            # A service that cannot be asked is reported before somebody types a question.
            run_in_cluster(target, lambda cluster: _check(cluster, name, url, hosts_ca))
            question = None if sys.stdin.isatty() else _read_standard_input()
        # Without a question, `_chat` reads one after the other from the terminal.
        run_in_cluster(target, lambda cluster: _chat(cluster, name, question, url, hosts_ca))
    except AskError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        print()
        sys.exit(INTERRUPTED_EXIT)


async def _check(cluster: Cluster, name: str, url: str | None, hosts_ca: Path | None) -> None:
    """Find a replica and its token, and raise as `open_service` if the service cannot be asked."""
    from cli.service.service_address import open_service  # noqa: PLC0415 - not needed for --help

    async with open_service(cluster, name, url, hosts_ca):
        pass


async def _chat(cluster: Cluster, name: str, question: str | None, url: str | None, hosts_ca: Path | None) -> None:
    """Ask the service each question with the whole conversation before it, and print the answers."""
    from cli.service.service_address import open_service  # noqa: PLC0415 - not needed for --help
    from standalone.ask import ChatMessage, continue_chat  # noqa: PLC0415 - same

    messages: list[ChatMessage] = []
    thoughts = _show_thought if sys.stdout.isatty() else None
    async for asked in _read_questions(question):
        messages.append(ChatMessage("user", asked))
        # Between two questions the engine may close its connection, and the replica may be replaced.
        async with open_service(cluster, name, url, hosts_ca) as (session, address):
            answer = await continue_chat(session, address, name, messages, show=_show, show_thoughts=thoughts)
        messages.append(ChatMessage("assistant", answer.text))
        print(flush=True)  # the next line is of standard error
        print(answer.describe(), file=sys.stderr)


def _read_standard_input() -> str:
    if text := sys.stdin.read().strip():
        return text
    raise click.ClickException("standard input is empty: give a QUESTION")


async def _read_questions(question: str | None) -> AsyncIterator[str]:
    """Yield the question of the command line, or those that are typed."""
    if question is not None:
        yield question
        return
    while line := await _read_line():
        if line.strip():
            yield line.strip()
    print()


async def _read_line() -> str:
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


def _show(text: str) -> None:
    print(show_raw(text), end="", flush=True)


def _show_thought(text: str) -> None:
    print(dim(show_raw(text)), end="", flush=True)
