"""`pomona queue explain`: for each node and host, why a service waits, and what would help."""

import click

from cli.cluster_access import run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_services
from cli.output import DATA_FORMATS, facts_option, print_facts
from cli.queue.controller_settings import StatedSettings, controller_options


@click.command("explain")
@click.argument("name", metavar="SERVICE", shell_complete=complete_services)
@facts_option("table", "wide")
@controller_options
@namespaced_cluster_options
def command(name: str, *, target: ClusterOptions, stated: StatedSettings, output_format: str) -> None:
    """Show for each node and host why it does not run SERVICE, and what would help; the nearest remedy comes first.

    The cluster is read, and the queue decided as the controller decides it. Nothing is changed. That takes rights to
    read pods, nodes and hosts in the whole cluster; without them, the part that the controller has written into
    status.queue is shown.

    Exit code: 0 explained, or the service does not wait; 1 not all could be read.

    \b
    Examples:
      pomona queue explain chat
      pomona queue explain chat -n team -o json
    """
    from cli.queue import wait_explanation  # noqa: PLC0415 - not needed for --help

    # explained.missing: the rights that the user lacks to read all
    explained = run_in_cluster(target, lambda cluster: wait_explanation.explain_service(cluster, name, stated))
    if output_format in DATA_FORMATS:
        print_facts(wait_explanation.build_facts(explained), output_format)
    else:
        is_wide = output_format == "wide"
        print("\n".join(wait_explanation.render_explanation(explained, target, is_wide=is_wide)))
    click.get_current_context().exit(1 if explained.missing else 0)
