"""The output of `pomona fit`, and the reading of a source that it is asked about."""

import asyncio
from typing import Final

import click
import msgspec

from artifacts.errors import ArtifactError
from artifacts.repositories.address_policy import Networks
from cli.api_objects import Obj
from cli.inspect import InspectedSource, inspect_source
from cli.queue.model_headers import find_catalog_header
from console.density_answers import RankedNode
from console.density_models import KnownModel, build_known_model
from console.density_queries import DensityQuery, Page
from console.density_snapshot import CONTEXT_LENGTH, DensitySnapshot
from console.fit_table import FitTable
from console.llmfit_answers import list_llmfit_models
from crds.model import Model
from crds.rate import format_rate
from crds.serving import ServingOptions
from devices.vendors import Vendors
from fitness.catalog_entries import load_catalog

_TOP: Final = 3
"""Rows of each node in the JSON, as in Sympozium's."""


def render_node(node: RankedNode) -> tuple[str, ...]:
    """Return a row of the table."""
    model = node.model
    return (
        node.node_name,
        f"{model.namespace}/{model.name}".removeprefix("/"),
        node.fit_level,
        "" if model.estimated_tps is None else format_rate(model.estimated_tps),
        f"{model.memory_required_gb:g} of {model.memory_available_gb:g} GiB",
        f"{model.device_count} x {model.device_class}",
        model.shortfall or ", ".join([model.runtime, model.run_mode, *_format_context(model.chosen_context)]),
    )


def _format_context(context: int | None) -> list[str]:
    return [f"context {context}"] if context else []


def read_source(source: str, files: tuple[str, ...], vendors: Vendors, networks: Networks) -> KnownModel:
    """Return the model of a source, by its header, or by the catalog where the source cannot be reached.

    Raises:
        click.ClickException: the header cannot be read, or does not say what the model takes.
    """
    try:
        facts = asyncio.run(inspect_source(InspectedSource(source, files, networks)))
    except ArtifactError as error:
        listed = find_catalog_header(source)
        if listed is None:
            raise click.ClickException(f"{source} is not known: {error}") from error
        click.echo(f"{source}: {error}; using the figures of the catalog", err=True)
        facts = msgspec.to_builtins(listed)

    # layout: the shape of the model, from which its memory is computed
    if facts.get("layout") is None:
        raise click.ClickException(
            f"it is unknown where {source} fits: its header does not say what it takes. State the memory of a replica: "
            f"pomona simulate {source} --memory GIB, of a Model with spec.memoryBytes"
        )

    # The model is built as from a Model of the cluster that has been inspected: the header's facts are its status.
    fields = ("file", "format", "gguf", "layout", "totalParameters", "activeParameters")
    status = {name: facts[name] for name in fields if name in facts}
    model = {"metadata": {"name": source}, "spec": {"source": source, "files": list(files)}, "status": status}
    options = ServingOptions(context_length=CONTEXT_LENGTH, parallel=1)
    return build_known_model(msgspec.convert(model, Model), vendors, options)


def explain_unknown(name: str) -> str:
    """Return the message that it is unknown where a model fits, with the way out.

    Call it for a name that matches no model whose memory is known: none of the cluster, and none of the catalog.
    """
    # matches: each source of the entries with `name` in their names, with the name of the entry
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

    # The catalog has the model, so what is missing is its layout, from which the memory is computed. One entry will do
    # as the example in the message.
    entry_name, source = matches[0]
    return (
        f"it is unknown where {entry_name} fits: no formula is known for the memory of its attention. State the memory "
        f"of a replica by spec.memoryBytes of a Model of {source}, or: pomona deploy {entry_name} --memory GIB"
    )


def build_report(snapshot: DensitySnapshot, table: FitTable, query: DensityQuery, limit: int) -> Obj:
    """Return where the models of a query fit, in the keys of `llmfit-cluster-fit.sh`, a script of project Sympozium.

    `node_results` has each node and host with its best models (`_TOP`), or why it is not considered; `ranked_nodes` has
    the best model of each, the best score first.

    Args:
        snapshot: the cluster, with its models.
        table: the fits on it.
        query: the models that are meant, and the least level of fit.
        limit: the most ranked nodes.
    """
    ranked, results = list[Obj](), list[Obj]()
    for name in snapshot.names:
        exclusion = snapshot.machines[name].exclusion
        is_considered = name in snapshot.profile_of
        if not is_considered:
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
            best = top[0]
            ranked.append(
                {
                    "node": name,
                    "matched_count": answer["total_models"],
                    "best_fit": best["fit_level"],
                    "best_score": best["score"],
                    "best_model": best["name"],
                    "best_runtime": best["runtime_label"],
                    "best_quant": best["best_quant"],
                    "estimated_tps": best["estimated_tps"],
                }
            )

    ranked.sort(key=lambda row: row["node"])
    ranked.sort(key=lambda row: row["best_score"], reverse=True)  # nodes of equal score stay in the order of names
    return {
        "requested_model": query.text,
        "min_fit": query.min_fit,
        "use_case": query.use_case,
        "node_count": len(snapshot.names),
        "ranked_nodes": ranked[:limit],
        "node_results": results,
    }
