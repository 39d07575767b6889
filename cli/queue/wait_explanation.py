"""The reasons why a service waits, for each node and host, as `pomona queue explain` shows them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from cli.api_objects import Obj
from cli.cluster_access import Cluster, read_object
from cli.cluster_errors import describe_api_error
from cli.cluster_options import ClusterOptions
from cli.lazy import program_name
from cli.output import progress_width, render_table, terminal_width, wrap_text
from cli.queue.controller_settings import StatedSettings
from cli.queue.planning import copy_cluster
from controller.placement.cluster_copy import RightsMissing
from controller.placement.remedies import WaitExplanation, explain_unit
from controller.placement.units import Unit
from kube.resources import INFERENCE_SERVICES, object_key

_TITLES: Final = ("CELL", "REASON", "WHY NOT", "WHAT WOULD HELP")


class ExplainedService(NamedTuple):
    """A service, and why it waits."""

    service: Obj
    unit: Unit | None = None
    """The first replica that waits; None: none waits, or the user may not read that."""
    explanation: WaitExplanation = WaitExplanation()
    """The reason why that one waits."""
    missing: Sequence[str] = ()
    """The rights that the user lacks."""


async def explain_service(cluster: Cluster, name: str, stated: StatedSettings) -> ExplainedService:
    """Return a service, and why the first of its replicas that wait does so.

    The result has no replica if none waits, and only the missing rights if the user may not read the whole cluster.

    Raises:
        click.ClickException: the service does not exist.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    service = await read_object(cluster.client, INFERENCE_SERVICES, name, cluster.namespace)
    # copied: a copy of the cluster, by which the queue is decided as the controller decides it
    try:
        copied = await copy_cluster(cluster, stated)
    except RightsMissing as missing:
        server = cluster.credentials.server
        reasons = [describe_api_error(refusal, server) for refusal in missing.refusals]
        return ExplainedService(service, missing=reasons)

    now, key = datetime.now(UTC), object_key(service)
    units = copied.list_units(now)
    # A unit is a replica in the queue; `order` is the key by which the queue sorts units.
    waiting = (unit for unit in units if unit.service == key and unit.state == "waiting")
    first = min(waiting, key=lambda unit: unit.order, default=None)
    if first is None:
        return ExplainedService(service)

    explanation = explain_unit(first, copied.list_cells(), units, copied.rules, now.timestamp())
    return ExplainedService(service, first, explanation)


def render_explanation(explained: ExplainedService, target: ClusterOptions, *, is_wide: bool = False) -> list[str]:
    """Return the lines that explain to people why a service waits.

    1. If no replica of it waits, its phase; if the user may not read what decides that, what the controller wrote, and
       which rights are missing; if the next round of the queue admits it, where.
    2. Else its place in the queue, and the replicas that the next round evicts for it.
    3. Then a table of nodes and hosts, with the reason why it does not run on each, and the remedy.

    Args:
        explained: the service and the first replica of it that waits, with the explanation.
        target: the cluster that the user means, for the commands that are proposed.
        is_wide: the table also has each reason in one word, and no cell is cut.
    """
    service, unit, explanation, missing = explained
    name, width = service["metadata"]["name"], terminal_width()
    queue = service.get("status", {}).get("queue")

    # 1. No replica waits, or it is not known whether one does, or one waits only until the next round.
    # `missing` names the rights that the user lacks. Kueue, another queue, may have the replicas instead of ours.
    if unit is None:
        if not missing and not is_in_kueue(queue):
            phase, see = service.get("status", {}).get("phase", "Pending"), f"status {name}{target.render()}"
            return [f"{name} does not wait in the queue: its phase is {phase}; see `{program_name()} {see}`"]
        lines = wrap_text(describe_queue(name, queue), width)
        return [*lines, *(line for right in missing for line in wrap_text(f"not shown: {right}", width))]
    if explanation.admitted:
        return [f"{name} waits no longer: the next round gives {unit.key} {', '.join(explanation.admitted)}"]

    # 2. Its place in the queue, and what the next round does for it.
    head = wrap_text(describe_queue(name, queue), width)
    if choice := service.get("status", {}).get("choice", {}).get("message"):
        head += wrap_text(f"chosen among several accelerators: {choice}", width)
    if explanation.victims:
        ending = ", ".join(sorted({str(victim.service) for victim in explanation.victims}))
        head += wrap_text(f"the next round evicts replicas of {ending} for it", width)

    # 3. Why it is on none of the nodes and hosts, and what would help best.
    if not explanation.cells:
        return [*head, "there is no node with an accelerator and no host: add one"]
    rows = [(cell.cell, str(cell.refusal), cell.message, cell.remedy) for cell in explanation.cells]
    if is_wide:
        table = render_table(_TITLES, rows, None, {0})
    else:
        table = render_table((_TITLES[0], *_TITLES[2:]), [(row[0], *row[2:]) for row in rows], progress_width(), {0})
    if best := explanation.best:
        head += wrap_text(f"best remedy, for {best.cell}: {best.remedy} ({best.message})", width)
    return [*head, "", table]


def describe_queue(name: str, queue: Obj | None) -> str:
    """Return the place of a service in the queue, in words, by its status.queue, which the controller writes."""
    if not queue:
        return f"{name} has no place in status.queue: the controller has not seen that it waits"
    place = f"{queue['place']} in pool {queue.get('pool', '')}" if queue.get("place") else "without a place"
    reason = f" ({queue['reason']})" if queue.get("reason") else ""
    return f"{name} waits, {place}{reason}: {queue.get('message', '')}"


def is_in_kueue(queue: Obj | None) -> bool:
    """Return whether a service waits for Kueue, which knows no cells."""
    return queue is not None and str(queue.get("pool", "")).startswith("kueue/")


def build_facts(explained: ExplainedService) -> Obj:
    """Return the answer for programs: every key is there, and what does not apply is empty or null."""
    service, unit, explanation, missing = explained
    best = explanation.best  # the cell, a node or host, whose remedy is the nearest; None: there is none
    return {
        "namespace": service["metadata"]["namespace"],
        "service": service["metadata"]["name"],
        "queue": service.get("status", {}).get("queue"),
        "choice": service.get("status", {}).get("choice"),
        "unit": {"kind": unit.key.kind, "name": unit.key.name} if unit is not None else None,
        "admittedTo": list(explanation.admitted),
        "evicts": sorted({str(victim.service) for victim in explanation.victims}),
        "bestRemedy": {"cell": best.cell, "remedy": best.remedy} if best is not None else None,
        "cells": [
            {
                "cell": cell.cell,
                "reason": cell.refusal.reason,
                "resource": cell.refusal.resource,
                "message": cell.message,
                "remedy": cell.remedy,
            }
            for cell in explanation.cells
        ],
        "notShown": list(missing),
    }
