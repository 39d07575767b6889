"""The plans of `pomona plan`, `pomona simulate` and `pomona queue explain`, by a copy of the cluster."""

import sys
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime
from typing import Final

import click

from artifacts.repositories.address_policy import Networks
from cli.api_objects import Obj
from cli.cluster_access import Cluster
from cli.cluster_errors import describe_api_error
from cli.queue.controller_settings import StatedSettings, read_settings
from cli.queue.model_headers import read_headers
from cli.queue.plan_output import QueuePlan, explain_services, list_changes
from controller.placement.cluster_copy import (
    ClusterCopy,
    QueueReading,
    QueueSettings,
    RightsMissing,
    copy_reading,
    open_queue_view,
)
from controller.placement.explanation import explain
from controller.placement.forecast import forecast, simulate_drain
from controller.placement.planner import PlanRules, Round, plan
from controller.placement.units import Cell
from controller.services.planned_models import ModelHeaders
from controller.services.planned_services import plan_services
from kube.client import Client
from kube.resources import METAL_HOSTS, NODES

_MOST_EXPLAINED: Final = 3
"""Most services of which a plan says why they would not start."""


async def read_queue(cluster: Cluster, settings: QueueSettings) -> QueueReading:
    """Read all by which the queue is decided, as far as the user may. Raises ApiError, Unreachable."""
    view = open_queue_view(settings.pods.vendors)
    return QueueReading(view, await view.read_once(cluster.client), settings)


async def copy_cluster(cluster: Cluster, stated: StatedSettings) -> ClusterCopy:
    """Return a copy of the cluster with the options of its controller.

    Raises:
        RightsMissing: the user may not read the whole cluster.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    settings, note = await read_settings(cluster, stated)
    copied = await copy_reading(cluster.client, await read_queue(cluster, settings))
    if note:
        print(note, file=sys.stderr)
    return copied


async def copy_for_plan(cluster: Cluster, copying: Awaitable[ClusterCopy]) -> ClusterCopy:
    """Return a copy of the cluster for a plan, and turn missing rights into messages for the user.

    Without a part of the cluster there is no plan. Speeds that may not be read are only named on standard error.

    Args:
        cluster: the cluster.
        copying: makes the copy, such as `copy_cluster`.

    Raises:
        click.ClickException: the user may not read the whole cluster; the message names the rights.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    server = cluster.credentials.server
    try:
        copied = await copying
    except RightsMissing as missing:
        reasons = [describe_api_error(refused, server) for refused in missing.refusals]
        raise click.ClickException("a plan needs the whole cluster: " + "\n".join(reasons)) from missing

    for refused in copied.unread_speeds:
        reason = describe_api_error(refused, server)
        print(f"speeds are known in part, since you may not read all that they follow from: {reason}", file=sys.stderr)
    return copied


async def plan_files(cluster: Cluster, manifests: list[Obj], stated: StatedSettings, networks: Networks) -> QueuePlan:
    """Return the effect of manifests on the queue.

    Args:
        cluster: the cluster.
        manifests: the manifests.
        stated: options of the controller.
        networks: private networks that the sources of new Models may lead to.

    Raises:
        click.ClickException: the user may not read the whole cluster.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    copied = await copy_for_plan(cluster, copy_cluster(cluster, stated))
    # placed: the manifests, each with its own namespace or that of the command
    placed = [{**obj, "metadata": {"namespace": cluster.namespace, **obj["metadata"]}} for obj in manifests]

    # The headers of new Models, from their sources; a plan is made even if some cannot be read.
    headers, problems = await read_headers(copied, placed, networks)
    for line in problems:
        click.echo(line, err=True)
    return await plan_manifests(cluster.client, copied, placed, headers)


async def plan_manifests(client: Client, copied: ClusterCopy, manifests: list[Obj], headers: ModelHeaders) -> QueuePlan:
    """Return what would become of the services of manifests, and of all other units, the replicas in the queue.

    1. Forecast the queue without the manifests.
    2. Put their services and replicas into the copy of the cluster, and forecast the queue again.
    3. Compare the forecasts; the new replicas are shown in any case.

    Args:
        client: the API server, for volumes of new pods.
        copied: the cluster, which is changed.
        manifests: the manifests, each with its namespace.
        headers: what the headers of Models say that the cluster has not inspected.

    Raises:
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    # 1. Forecast without the manifests.
    now = datetime.now(UTC)
    units_before = copied.list_units(now)
    before = forecast(copied.list_cells(), units_before, copied.rules, now.timestamp())

    # 2. Change the copy, and forecast with them; a volume of a new pod may bind it to nodes.
    services = plan_services(copied, manifests, now, headers)
    await copied.read_volumes(client)
    units_after = copied.list_units(now)
    after = forecast(copied.list_cells(), units_after, copied.rules, now.timestamp())

    # 3. Compare.
    known_uids, planned_keys = {unit.uid for unit in units_before}, {service.key for service in services}
    new_uids = [unit.uid for unit in units_after if unit.service in planned_keys and unit.uid not in known_uids]
    changes = list_changes(before, after, new_uids, copied.list_speeds)
    return QueuePlan(changes=changes, after=after, notes=explain_services(services), services=services)


