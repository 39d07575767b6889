"""`pomona fit`: which nodes and hosts run a model, and how fast."""

import dataclasses
from typing import Final

import click

from artifacts.repositories.address_policy import Networks
from cli.cluster_options import ClusterOptions, cluster_options
from cli.options import allow_private_sources, choose_files, vendors_option
from cli.output import print_facts, print_note, progress_width, render_table
from devices.vendors import Vendors

_LEVELS: Final = ("perfect", "good", "marginal", "too_tight")
_USE_CASES: Final = ("general", "coding", "reasoning", "chat", "multimodal", "embedding")


@click.command("fit")
@click.argument("model")
@choose_files
@allow_private_sources
@click.option("--use-case", type=click.Choice(_USE_CASES), help="Only models for it.")
@click.option(
    "--min-fit",
    type=click.Choice(_LEVELS),
    default="marginal",
    show_default=True,
    help="Least level; too_tight also lists where the model does not fit, and what is missing.",
)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Nodes and hosts to list.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON with the keys ranked_nodes and node_results.")
@vendors_option
@cluster_options
def command(
    model: str,
    *,
    files: tuple[str, ...],
    allowed_networks: Networks,
    use_case: str | None,
    min_fit: str,
    limit: int,
    is_json: bool,
    vendors: Vendors,
    target: ClusterOptions,
) -> None:
    """Show which nodes and hosts of the cluster run MODEL now, the best level first, and there the fastest.

    MODEL is a part of the name or source of a Model of the cluster or of the catalog, or "*" for all; or any source,
    such as hf://ORG/REPO, whose header is read as by `pomona inspect`. What runs already is subtracted, and nothing is
    placed on nodes that are cordoned or whose agent is silent.

    Exit code: 0 it fits somewhere; 1 it fits nowhere, or is not known, or the cluster cannot be read.

    \b
    Examples:
      pomona fit qwen3-8b
      pomona fit hf://Qwen/Qwen2.5-Coder-14B-Instruct
      pomona fit qwen3 --min-fit good --json
      pomona fit '*' --use-case reasoning --limit 50
      pomona fit mistral --min-fit too_tight
    """
    from cli.density import fit_report  # noqa: PLC0415 - not needed for --help
    from cli.density.reading import read_density  # noqa: PLC0415 - same
    from console.api_requests import read_density_query  # noqa: PLC0415 - same
    from console.density_queries import Page, flag_matches, query_nodes  # noqa: PLC0415 - same

    # 1. Read the cluster. A MODEL with :// is a source, the address of weights. A source replaces all models of it, and
    #    the query "*" matches that only one.
    source_model = fit_report.read_source(model, files, vendors, allowed_networks) if "://" in model else None
    name_query = model if source_model is None else "*"
    query = read_density_query({"min_fit": min_fit, "use_case": use_case or ""}, name_query)
    snapshot, table = read_density(target, vendors)
    if source_model is not None:
        snapshot = dataclasses.replace(snapshot, models=(source_model,))
    if not any(flag_matches(snapshot, None, query)):  # no model matches
        raise click.ClickException(fit_report.explain_unknown(model))

    # 2. Print where the models fit.
    if is_json:
        report = fit_report.build_report(snapshot, table, query, limit)
        print_facts(report, "json")
        click.get_current_context().exit(0 if report["ranked_nodes"] else 1)
    page = query_nodes(snapshot, table, None, query, Page(0, limit))
    rows = [fit_report.render_node(node) for node in page.ranked_nodes]
    titles = ("NODE", "MODEL", "FIT", "TOKENS/S", "MEMORY", "DEVICES", "HOW")
    nowhere = f"{model} fits nowhere" + ("" if min_fit == _LEVELS[-1] else f": --min-fit {_LEVELS[-1]} says why")
    print(render_table(titles, rows, progress_width(), {0, 2}) if rows else nowhere)
    for node in page.excluded_nodes:
        print_note(f"{node.node_name}: not considered: {node.reason}")
    if page.next_offset is not None:
        click.echo(f"{page.total - limit} more: raise --limit", err=True)
    click.get_current_context().exit(0 if rows else 1)
