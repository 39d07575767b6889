"""The copy of the cluster by which `pomona queue explain` and `pomona plan` answer."""

import sys
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import click

from cli.api_objects import Obj
from cli.queue.controller_settings import StatedSettings, read_settings

if TYPE_CHECKING:
    from cli.cluster_access import Cluster
    from cli.queue.fate_table import PlannedChange
    from controller.placement.cluster_copy import ClusterCopy, QueueReading, QueueSettings
    from controller.placement.forecast import QueueForecast
    from controller.services.planned_models import ModelHeaders
    from controller.services.planned_services import PlannedService
    from kube.client import Client


class ManifestPlan(NamedTuple):
    """The effect of manifests on the queue."""

    services: "list[PlannedService]"
    changes: "list[PlannedChange]"
    before: "QueueForecast"
    after: "QueueForecast"


async def read_queue(cluster: "Cluster", settings: "QueueSettings") -> "QueueReading":
    """Read all by which the queue is decided, as far as the user may. Raises ApiError, Unreachable."""
    from controller.placement.cluster_copy import QueueReading, open_queue_view  # noqa: PLC0415 - not needed for --help

    view = open_queue_view(settings.pods.vendors)
    return QueueReading(view, await view.read_once(cluster.client), settings)


async def copy_cluster(cluster: "Cluster", stated: StatedSettings) -> "ClusterCopy":
    """Return a copy of the cluster with the options of its controller.

    Raises:
        RightsMissing: the user may not read the whole cluster.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    from controller.placement.cluster_copy import copy_reading  # noqa: PLC0415 - not needed for --help

    settings, note = await read_settings(cluster, stated)
    copied = await copy_reading(cluster.client, await read_queue(cluster, settings))
    if note:
        print(note, file=sys.stderr)
    return copied


async def copy_for_plan(cluster: "Cluster", copying: "Awaitable[ClusterCopy]") -> "ClusterCopy":
    """Return a copy of the cluster, without which there is no plan.

    Raises:
        click.ClickException: the user may not read the whole cluster; the message names the rights.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    from cli.cluster_errors import describe_api_error  # noqa: PLC0415 - not needed for --help
    from controller.placement.cluster_copy import RightsMissing  # noqa: PLC0415 - same

    try:
        copied = await copying
    except RightsMissing as missing:
        reasons = [describe_api_error(refused, cluster.credentials.server) for refused in missing.refusals]
        raise click.ClickException("a plan needs the whole cluster: " + "\n".join(reasons)) from missing
    report_unread_speeds(cluster, copied)
    return copied


async def plan_manifests(
    client: "Client", copied: "ClusterCopy", manifests: Sequence[Obj], headers: "ModelHeaders"
) -> ManifestPlan:
    """Return what would become of the services of manifests, and of all other units.

    Args:
        client: the API server, for volumes of new pods.
        copied: the cluster, which is changed.
        manifests: the manifests, each with its namespace.
        headers: what the headers of Models say that the cluster has not inspected.

    Raises:
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    from cli.queue.fate_table import list_changes  # noqa: PLC0415 - not needed for --help
    from controller.placement.forecast import forecast  # noqa: PLC0415 - same
    from controller.services.planned_services import plan_services  # noqa: PLC0415 - same

    now = read_clock()
    units = copied.list_units(now)
    before = forecast(copied.list_cells(), units, copied.rules, now.timestamp())
    services = plan_services(copied, manifests, now, headers)
    await copied.read_volumes(client)
    changed = copied.list_units(now)
    after = forecast(copied.list_cells(), changed, copied.rules, now.timestamp())
    uids, keys = {unit.uid for unit in units}, {service.key for service in services}
    concerned = [unit.uid for unit in changed if unit.service in keys and unit.uid not in uids]
    return ManifestPlan(services, list_changes(before, after, concerned, copied.list_speeds), before, after)


def report_unread_speeds(cluster: "Cluster", copied: "ClusterCopy") -> None:
    """Say on standard error which facts about speeds the user may not read."""
    from cli.cluster_errors import describe_api_error  # noqa: PLC0415 - not needed for --help

    for speed in copied.unread_speeds:
        reason = describe_api_error(speed, cluster.credentials.server)
        print(f"speeds are known in part, since you may not read all that they follow from: {reason}", file=sys.stderr)


def read_clock() -> datetime:
    """Return the wall clock."""
    return datetime.now(UTC)
