"""`pomona proxy`: the process in front of a host's inference servers. The agent starts and configures it."""

import asyncio
from pathlib import Path

import click

from cli import log
from gateway.proxy import control


@click.command("proxy")
@click.option("--socket", required=True, type=click.Path(path_type=Path), help="Unix socket of the control API.")
@click.option(
    "--drain-seconds", default=30.0, show_default=True, help="After SIGTERM, how long running requests may still take."
)
def command(socket: Path, drain_seconds: float) -> None:
    """Serve what the agent configures over the control socket, until SIGTERM.

    A running proxy holds the socket alone: a second one on the same path refuses to start.

    \b
    Example, to see what one serves:
      curl --unix-socket ~/.local/state/pomona/proxy/control.sock http://proxy/state
    """
    log.configure()
    try:
        with control.claim(socket) as claimed:
            asyncio.run(control.serve(claimed, drain_seconds=drain_seconds))
    except control.SocketError as error:
        raise click.ClickException(str(error)) from error
