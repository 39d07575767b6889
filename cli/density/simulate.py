"""`pomona simulate`: where a further service would go, and each node and host before and after a replica of it."""

from typing import TYPE_CHECKING, Any, get_args

import click
import msgspec

from cli.cluster_access import run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.options import vendors_option
from cli.output import DATA_FORMATS, facts_option, print_facts, print_note, progress_width, render_table
from cli.queue.controller_settings import StatedSettings, controller_options
from crds.meta import Priority
from crds.rate import format_rate
from devices.vendors import Vendors

if TYPE_CHECKING:
    from console.density_answers import SimulateAnswer


@click.command("simulate")
@click.argument("model")
@click.option("--quantization", help="Quantization of GGUF files in place of that of the model, such as Q8_0.")
@click.option("--context-length", type=int, help="Context of each request in tokens. Default: 8192.")
@click.option("--memory", "memory_gb", type=float, help="Memory of a replica in GiB, in place of the estimate.")
@click.option("--replicas", type=click.IntRange(1, 100), default=1, show_default=True, help="Replicas of the service.")
@click.option("--priority", type=click.Choice(get_args(Priority)), help="Priority of the service. Default: normal.")
@click.option("--accelerator", metavar="NAME", help="Accelerator of the service, such as nvidia. Default: any.")
@click.option("--devices", type=click.IntRange(min=1), help="Devices of each replica in pods. Default: 1.")
@facts_option("table")
@vendors_option
@controller_options
@namespaced_cluster_options
def command(
    model: str,
    *,
    quantization: str | None,
    context_length: int | None,
    memory_gb: float | None,
    output_format: str,
    vendors: Vendors,
    stated: StatedSettings,
    target: ClusterOptions,
    **wanted: Any,
) -> None:
    """Show where a further service of MODEL would go, and what would be free before and after a replica of it.

    The first table is the fit on each node and host, of what is free now. The second is what the queue would do with
    the service, by the planner of the controller: where each replica would start and how fast, what would be evicted
    for it by its priority, or why it would wait; then what is left. Nothing is changed.

    The queue is simulated with your own rights to read the whole cluster, as by `pomona plan`. Without them, the first
    table is shown alone.

    Exit code: 0 it fits or would start somewhere; 1 nowhere, or the cluster cannot be read; 2 a value is impossible.

    \b
    Examples:
      pomona simulate qwen3-8b
      pomona simulate qwen3-8b --replicas 3 --priority high --accelerator nvidia
      pomona simulate qwen3-8b --quantization Q8_0 --context-length 32768
      pomona simulate team/chat-model --memory 12 -o json
    """
    from cli.density.queue_simulation import WantedService, build_queue_facts, print_queue, simulate_service  # noqa: PLC0415 - not needed for --help
    from console.density_answers import SimulateRequest  # noqa: PLC0415 - same
    from console.density_simulation import ModelNotFound, SimulationRefused, check_request  # noqa: PLC0415 - same

    # 1. Simulate the service. `wanted` has its options, which are named like the fields of WantedService.
    asked = SimulateRequest(model=model, quantization=quantization, context=context_length, memory_gb=memory_gb)
    try:
        request = check_request(asked)
        answer, queue = run_in_cluster(
            target, lambda cluster: simulate_service(cluster, vendors, request, WantedService(**wanted), stated)
        )
    except ModelNotFound as error:
        raise click.ClickException(str(error)) from error
    except SimulationRefused as error:
        raise click.UsageError(str(error)) from error

    # 2. Print where it fits, and what the queue would do.
    if output_format in DATA_FORMATS:
        facts = {**msgspec.to_builtins(answer), "queue": build_queue_facts(queue)}
        print_facts(facts, output_format)
    else:
        _print_places(model, answer)
        print_queue(queue)
    click.get_current_context().exit(0 if answer.can_fit_anywhere or queue.has_starts else 1)


def _print_places(model: str, answer: "SimulateAnswer") -> None:
    """Print the fit on each node and host as a table, and on standard error those that are left out.

    Each row has what is free there before and after a replica: the free devices, and the memory of the emptiest one.
    """
    # node.after is None if the model does not fit there.
    rows = [
        (
            node.node_name,
            node.fit_level,
            "" if node.estimated_tps is None else format_rate(node.estimated_tps),
            f"{node.context}",
            f"{node.required_memory_gb:g} GiB",
            f"{node.before.free_devices} x {node.before.free_gb:g} GiB",
            "" if node.after is None else f"{node.after.free_devices} x {node.after.free_gb:g} GiB",
            node.shortfall,
        )
        for node in answer.ranked_nodes
    ]
    titles = ("NODE", "FIT", "TOKENS/S", "CONTEXT", "NEEDS", "FREE BEFORE", "FREE AFTER", "WHY")
    print(render_table(titles, rows, progress_width(), {0, 1}) if rows else f"{model} fits nowhere")
    for excluded in answer.excluded_nodes:
        print_note(f"{excluded.node_name}: not considered: {excluded.reason}")
