"""The copy of the cluster by which `pomona queue explain` and `pomona plan` answer."""

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from cli.queue.controller_settings import StatedSettings, read_settings

if TYPE_CHECKING:
    from cli.cluster_access import Cluster
    from controller.placement.cluster_copy import ClusterCopy


async def copy_cluster(cluster: "Cluster", stated: StatedSettings) -> "ClusterCopy":
    """Return a copy of the cluster with the options of its controller.

    Raises:
        RightsMissing: the user may not read the whole cluster.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    from controller.placement.cluster_copy import read_cluster  # noqa: PLC0415 - not needed for --help

    settings, note = await read_settings(cluster, stated)
    copied = await read_cluster(cluster.client, settings)
    if note:
        print(note, file=sys.stderr)
    return copied


async def copy_for_plan(cluster: "Cluster", stated: StatedSettings) -> "ClusterCopy":
    """Return a copy of the cluster, without which there is no plan.

    Raises:
        click.ClickException: the user may not read the whole cluster; the message names the rights.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    from cli.cluster_errors import describe_api_error  # noqa: PLC0415 - not needed for --help
    from controller.placement.cluster_copy import RightsMissing  # noqa: PLC0415 - same

    try:
        return await copy_cluster(cluster, stated)
    except RightsMissing as missing:
        reasons = [describe_api_error(each, cluster.credentials.server) for each in missing.refusals]
        raise click.ClickException("a plan needs the whole cluster: " + "\n".join(reasons)) from missing


def read_clock() -> datetime:
    """Return the wall clock."""
    return datetime.now(UTC)