def plan_addition(copied: ClusterCopy, added: Obj) -> QueuePlan:
    """Return what would change if a Node or MetalHost were added; if nothing would, why services do not start there.

    A machine with an accelerator is one more cell, a place where the queue can start replicas.

    Args:
        copied: the cluster, to which the machine is added, under another name if its own is taken.
        added: the machine.

    Raises:
        click.ClickException: it has no accelerator.
    """
    now = datetime.now(UTC)
    units, cells = copied.list_units(now), copied.list_cells()
    before = forecast(cells, units, copied.rules, now.timestamp())

    # 1. Add the machine.
    resource, metadata = NODES if added["kind"] == "Node" else METAL_HOSTS, added["metadata"]
    while copied.store.get(resource, metadata["name"]) is not None:
        metadata["name"] += "-new"
    copied.store.put(resource, added)
    cells_with_added = copied.list_cells()
    if len(cells_with_added) == len(cells):  # a node without accelerator is no cell
        raise click.ClickException("the node has no device of a known accelerator: state its allocatable resources")

    # 2. Compare the forecasts without it and with it.
    units = copied.list_units(now)
    after = forecast(cells_with_added, units, copied.rules, now.timestamp())
    changes = list_changes(before, after, always_shown=(), list_speeds=copied.list_speeds)
    if changes:
        return QueuePlan(changes, after)

    # 3. Explain why it starts nothing.
    # The one cell that was not there before is the machine.
    cell_ids = {cell.id for cell in cells}
    (added_cell,) = (cell for cell in cells_with_added if cell.id not in cell_ids)
    planned_round = plan(cells_with_added, units, copied.rules, now.timestamp())
    return QueuePlan(changes, after, notes=list_refusals(added_cell, planned_round, copied.rules))


def list_refusals(cell: Cell, planned_round: Round, rules: PlanRules) -> list[str]:
    """Return a line for each of the first services in the queue: why they do not start on a cell, and what would help.

    Args:
        cell: the cell.
        planned_round: one round of the queue's decisions, with the units that still wait after it, in their order.
        rules: the administrator's rules of the queue.
    """
    # The first waiting unit of each service: of several units under one key, the dict keeps the last, so they are set
    # in reverse. `order` is the key of the queue's order.
    first_units = {unit.service: unit for unit in reversed(planned_round.queue)}
    shown = sorted(first_units.values(), key=lambda unit: unit.order)[:_MOST_EXPLAINED]
    # `explain` returns one explanation for each cell: here for the only one.
    explanations = [(unit.service, explain(unit, [cell], planned_round, rules)[0]) for unit in shown]
    return [f"{service}: {explanation.message}: {explanation.remedy}" for service, explanation in explanations]


async def plan_drain(cluster: Cluster, name: str, stated: StatedSettings) -> tuple[str, QueuePlan]:
    """Return the `Cell.id` of a host or node, and what would become of its replicas if it were drained.

    Its running replicas are shown in any case, and others if their fate changes.

    Raises:
        click.ClickException: there is no such cell, or the user may not read the whole cluster.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    # A cell is a host or node; a unit is a replica in the queue.
    copied = await copy_for_plan(cluster, copy_cluster(cluster, stated))
    now, cells = datetime.now(UTC), copied.list_cells()
    drained_id = find_cell(name, cells)
    units = copied.list_units(now)

    # Compare the forecasts without and with the drain.
    before = forecast(cells, units, copied.rules, now.timestamp())
    # simulate_drain returns the cells and units after the drain.
    after = forecast(*simulate_drain(cells, units, drained_id), copied.rules, now.timestamp())
    running_uids = [unit.uid for unit in units if drained_id in unit.cells and unit.state == "running"]
    return drained_id, QueuePlan(list_changes(before, after, running_uids, copied.list_speeds), after)


def find_cell(name: str, cells: Sequence[Cell]) -> str:
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
