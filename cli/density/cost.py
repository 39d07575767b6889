"""`pomona cost`: what services and namespaces take, and cost."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from cli.cluster_options import ClusterOptions, cluster_options
from cli.options import EXISTING_FILE, vendors_option
from cli.output import DATA_FORMATS, facts_option, print_facts, print_note, progress_width, render_table
from devices.vendors import Vendors

if TYPE_CHECKING:
    from console.density_answers import ModelCost, NamespaceCost


@click.command("cost")
@click.option(
    "--prices",
    "prices_path",
    type=EXISTING_FILE,
    help="YAML file with currency, perKwh, and watts and perHour by device. Default: costs are unknown.",
)
@facts_option("table")
@vendors_option
@cluster_options
def command(prices_path: Path | None, *, output_format: str, vendors: Vendors, target: ClusterOptions) -> None:
    """Show the devices, memory, electricity and money that each service and namespace takes.

    A device has the name of its class without the number, such as nvidia-l4, or of its vendor. The price per million
    tokens uses the current speed, or else the measured or estimated speed of a busy replica. Unknown values, and sums
    that contain one, are shown as ?, and named on standard error.

    \b
    Examples:
      pomona cost
      pomona cost --prices prices.yaml
      pomona cost --prices prices.yaml -o json
    """
    from cli.density.reading import load_prices, read_density  # noqa: PLC0415 - not needed for --help
    from console.density_costs import list_costs  # noqa: PLC0415 - same
    from console.density_queries import MOST_LIMIT, Page  # noqa: PLC0415 - same

    # 1. Read the cluster. The second value, a table of how models fit, is for other commands.
    prices = load_prices(prices_path)
    snapshot, _table = read_density(target, vendors)
    # None: services of all namespaces are shown; what the user may not read is not in the snapshot.
    answer = list_costs(snapshot, prices, None, Page(0, MOST_LIMIT))
    if output_format in DATA_FORMATS:
        print_facts(msgspec.to_builtins(answer), output_format)
        return

    # 2. A row for each service, and below them one for each namespace.
    rows = [
        _build_row(f"{model.namespace}/{model.name}", f"{model.replicas}", model.gpu, model.memory_required_gb, model)
        for model in answer.models
    ]
    rows += [
        _build_row(f"{namespace.namespace} in all", "", namespace.total_gpu, namespace.total_memory_gb, namespace)
        for namespace in answer.namespaces
    ]
    money = answer.currency  # such as EUR
    titles = ("SERVICE", "REPLICAS", "GPUS", "MEMORY", "WATTS", f"{money}/HOUR", f"{money}/MILLION TOKENS")
    print(render_table(titles, rows, progress_width(), {0}) if rows else "no service")

    # 3. Why a value is unknown.
    for model in answer.models:
        if model.unknown:
            print_note(f"{model.namespace}/{model.name}: not known: {'; '.join(model.unknown)}")


def _build_row(
    name: str, replicas: str, gpus: int, memory_gb: float | None, cost: "ModelCost | NamespaceCost"
) -> tuple[str, ...]:
    """Return a row of the table; unknown figures are shown as ?.

    A service without replicas takes no memory, so there an unknown memory is left blank.
    """
    unknown_memory = "" if replicas == "0" else "?"
    memory = unknown_memory if memory_gb is None else f"{memory_gb:g} GiB"
    figures = (cost.watts, cost.cost_per_hour, cost.cost_per_million_tokens)
    return name, replicas, f"{gpus}", memory, *("?" if figure is None else f"{figure:.4g}" for figure in figures)
