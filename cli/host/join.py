"""`pomona host join`: make a code with which a machine joins as a host."""

import click

from cli.cluster_access import run_in_cluster
from cli.cluster_options import ClusterOptions, cluster_options


@click.command("join")
@click.argument("name")
@click.option("--server", help="URL of the API server that the host reaches. Default: the one of the kubeconfig.")
@cluster_options
def command(name: str, *, server: str | None, target: ClusterOptions) -> None:
    """Make an identity for host NAME, and a code with which one machine takes it over.

    The code is valid for 15 minutes and for one use. Another code for the same host replaces an unused one; a host
    that runs goes on. The code alone is written to standard output, so that it can be piped.

    \b
    Examples:
      pomona host join studio-1
      pomona host join studio-1 --server https://192.0.2.10:6443
      pomona host join studio-1 | ssh studio-1 '~/.local/bin/pomona' agent join -
    """
    from metal_agent.join.invitation import CODE_SECONDS, InvitationError, invite_host  # noqa: PLC0415 - not for --help

    try:
        code = run_in_cluster(target, lambda cluster: invite_host(cluster.client, cluster.credentials, name, server))
    except InvitationError as error:
        raise click.ClickException(str(error)) from error

    # The explanation goes to standard error, so that the code alone can be piped.
    click.echo(f"On the machine that becomes host {name}, within {CODE_SECONDS // 60} minutes:\n", err=True)
    click.echo("  pomona agent join CODE\n", err=True)
    click.echo("with this CODE, which works once (hand it over as you would a password):\n", err=True)
    click.echo(code)
