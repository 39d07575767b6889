"""`pomona plan`: what the queue would do if manifests were applied, a machine were drained, or one were added."""

from pathlib import Path

import click

from artifacts.repositories.address_policy import Networks
from cli.cluster_access import run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.lazy import LazyGroup
from cli.options import allow_private_sources, manifests_option
from cli.output import facts_option
from cli.queue.command import refuse_options_before
from cli.queue.controller_settings import StatedSettings, controller_options

SUBCOMMANDS = {
    "drain": ("show where the replicas of a host or node would go", "cli.queue.plan_machine:drain"),
    "add": ("show which replicas a further node or host would start", "cli.queue.plan_machine:add"),
}


@click.group("plan", cls=LazyGroup, subcommands=SUBCOMMANDS, invoke_without_command=True)
@manifests_option
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
    allowed_networks: Networks,
    output_format: str,
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
    # `plan drain` and `plan add` have options of their own.
    if ctx.invoked_subcommand is not None:
        refuse_options_before(ctx)
        return
    if not paths:
        raise click.UsageError("nothing to plan: give --file, or the command `drain` or `add`")

    from cli.queue.plan_output import describe_services, print_plan  # noqa: PLC0415 - not needed for --help
    from cli.queue.planning import plan_files  # noqa: PLC0415 - same
    from cli.service.manifests import load_files  # noqa: PLC0415 - same

    manifests = load_files(paths, target.namespace)
    plan = run_in_cluster(target, lambda cluster: plan_files(cluster, manifests, stated, allowed_networks))
    services = describe_services(plan.services)
    print_plan(plan, output_format, {"services": services}, empty="no replica would start, move or end")
    ctx.exit(1 if any(service.problem is not None for service in plan.services) else 0)
