"""`pomona chat`: ask a service of this machine or of a cluster, in a pod or on a host, from anywhere."""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.cluster_access import INTERRUPTED_EXIT, Cluster, run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_served
from cli.conversation import hold_conversation, read_standard_input
from cli.machine.chat import chat_here
from cli.machine.instance import OR_START, choose_instance
from cli.options import hosts_ca_option, state_folder_option

if TYPE_CHECKING:
    from standalone.ask import ChatAnswer, ChatMessage, Show


@click.command("chat")
@click.argument("name", shell_complete=complete_served)
@click.argument("question", required=False)
@click.option("--url", help="Address of the service, such as http://127.0.0.1:8080, instead of one of its replicas.")
@hosts_ca_option
@state_folder_option
@namespaced_cluster_options
def command(
    name: str,
    question: str | None,
    *,
    target: ClusterOptions,
    url: str | None,
    hosts_ca: Path | None,
    state_dir: Path | None,
) -> None:
    """Ask the service NAME one QUESTION, or have a conversation.

    The running `pomona up` of this machine is asked, unless --url, -n, --context or --kubeconfig names a cluster.
    There, a replica in a pod is reached by way of the API server, as with `kubectl port-forward`; one on a host
    directly at the address of the host. The token is read from the Secret of the service. Without QUESTION, questions
    are read from the terminal, or one from standard input. Ctrl-C stops an answer; at the prompt it ends the
    conversation, as Ctrl-D does.

    \b
    Examples:
      pomona chat chat 'Who are you?'
      pomona chat chat
      pomona chat chat < question.txt
    """
    from standalone.ask import AskError  # noqa: PLC0415 - not needed for --help

    try:
        if url is None and (instance := choose_instance(target, state_dir)):
            chat_here(instance, name, question)
            return
        is_typed = question is None
        if is_typed:
            # A service that cannot be asked is reported before somebody types a question.
            run_in_cluster(target, lambda cluster: _check(cluster, name, url, hosts_ca), instead=OR_START)
            question = None if sys.stdin.isatty() else read_standard_input()
        # Without a question, `_chat` reads one after the other from the terminal.
        chat = functools.partial(_chat, name=name, question=question, url=url, hosts_ca=hosts_ca, is_said=is_typed)
        run_in_cluster(target, chat, instead=OR_START)
    except AskError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        print()
        sys.exit(INTERRUPTED_EXIT)


async def _check(cluster: Cluster, name: str, url: str | None, hosts_ca: Path | None) -> None:
    """Find a replica and its token, and raise as `open_service` if the service cannot be asked."""
    from cli.service.service_address import open_service  # noqa: PLC0415 - not needed for --help

    async with open_service(cluster, name, url, hosts_ca):
        cluster.say_asked()


async def _chat(
    cluster: Cluster, *, name: str, question: str | None, url: str | None, hosts_ca: Path | None, is_said: bool
) -> None:
    """Ask the service each question with the whole conversation before it, and print the answers.

    `is_said` is True if the user knows already which cluster is asked.
    """
    from cli.service.service_address import open_service  # noqa: PLC0415 - not needed for --help
    from standalone.ask import continue_chat  # noqa: PLC0415 - same

    async def ask(messages: "Sequence[ChatMessage]", show: "Show", thoughts: "Show | None") -> "ChatAnswer":
        """Ask a replica of the service."""
        # Between two questions the engine may close its connection, and the replica may be replaced.
        async with open_service(cluster, name, url, hosts_ca) as (session, address):
            if not is_said:
                cluster.say_asked()
            return await continue_chat(session, address, name, messages, show=show, show_thoughts=thoughts)

    await hold_conversation(question, ask)
