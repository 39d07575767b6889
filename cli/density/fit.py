"""`pomona fit`: which nodes and hosts run a model, and how fast."""

from typing import TYPE_CHECKING, Final

import click

from cli.api_objects import Obj
from cli.cluster_options import ClusterOptions, cluster_options
from cli.options import allow_private_sources, choose_files
from cli.output import print_facts, progress_width, render_table
from cli.vendor_option import vendors_option
from crds.rate import format_rate

if TYPE_CHECKING:
    from artifacts.repositories.address_policy import Networks
    from console.density_answers import RankedNode
    from console.density_models import KnownModel
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
    allowed_networks: "Networks",
    use_case: str | None,
    min_fit: str,
    limit: int,
    is_json: bool,
    vendors: "Vendors",
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
    from cli.density.reading import answer_by_cluster  # noqa: PLC0415 - not needed for --help
    from console.api_requests import read_density_query  # noqa: PLC0415 - same
    from console.density_queries import Page, flag_matches, query_nodes  # noqa: PLC0415 - same

    asked = read_source(model, files, vendors, allowed_networks) if "://" in model else None
    query = read_density_query({"min_fit": min_fit, "use_case": use_case or ""}, "*" if asked else model)

    def answer(snapshot: "DensitySnapshot", table: "FitTable") -> tuple[Obj | None, list[tuple[str, ...]], list[str]]:
        snapshot = snapshot if asked is None else snapshot.with_models((asked,))
        if not any(flag_matches(snapshot, None, query)):
            raise click.ClickException(explain_unknown(model))
        if is_json:
            return build_report(snapshot, table, query, limit), [], []
        page = query_nodes(snapshot, table, None, query, Page(0, limit))
        rows = [_render_node(node) for node in page.ranked_nodes]
        notes = [f"{node.node_name}: not considered: {node.reason}" for node in page.excluded_nodes]
        if page.next_offset is not None:
            notes.append(f"{page.total - limit} more: raise --limit")
        return None, rows, notes

    report, rows, notes = answer_by_cluster(target, vendors, answer)
    if report is not None:
        print_facts(report, "json")
        click.get_current_context().exit(0 if report["ranked_nodes"] else 1)
    titles = ("NODE", "MODEL", "FIT", "TOKENS/S", "MEMORY", "DEVICES", "HOW")
    nowhere = f"{model} fits nowhere" + ("" if min_fit == _LEVELS[-1] else f": --min-fit {_LEVELS[-1]} says why")
    print(render_table(titles, rows, progress_width(), {0, 2}) if rows else nowhere)
    for line in notes:
        click.echo(line, err=True)
    click.get_current_context().exit(0 if rows else 1)


def _render_node(node: "RankedNode") -> tuple[str, ...]:
    """Return a row of the table."""
    model = node.model
    return (
        node.node_name,
        f"{model.namespace}/{model.name}".removeprefix("/"),
        node.fit_level,
        "" if model.estimated_tps is None else format_rate(model.estimated_tps),
        f"{model.memory_required_gb:g} of {model.memory_available_gb:g} GiB",
        f"{model.device_count} x {model.device_class}",
        model.shortfall or f"{model.runtime}, {model.run_mode}",
    )


def read_source(source: str, files: tuple[str, ...], vendors: "Vendors", networks: "Networks") -> "KnownModel":
    """Return the model of a source, by its header, or by the catalog where the source cannot be reached.

    Raises:
        click.ClickException: the header cannot be read, or does not say what the model takes.
    """
    import asyncio  # noqa: PLC0415 - not needed for --help

    import msgspec  # noqa: PLC0415 - same

    from artifacts.errors import ArtifactError  # noqa: PLC0415 - same
    from cli.inspect import inspect_source  # noqa: PLC0415 - same
    from cli.queue.model_headers import find_catalog_header  # noqa: PLC0415 - same
    from console.density_models import build_known_model  # noqa: PLC0415 - same
    from console.density_snapshot import CONTEXT_LENGTH  # noqa: PLC0415 - same
    from crds.model import Model  # noqa: PLC0415 - same
    from crds.serving import ServingOptions  # noqa: PLC0415 - same

    reading = inspect_source(
        source, files, None, file_root=None, allowed_networks=networks, is_mounted=False, mirrors=()
    )
    try:
        facts = asyncio.run(reading)
    except ArtifactError as error:
        listed = find_catalog_header(source)
        if listed is None:
            raise click.ClickException(f"{source} is not known: {error}") from error
        click.echo(f"{source}: {error}; the figures of the catalog are taken for it", err=True)
        facts = msgspec.to_builtins(listed)
    if facts.get("layout") is None:
        raise click.ClickException(
            f"it is unknown where {source} fits: its header does not say what it takes. State the memory of a replica: "
            f"pomona simulate {source} --memory GIB, of a Model with spec.memoryBytes"
        )
    fields = ("file", "format", "gguf", "layout", "totalParameters", "activeParameters")
    status = {name: facts[name] for name in fields if name in facts}
    model = {"metadata": {"name": source}, "spec": {"source": source, "files": list(files)}, "status": status}
    return build_known_model(msgspec.convert(model, Model), vendors, ServingOptions(context_length=CONTEXT_LENGTH))


def explain_unknown(name: str) -> str:
    """Return the message that it is unknown where a model fits, with the way out."""
    from fitness.catalog_entries import load_catalog  # noqa: PLC0415 - not needed for --help

    matches = [
        (entry_name, source.source)
        for entry_name, entry in load_catalog().items()
        if name.casefold() in entry_name
        for source in entry.sources
    ]
    if not matches:
        return (
            f"it is unknown where {name} fits: no header of it is in the cluster or the catalog. Read one from its "
            "source: pomona fit hf://ORG/REPO"
        )
    # Each model of the catalog with a layout is among those of the cluster.
    entry_name, source = matches[0]
    return (
        f"it is unknown where {entry_name} fits: no formula is known for the memory of its attention. State the memory "
        f"of a replica by spec.memoryBytes of a Model of {source}, or: pomona deploy {entry_name} --memory GIB"
    )


def build_report(snapshot: "DensitySnapshot", table: "FitTable", query: "DensityQuery", limit: int) -> Obj:
    """Return the report in the keys of Sympozium's `llmfit-cluster-fit.sh`."""
    from console.density_queries import Page  # noqa: PLC0415 - not needed for --help
    from console.llmfit_answers import list_llmfit_models  # noqa: PLC0415 - same

    ranked, results = list[Obj](), list[Obj]()
    for name in snapshot.names:
        exclusion = snapshot.machines[name].exclusion
        if name not in snapshot.profile_of:
            results.append({"node": name, "error": "not considered", "reason": exclusion or "its hardware is unknown"})
            continue
        answer = list_llmfit_models(snapshot, table, None, query, Page(0, _TOP), node=name)
        top = answer["models"]
        results.append(
            {
                "node": name,
                "model_query": query.text,
                "use_case": query.use_case,
                "min_fit": query.min_fit,
                "system": {"system": answer["system"]},
                "matched_count": answer["total_models"],
                "candidate_count": len(snapshot.models),
                "top": top,
            }
        )
        if top:
            ranked.append(_rank_node(name, answer["total_models"], top[0]))
    ranked.sort(key=lambda row: (-row["best_score"], row["node"]))
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
