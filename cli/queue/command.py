"""`pomona queue`: the services that wait for accelerators or hosts, by pool and in their order."""

from datetime import UTC, datetime

import click
from click.core import ParameterSource

from cli.api_objects import Obj
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.lazy import LazyGroup
from cli.output import TableColumn, age_text, duration_text, output_option, print_objects
from cli.service.list import NAMESPACE, list_services

SUBCOMMANDS = {"explain": ("show for each node and host why a service waits, and what would help", "cli.queue.explain")}


@click.group("queue", cls=LazyGroup, subcommands=SUBCOMMANDS, invoke_without_command=True)
@click.option("--all-namespaces", "-A", "is_everywhere", is_flag=True, help="List the services of all namespaces.")
@output_option
@namespaced_cluster_options
@click.pass_context
def command(ctx: click.Context, *, target: ClusterOptions, is_everywhere: bool, output_format: str) -> None:
    """List the services that wait for accelerators or hosts: by pool, in the order in which they get their turn.

    A place such as 3/12 counts the replicas of all namespaces that wait in the pool. The list is that of status.queue,
    which the controller writes; -o json prints these services as objects of the API.

    \b
    Examples:
      pomona queue
      pomona queue -A -o wide
      pomona queue explain chat
    """
    if ctx.invoked_subcommand is not None:
        refuse_options_before(ctx)
        return

    # place: the namespace or namespaces, in words
    services, place = list_services(target, is_everywhere=is_everywhere)
    empty = f"no service of {place} waits for an accelerator or a host"
    columns = [NAMESPACE, *COLUMNS] if is_everywhere else COLUMNS
    print_objects(sort_waiting(services), columns, output_format, empty=empty)


def refuse_options_before(ctx: click.Context) -> None:
    """Refuse options that were given before the sub-command, where they would do nothing.

    Raises:
        click.UsageError: there are such options.
    """
    given = [
        parameter.opts[0]
        for parameter in ctx.command.params
        if parameter.name and ctx.get_parameter_source(parameter.name) == ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)}: give the options after `{ctx.invoked_subcommand}`", ctx)


def sort_waiting(services: list[Obj]) -> list[Obj]:
    """Return the services that wait, by pool and place; those that can never run come last in their pool."""
    waiting = [service for service in services if service.get("status", {}).get("queue")]
    return sorted(waiting, key=_sort_key)


def _sort_key(service: Obj) -> tuple[str, bool, int, str, str]:
    """Return the key by which waiting services are sorted: pool, place, namespace and name; no place sorts last."""
    queue, metadata = service["status"]["queue"], service["metadata"]
    # False sorts before True, so that services with a place come first.
    position = queue.get("position")
    has_no_place = position is None
    return queue.get("pool", ""), has_no_place, position or 0, metadata["namespace"], metadata["name"]


def queue_text(service: Obj, field: str) -> str:
    """Return a field of `status.queue` as text; empty if it is absent."""
    return str(service["status"]["queue"].get(field, ""))


def describe_start(queue: Obj, now: datetime) -> str:
    """Return the range of the estimated start, such as `in 5m to 15m`, or why there is none."""
    estimate = queue.get("estimatedStart") or {}
    # Without an end of the range there is no estimate, and `noEstimate` says why.
    if not estimate.get("latest"):
        return str(queue.get("noEstimate") or "")

    def render_wait(end: str) -> str:
        """Return the time until one end of the range; 0s if it is over or not stated."""
        if not estimate.get(end):
            return duration_text(0.0)
        return duration_text((datetime.fromisoformat(estimate[end]) - now).total_seconds())

    return f"in {render_wait('earliest')} to {render_wait('latest')}"


COLUMNS = [
    TableColumn("POOL", lambda it: queue_text(it, "pool")),
    TableColumn("PLACE", lambda it: queue_text(it, "place") or "none"),
    TableColumn("SERVICE", lambda it: str(it["metadata"]["name"]), is_name=True),
    TableColumn("PRIORITY", lambda it: str(it["spec"].get("priority", "normal"))),
    TableColumn("SINCE", lambda it: age_text(it["status"]["queue"].get("enqueuedAt"))),
    TableColumn("ESTIMATED START", lambda it: describe_start(it["status"]["queue"], datetime.now(UTC))),
    TableColumn("REASON", lambda it: queue_text(it, "reason")),
    TableColumn("WAITS FOR", lambda it: queue_text(it, "waitingFor"), is_wide=True),
    TableColumn("MESSAGE", lambda it: queue_text(it, "message"), is_wide=True),
]
"""The columns of one namespace."""
