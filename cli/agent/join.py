"""`pomona agent join`: join a cluster with a code of its administrator."""

import asyncio
import shlex
import sys
from pathlib import Path

import click

from cli import log
from cli.options import default_state_folder, state_folder_option
from crds.text import escape_controls
from launchd.service_definition import PROGRAM, STATE_OPTION
from metal_agent.cluster.host_identity import FILE_NAME
from metal_agent.join.exchange import JoinError, join_cluster
from metal_agent.join.join_code import JoinCodeError, decode_join_code

_MOST_CHARACTERS = 1 << 20


@click.command("join")
@click.argument("code")
@state_folder_option
def command(code: str, *, state_dir: Path | None) -> None:
    """Join a cluster as a host, with a CODE that `pomona host join` printed; with `-` it is read from standard input.

    The code has the address of the API server and its certificate authority: nothing secret is sent to another server.
    The identity of this host is written into the state folder, and renews itself while the agent runs.

    \b
    Examples:
      pomona agent join pomona-join-2.eNqrV...
      ssh admin@cluster pomona host join studio-1 | pomona agent join -
    """
    log.configure()
    folder = (state_dir or default_state_folder()).absolute()
    try:
        content = decode_join_code(sys.stdin.read(_MOST_CHARACTERS) if code == "-" else code)
        joined = asyncio.run(join_cluster(content, folder))
    except (JoinCodeError, JoinError) as error:
        raise click.ClickException(str(error)) from error

    # Say what this machine is now, and how the agent is installed with the same state folder.
    click.echo(escape_controls(f"this machine is host {joined.host} of {joined.server} ({folder / FILE_NAME})"))
    option = f" {STATE_OPTION} {shlex.quote(str(folder))}" if state_dir else ""
    click.echo(f"keep it running: sudo {PROGRAM} agent install{option}")
    click.echo(f"without administrator rights: {PROGRAM} agent install --user{option}")
