"""`pomona plan drain`: where the replicas of a host or node would go."""

from typing import TYPE_CHECKING

import click

from cli.cluster_options import ClusterOptions, cluster_options
from cli.completion import complete_cells
from cli.output import TableFormat, facts_option
from cli.queue.controller_settings import StatedSettings, controller_options
from cli.queue.plan import print_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cli.cluster_access import Cluster
    from cli.queue.fate_table import PlannedChange
    from controller.placement.forecast import QueueForecast
    from controller.placement.units import Cell


@click.command("drain")
@click.argument("name", metavar="HOST|NODE", shell_complete=complete_cells)
@facts_option("table", "wide")
@controller_options
@cluster_options
def command(name: str, *, target: ClusterOptions, stated: StatedSettings, output_format: TableFormat) -> None:
    """Show where the replicas of a host or node would go if it were drained, and which would wait.

    Write host/NAME or node/NAME if both have the name. Nothing is drained: `pomona host drain` and `kubectl drain` do
    that. A process on a host that fits nowhere else would serve on.

    \b
    Examples:
      pomona plan drain studio-1
      pomona plan drain node/gpu-3 -o json
    """
    from cli.cluster_access import run_in_cluster  # noqa: PLC0415 - not needed for --help

    async def read(cluster: "Cluster") -> "tuple[str, list[PlannedChange], QueueForecast]":
        return await plan_drain(cluster, name, stated)

    cell, changes, after = run_in_cluster(target, read)
    print_plan(changes, after, output_format, {"drained": cell}, empty=f"no replica is on {cell}")


async def plan_drain(
    cluster: "Cluster", name: str, stated: StatedSettings
) -> "tuple[str, list[PlannedChange], QueueForecast]":
    """Return the cell, and what would become of its units.

    Raises:
        click.ClickException: there is no such cell, or the user may not read the whole cluster.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    from cli.queue.fate_table import list_changes  # noqa: PLC0415 - not needed for --help
    from cli.queue.planning import copy_cluster, copy_for_plan, read_clock  # noqa: PLC0415 - same
    from controller.placement.forecast import drain_cell, forecast  # noqa: PLC0415 - same

    copied = await copy_for_plan(cluster, copy_cluster(cluster, stated))
    now, cells = read_clock(), copied.list_cells()
    drained = find_cell(name, cells)
    units = copied.list_units(now)
    before = forecast(cells, units, copied.rules, now.timestamp())
    after = forecast(*drain_cell(cells, units, drained), copied.rules, now.timestamp())
    concerned = [unit.uid for unit in units if drained in unit.cells and unit.state == "running"]
    return drained, list_changes(before, after, concerned, copied.list_speeds), after


def find_cell(name: str, cells: "Sequence[Cell]") -> str:
    """Return the `Cell.id` that a user means.

    Raises:
        click.ClickException: there is none, or a host and a node have this name.
    """
    ids = [cell.id for cell in cells if name in {cell.id, cell.name}]
    if len(ids) == 1:
        return ids[0]
    if ids:
        raise click.ClickException(f"{name} is the name of a host and of a node: write {' or '.join(sorted(ids))}")
    there = ", ".join(sorted(cell.id for cell in cells)[:8]) or "none"
    raise click.ClickException(f"{name} is neither a host nor a node with an accelerator: there is {there}")
