"""`pomona chat` and `pomona run` with a service of a running `pomona up`."""

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cli.conversation import hold_conversation, read_standard_input
from cli.endpoint.client_configuration import KEY_VARIABLE
from cli.machine.instance import Instance
from cli.output import print_note

if TYPE_CHECKING:
    from standalone.ask import ChatAnswer, ChatMessage, Show


def chat_here(instance: Instance, name: str, question: str | None) -> None:
    """Ask a service of the instance one question, or those that are typed or piped into the command.

    Raises:
        click.ClickException: the service cannot be asked.
        AskError: there is no complete answer.
        KeyboardInterrupt: Ctrl-C at the prompt, or while the only question is answered.
    """
    service, endpoint = instance.find_service(name), instance.status.endpoint
    if not endpoint:
        raise click.ClickException(instance.status.problem or "the endpoint is not open yet: see `pomona list`")
    instance.say_asked()
    if question is None and not sys.stdin.isatty():
        question = read_standard_input()
    if not service.is_loaded:
        print_note(f"{name} is loaded by the first question")
    asyncio.run(_chat(endpoint, name, question))


async def _chat(endpoint: str, name: str, question: str | None) -> None:
    """Ask the service at the endpoint each question. Raises AskError and KeyboardInterrupt."""
    from standalone.ask import continue_chat, open_session  # noqa: PLC0415 - not needed for --help

    async with open_session(token=os.environ.get(KEY_VARIABLE, "")) as session:

        async def ask(messages: "Sequence[ChatMessage]", show: "Show", thoughts: "Show | None") -> "ChatAnswer":
            return await continue_chat(session, endpoint, name, messages, show=show, show_thoughts=thoughts)

        await hold_conversation(question, ask)
