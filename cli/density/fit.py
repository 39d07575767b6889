"""`pomona fit`: which nodes and hosts run a model, and how fast."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cli.api_objects import Obj
from cli.cluster_options import ClusterOptions, cluster_options
from cli.output import print_facts, render_table, terminal_width
from cli.vendor_option import read_vendors
from crds.rate import format_rate

if TYPE_CHECKING:
    from console.density_queries import DensityQuery
    from console.density_snapshot import DensitySnapshot
    from console.fit_table import FitTable
    from devices.vendors import Vendors

_LEVELS: Final = ("perfect", "good", "marginal", "too_tight")
_USE_CASES: Final = ("general", "coding", "reasoning", "chat", "multimodal", "embedding")
_TOP: Final = 3
"""Rows of each node in the JSON, as in Sympozium's."""


@click.command("fit")
@click.argument("model")
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
    use_case: str | None,
    min_fit: str,
    limit: int,
    is_json: bool,
    vendors: "Vendors",
    target: ClusterOptions,
) -> None:
    """Show which nodes and hosts of the cluster run MODEL now, the best level first, and there the fastest.

    MODEL is a part of the name or source of a Model of the cluster or of the catalog, or "*" for all. What runs already
    is subtracted, and nothing is placed on nodes that are cordoned or whose agent is silent.

    Exit code: 0 it fits somewhere; 1 it fits nowhere, or the cluster cannot be read.

    \b
    Examples:
      pomona fit qwen3-8b
      pomona fit qwen3 --min-fit good --json
      pomona fit '*' --use-case reasoning --limit 50
      pomona fit mistral --min-fit too_tight
    """
    from cli.density.reading import answer_by_cluster  # noqa: PLC0415 - not needed for --help
    from console.api_requests import read_density_query  # noqa: PLC0415 - same
    from console.density_queries import Page, query_nodes  # noqa: PLC0415 - same

    query = read_density_query({"min_fit": min_fit, "use_case": use_case or ""}, model)

    def answer(snapshot: "DensitySnapshot", table: "FitTable") -> tuple[Obj | None, list[tuple[str, ...]], list[str]]:
        if is_json:
            return build_report(snapshot, table, query, limit), [], []
        found = query_nodes(snapshot, table, None, query, Page(0, limit))
        rows: list[tuple[str, ...]] = [
            (
                each.node_name,
                f"{each.model.namespace}/{each.model.name}".removeprefix("/"),
                each.fit_level,
                "" if each.model.estimated_tps is None else format_rate(each.model.estimated_tps),
                f"{each.model.memory_required_gb:g} of {each.model.memory_available_gb:g} GiB",
                f"{each.model.device_count} x {each.model.device_class}",
                each.model.shortfall or f"{each.model.runtime}, {each.model.run_mode.replace('_', ' ')}",
            )
            for each in found.ranked_nodes
        ]
        notes = [f"{each.node_name}: not considered: {each.reason}" for each in found.excluded_nodes]
        if found.next_offset is not None:
            notes.append(f"{found.total - limit} more: raise --limit")
        return None, rows, notes

    report, rows, notes = answer_by_cluster(target, vendors, answer)
    if report is not None:
        print_facts(report, "json")
        click.get_current_context().exit(0 if report["ranked_nodes"] else 1)
    titles = ("NODE", "MODEL", "FIT", "TOKENS/S", "MEMORY", "DEVICES", "HOW")
    print(render_table(titles, rows, terminal_width(), {0, 2}) if rows else f"{model} fits nowhere")
    for line in notes:
        click.echo(line, err=True)
    click.get_current_context().exit(0 if rows else 1)


def build_report(snapshot: "DensitySnapshot", table: "FitTable", query: "DensityQuery", limit: int) -> Obj:
    """Return the report in the keys of Sympozium's `llmfit-cluster-fit.sh`."""
    from console.density_queries import Page  # noqa: PLC0415 - not needed for --help
    from console.llmfit_rows import list_llmfit_models  # noqa: PLC0415 - same

    ranked, results = list[Obj](), list[Obj]()
    for name in snapshot.names:
        exclusion = snapshot.cells[name].exclusion
        if name not in snapshot.profile_of:
            results.append({"node": name, "error": "not considered", "reason": exclusion or "its hardware is unknown"})
            continue
        found = list_llmfit_models(snapshot, table, None, query, Page(0, _TOP), node=name)
        top = found["models"]
        results.append(
            {
                "node": name,
                "model_query": query.text,
                "use_case": query.use_case,
                "min_fit": query.min_fit,
                "system": {"system": found["system"]},
                "matched_count": found["total_models"],
                "candidate_count": len(snapshot.models),
                "top": top,
            }
        )
        if top:
            ranked.append(_rank_node(name, found["total_models"], top[0]))
    ranked.sort(key=lambda each: (-each["best_score"], each["node"]))
    return {
        "requested_model": query.text,
        "min_fit": query.min_fit,
        "use_case": query.use_case,
        "node_count": len(snapshot.names),
        "ranked_nodes": ranked[:limit],
        "node_results": results,
    }


def _rank_node(name: str, matched: int, best: Obj) -> Obj:
    return {
        "node": name,
        "matched_count": matched,
        "best_fit": best["fit_level"],
        "best_score": best["score"],
        "best_model": best["name"],
        "best_runtime": best["runtime_label"],
        "best_quant": best["best_quant"],
        "estimated_tps": best["estimated_tps"],
    }
