"""`pomona plan drain`: where the replicas of a host or node would go."""

import click

from cli.cluster_access import run_in_cluster
from cli.cluster_options import ClusterOptions, cluster_options
from cli.completion import complete_cells
from cli.output import facts_option
from cli.queue.controller_settings import StatedSettings, controller_options


@click.command("drain")
@click.argument("name", metavar="HOST|NODE", shell_complete=complete_cells)
@facts_option("table", "wide")
@controller_options
@cluster_options
def command(name: str, *, target: ClusterOptions, stated: StatedSettings, output_format: str) -> None:
    """Show where the replicas of a host or node would go if it were drained, and which would wait.

    Write host/NAME or node/NAME if both have the name. Nothing is drained: `pomona host drain` and `kubectl drain` do
    that. A process on a host that fits nowhere else would serve on.

    \b
    Examples:
      pomona plan drain studio-1
      pomona plan drain node/gpu-3 -o json
    """
    from cli.queue.plan_output import print_plan  # noqa: PLC0415 - not needed for --help
    from cli.queue.planning import plan_drain  # noqa: PLC0415 - same

    # cell: the name with the kind, such as host/studio-1
    cell, plan = run_in_cluster(target, lambda cluster: plan_drain(cluster, name, stated))
    print_plan(plan, output_format, {"drained": cell}, empty=f"no replica is on {cell}")
