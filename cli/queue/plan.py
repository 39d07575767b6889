"""`pomona plan`: what the queue would do if manifests were applied, a machine were drained, or one were added."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cli.api_objects import Obj
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.lazy import LazyGroup
from cli.options import allow_private_sources
from cli.output import TableFormat, facts_option, print_facts, progress_width, terminal_width, wrap_text
from cli.queue.command import refuse_options_before
from cli.queue.controller_settings import StatedSettings, controller_options

if TYPE_CHECKING:
    from artifacts.repositories.address_policy import Networks
    from cli.cluster_access import Cluster
    from cli.queue.fate_table import PlannedChange
    from controller.placement.forecast import QueueForecast
    from controller.services.planned_services import PlannedService

SUBCOMMANDS = {
    "drain": ("show where the replicas of a host or node would go", "cli.queue.plan_drain"),
    "add": ("show which replicas a further node or host would start", "cli.queue.plan_add"),
}
_STANDARD_INPUT: Final = Path("/dev/stdin")


@click.group("plan", cls=LazyGroup, subcommands=SUBCOMMANDS, invoke_without_command=True)
@click.option(
    "--file",
    "-f",
    "paths",
    multiple=True,
    type=click.Path(exists=True, allow_dash=True, path_type=Path),
    help="Manifest, folder of manifests, or - for standard input. Repeatable.",
)
@allow_private_sources
@facts_option("table", "wide")
@controller_options
@namespaced_cluster_options
@click.pass_context
def command(
    ctx: click.Context,
    *,
    target: ClusterOptions,
    stated: StatedSettings,
    paths: tuple[Path, ...],
    allowed_networks: "Networks",
    output_format: TableFormat,
) -> None:
    """Show what the queue would do if the Models and InferenceServices of FILE were applied now.

    Each new replica starts on a node or host, with its speed there, or waits at a place; replicas that would be evicted
    for it follow, with where they would go. The cluster is read, nothing is changed, and rights to read all of it are
    needed. The plan assumes that evicted replicas end, and that nothing else comes or goes.

    Of a service that exists, fields that the manifest leaves out stay as they are. The header of a new Model is read
    from its source, as by `pomona inspect`, unless its spec.memoryBytes says what it takes.

    Exit code: 0 planned; 1 a service would get no replica, or the cluster cannot be read; 2 the options or files are
    invalid.

    \b
    Examples:
      pomona plan -f service.yaml
      pomona plan -f model.yaml -f service.yaml -o json
      pomona deploy qwen3-8b --dry-run | pomona plan -f -
      pomona plan drain studio-1
      pomona plan add --accelerator nvidia --devices 8 --memory 512Gi
    """
    if ctx.invoked_subcommand is not None:
        refuse_options_before(ctx)
        return
    if not paths:
        raise click.UsageError("nothing to plan: give --file, or the command `drain` or `add`")
    from cli.cluster_access import run_in_cluster  # noqa: PLC0415 - not needed for --help
    from cli.service.manifests import load_files  # noqa: PLC0415 - same

    files = [_STANDARD_INPUT if str(path) == "-" else path for path in paths]
    manifests, skipped = load_files(files, target.namespace)
    for line in skipped:
        click.echo(line, err=True)

    async def read(cluster: "Cluster") -> "tuple[list[PlannedService], list[PlannedChange], QueueForecast]":
        return await plan_files(cluster, manifests, stated, allowed_networks)

    services, changes, after = run_in_cluster(target, read)
    extra: Obj = {"services": [_describe_service(service) for service in services]}
    print_plan(changes, after, output_format, extra, explain_services(services))
    ctx.exit(1 if any(service.problem is not None for service in services) else 0)


async def plan_files(
    cluster: "Cluster", manifests: Sequence[Obj], stated: StatedSettings, networks: "Networks"
) -> "tuple[list[PlannedService], list[PlannedChange], QueueForecast]":
    """Return what would become of the services of manifests, and of all other units.

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
    from cli.queue.model_headers import read_headers  # noqa: PLC0415 - not needed for --help
    from cli.queue.planning import copy_cluster, copy_for_plan, plan_manifests  # noqa: PLC0415 - same

    copied = await copy_for_plan(cluster, copy_cluster(cluster, stated))
    placed = [
        {**manifest, "metadata": {"namespace": cluster.namespace, **manifest["metadata"]}} for manifest in manifests
    ]
    headers, problems = await read_headers(copied, placed, networks)
    for line in problems:
        click.echo(line, err=True)
    made = await plan_manifests(cluster.client, copied, placed, headers)
    return made.services, made.changes, made.after


def print_plan(
    changes: "Sequence[PlannedChange]",
    after: "QueueForecast",
    output_format: TableFormat,
    extra: Obj,
    notes: Sequence[str] = (),
    *,
    empty: str = "no replica would start, move or end",
) -> None:
    """Print a plan.

    Args:
        changes: its rows.
        after: the forecast of which they are.
        output_format: the format.
        extra: further facts, for programs.
        notes: further lines, for people.
        empty: the line for no rows.
    """
    from cli.queue.fate_table import INCOMPLETE, build_changes, render_changes  # noqa: PLC0415 - not for --help

    if output_format in {"json", "yaml"}:
        facts = {**extra, "replicas": build_changes(changes), "isComplete": after.is_complete}
        print_facts(facts, "json" if output_format == "json" else "yaml")
        return
    width = terminal_width()
    print(render_changes(changes, None if output_format == "wide" else progress_width()) if changes else empty)
    for line in (*notes, *(() if after.is_complete else (INCOMPLETE,))):
        print("\n".join(wrap_text(line, width)))


def _describe_service(service: "PlannedService") -> Obj:
    problem = service.problem
    return {
        "namespace": service.key.namespace,
        "name": service.key.name,
        "problem": {"reason": problem.reason, "message": problem.message} if problem is not None else None,
        "notes": list(service.notes),
    }


def explain_services(services: "Sequence[PlannedService]") -> list[str]:
    """Return a line for each problem and each note of services."""
    lines = list[str]()
    for service in services:
        if service.problem is not None:
            lines.append(f"{service.key} gets no replica ({service.problem.reason}): {service.problem.message}")
        lines += [f"{service.key}: {note}" for note in service.notes]
    return lines
