"""`pomona queue explain`: for each node and host, why a service waits, and what would help."""

from typing import TYPE_CHECKING, Final

import click

from cli.api_objects import Obj
from cli.cluster_access import Cluster, read_object, run_in_cluster
from cli.cluster_errors import describe_api_error
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_services
from cli.lazy import program_name
from cli.output import DATA_FORMATS, facts_option, print_facts, progress_width, render_table, terminal_width, wrap_text
from cli.queue.controller_settings import StatedSettings, controller_options
from kube.resources import INFERENCE_SERVICES, object_key

if TYPE_CHECKING:
    from controller.placement.remedies import WaitExplanation
    from controller.placement.units import Unit

_TITLES: Final = ("CELL", "REASON", "WHY NOT", "WHAT WOULD HELP")


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
    service, unit, explanation, missing = run_in_cluster(target, lambda cluster: explain_service(cluster, name, stated))
    if output_format in DATA_FORMATS:
        print_facts(build_facts(service, unit, explanation, missing), output_format)
    else:
        is_wide = output_format == "wide"
        print("\n".join(render_explanation(service, unit, explanation, missing, target, is_wide=is_wide)))
    click.get_current_context().exit(1 if missing else 0)


async def explain_service(
    cluster: Cluster, name: str, stated: StatedSettings
) -> "tuple[Obj, Unit | None, WaitExplanation | None, list[str]]":
    """Return a service, its first unit that waits, why that waits, and the rights that the user lacks.

    Raises:
        click.ClickException: the service does not exist.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    from cli.queue.planning import copy_cluster, read_clock  # noqa: PLC0415 - same
    from controller.placement.cluster_copy import RightsMissing  # noqa: PLC0415 - same
    from controller.placement.remedies import explain_unit  # noqa: PLC0415 - same

    service = await read_object(cluster.client, INFERENCE_SERVICES, name, cluster.namespace)
    try:
        copied = await copy_cluster(cluster, stated)
    except RightsMissing as missing:
        server = cluster.credentials.server
        return service, None, None, [describe_api_error(refusal, server) for refusal in missing.refusals]
    now, key = read_clock(), object_key(service)
    units = copied.list_units(now)
    waiting = [unit for unit in units if unit.service == key and unit.state == "waiting"]
    if not waiting:
        return service, None, None, []
    first = min(waiting, key=lambda unit: unit.order)
    return service, first, explain_unit(first, copied.list_cells(), units, copied.rules, now.timestamp()), []


def render_explanation(
    service: Obj,
    unit: "Unit | None",
    explanation: "WaitExplanation | None",
    missing: list[str],
    target: ClusterOptions,
    *,
    is_wide: bool = False,
) -> list[str]:
    """Return the answer for people; a wide table has the reason in one word, and cuts nothing."""
    name, width = service["metadata"]["name"], terminal_width()
    queue = service.get("status", {}).get("queue")
    if unit is None or explanation is None:
        if not missing and not is_in_kueue(queue):
            phase, see = service.get("status", {}).get("phase", "Pending"), f"status {name}{target.render()}"
            return [f"{name} does not wait in the queue: its phase is {phase}; see `{program_name()} {see}`"]
        lines = wrap_text(describe_queue(name, queue), width)
        return [*lines, *(line for right in missing for line in wrap_text(f"not shown: {right}", width))]
    if explanation.admitted:
        return [f"{name} waits no longer: the next round gives {unit.key} {', '.join(explanation.admitted)}"]
    head = wrap_text(describe_queue(name, queue), width)
    if choice := service.get("status", {}).get("choice", {}).get("message"):
        head += wrap_text(f"chosen among several accelerators: {choice}", width)
    if explanation.victims:
        ending = ", ".join(sorted({str(victim.service) for victim in explanation.victims}))
        head += wrap_text(f"the next round evicts replicas of {ending} for it", width)
    if not explanation.cells:
        return [*head, "there is no node with an accelerator and no host: add one"]
    rows = [(cell.cell, str(cell.refusal), cell.message, cell.remedy) for cell in explanation.cells]
    if is_wide:
        table = render_table(_TITLES, rows, None, {0})
    else:
        table = render_table((_TITLES[0], *_TITLES[2:]), [(row[0], *row[2:]) for row in rows], progress_width(), {0})
    best = describe_best(explanation)
    return [*head, *(wrap_text(best, width) if best else ()), "", table]


def describe_queue(name: str, queue: Obj | None) -> str:
    """Return what the controller has written about the place of a service."""
    if not queue:
        return f"{name} has no place in status.queue: the controller has not seen that it waits"
    place = f"{queue['place']} in pool {queue.get('pool', '')}" if queue.get("place") else "without a place"
    reason = f" ({queue['reason']})" if queue.get("reason") else ""
    return f"{name} waits, {place}{reason}: {queue.get('message', '')}"


def is_in_kueue(queue: Obj | None) -> bool:
    """Return whether a service waits for Kueue, which knows no cells."""
    return queue is not None and str(queue.get("pool", "")).startswith("kueue/")


def describe_best(explanation: "WaitExplanation") -> str:
    """Return the best remedy in a sentence; empty if there is none."""
    best = explanation.best
    return f"best remedy, for {best.cell}: {best.remedy} ({best.message})" if best is not None else ""


def build_facts(service: Obj, unit: "Unit | None", explanation: "WaitExplanation | None", missing: list[str]) -> Obj:
    """Return the answer for programs."""
    best = explanation.best if explanation is not None else None
    return {
        "namespace": service["metadata"]["namespace"],
        "service": service["metadata"]["name"],
        "queue": service.get("status", {}).get("queue"),
        "choice": service.get("status", {}).get("choice"),
        "unit": {"kind": unit.key.kind, "name": unit.key.name} if unit is not None else None,
        "admittedTo": list(explanation.admitted) if explanation is not None else [],
        "evicts": sorted({str(victim.service) for victim in explanation.victims}) if explanation is not None else [],
        "bestRemedy": {"cell": best.cell, "remedy": best.remedy} if best is not None else None,
        "cells": [
            {
                "cell": cell.cell,
                "reason": cell.refusal.reason,
                "resource": cell.refusal.resource,
                "message": cell.message,
                "remedy": cell.remedy,
            }
            for cell in (explanation.cells if explanation is not None else ())
        ],
        "notShown": missing,
    }
