"""`pomona proxy`: the process in front of a host's inference servers. The agent starts and configures it."""

from pathlib import Path

import click
import uvloop

from cli.options import PATH
from gateway.event_log import log_libraries
from gateway.http.named_socket import SocketError
from gateway.proxy import control, control_socket


@click.command("proxy")
@click.option("--socket", required=True, type=PATH, help="Unix socket of the control API.")
@click.option("--drain-seconds", default=30.0, show_default=True, help="Seconds for running requests after SIGTERM.")
@click.option("--take-over", is_flag=True, help="Take over the listeners of the proxy on this socket, which then ends.")
def command(socket: Path, drain_seconds: float, *, take_over: bool) -> None:
    """Forward requests to engines until SIGTERM.

    The agent starts the proxy, and configures it over the control socket. A second proxy at the same socket refuses to
    start.

    \b
    Example, to print the state of the proxy:
      curl --unix-socket ~/.local/state/pomona/proxy/control.sock http://proxy/state
    """
    log_libraries()
    try:
        # claimed: the control socket, and with --take-over the listeners of the proxy that had it
        with control_socket.claim_socket(socket, take_over=take_over) as claimed:
            uvloop.run(control.run_proxy(claimed, drain_seconds=drain_seconds))
    except SocketError as error:
        raise click.ClickException(str(error)) from error
    except ExceptionGroup as group:  # of the tasks of the proxy
        if refused := group.subgroup(SocketError):
            raise click.ClickException(str(refused.exceptions[0])) from group
        raise
