"""`pomona simulate`: each node and host before and after a further model."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.cluster_options import ClusterOptions, cluster_options
from cli.output import TableFormat, facts_option, print_facts, render_table, terminal_width
from cli.vendor_option import read_vendors

if TYPE_CHECKING:
    from console.density_answers import SimulateAnswer
    from devices.vendors import Vendors


@click.command("simulate")
@click.argument("model")
@click.option("--quantization", help="Quantization of GGUF files in place of that of the model, such as Q8_0.")
@click.option("--context-length", type=int, help="Context of each request in tokens. Default: 8192.")
@click.option("--memory", "memory_gb", type=float, help="Memory of a replica in GiB, in place of the estimate.")
@facts_option("table")
@click.option(
    "--vendors",
    callback=read_vendors,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML file of accelerators, that of the controller.",
)
@cluster_options
def command(
    model: str,
    *,
    quantization: str | None,
    context_length: int | None,
    memory_gb: float | None,
    output_format: TableFormat,
    vendors: "Vendors",
    target: ClusterOptions,
) -> None:
    """Show what would be free on each node and host before and after a further replica of MODEL.

    Nothing is changed. `pomona plan` shows what the queue would do with a service; this command asks where a model
    would fit at all, in another quantization or with another context.

    Exit code: 0 it fits somewhere; 1 it fits nowhere, or the cluster cannot be read; 2 a value is impossible.

    \b
    Examples:
      pomona simulate qwen3-8b
      pomona simulate qwen3-8b --quantization Q8_0 --context-length 32768
      pomona simulate team/chat-model --memory 12 -o json
    """
    import msgspec  # noqa: PLC0415 - not needed for --help

    from cli.density.reading import answer_by_cluster  # noqa: PLC0415 - same
    from console.density_answers import SimulateRequest  # noqa: PLC0415 - same
    from console.density_simulation import (  # noqa: PLC0415 - same
        ModelNotFound,
        SimulationRefused,
        check_request,
        simulate_model,
    )

    wanted = SimulateRequest(model=model, quantization=quantization, context=context_length, memory_gb=memory_gb)
    try:
        check_request(wanted)
        answer = answer_by_cluster(target, vendors, lambda read, table: simulate_model(read, table, None, wanted))
    except ModelNotFound as error:
        raise click.ClickException(str(error)) from error
    except SimulationRefused as error:
        raise click.UsageError(str(error)) from error
    if output_format in {"json", "yaml"}:
        print_facts(msgspec.to_builtins(answer), "json" if output_format == "json" else "yaml")
    else:
        _print_places(model, answer)
    click.get_current_context().exit(0 if answer.can_fit_anywhere else 1)


def _print_places(model: str, answer: "SimulateAnswer") -> None:
    rows = [
        (
            each.node_name,
            each.fit_level,
            "" if each.estimated_tps is None else f"{each.estimated_tps:.3g}",
            f"{each.required_memory_gb:g} GiB",
            f"{each.before.free_devices} x {each.before.free_gb:g} GiB",
            "" if each.after is None else f"{each.after.free_devices} x {each.after.free_gb:g} GiB",
            each.shortfall,
        )
        for each in answer.ranked_nodes
    ]
    titles = ("NODE", "FIT", "TOKENS/S", "NEEDS", "FREE BEFORE", "FREE AFTER", "WHY")
    print(render_table(titles, rows, terminal_width(), {0, 1}) if rows else f"{model} fits nowhere")
    for excluded in answer.excluded_nodes:
        click.echo(f"{excluded.node_name}: not considered: {excluded.reason}", err=True)
