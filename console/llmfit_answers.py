"""The rows of `llmfit serve`, for its clients: each model on its best node, or on one node."""

from typing import Any, NamedTuple

from console.density_models import KnownModel
from console.density_queries import DensityQuery, Page, flag_matches
from console.density_snapshot import DensitySnapshot, MachineProfile, Visibility
from console.fit_table import RANKS, FitTable, PlaceFit
from fitness.llmfit_rows import build_row, describe_system


class _BestPlace(NamedTuple):
    rank: tuple[int, float]
    node: str
    profile: MachineProfile


def list_llmfit_models(
    snapshot: DensitySnapshot, table: FitTable, visible: Visibility, query: DensityQuery, page: Page, *, node: str = ""
) -> dict[str, Any]:
    """Return the answer of /api/v1/models: a page of the matching models, each once, the best fit first.

    1. Find the best node of each model: profiles stand for nodes that are alike, so their first node is named.
    2. Sort the models by that fit, and cut out the page.
    3. Compute the full row of those on the page.

    Args:
        snapshot: the cluster.
        table: the fits.
        visible: what the caller may see.
        query: the models and the least level.
        page: the part that is answered.
        node: the only node or host; empty: the best one for each model.
    """
    # flags: 1 for each model that the caller may see and that matches, by its position in `snapshot.models`
    flags = flag_matches(snapshot, visible, query)
    best_places = _find_best_places(snapshot, table, flags, RANKS[query.min_fit], node)

    # The key: the best fit first, then by the name of the model. An entry is a position and a place.
    ordered = sorted(best_places.items(), key=lambda entry: (entry[1].rank, snapshot.models[entry[0]].full_name))
    shown = page.cut(ordered)
    return {
        "node": {"name": node or "cluster", "os": "linux"},
        "system": describe_system(snapshot.describe_machine(node)) if node in snapshot.machines else None,
        "total_models": len(ordered),
        "returned_models": len(shown),
        "filters": {
            "limit": page.limit,
            "min_fit": query.min_fit,
            "search": None if query.text == "*" else query.text,
            "use_case": query.use_case,
            "top_only": False,
            "max_context": table.options.context_tokens,
        },
        "models": [
            _build_row(snapshot.models[position], best_fit, best_place.node, table.options.context_tokens)
            for position, best_place in shown
            if (best_fit := table.find_best_fit(snapshot.models[position], best_place.profile)) is not None
        ],
    }


def _find_best_places(
    snapshot: DensitySnapshot, table: FitTable, flags: bytearray, worst_rank: int, node: str
) -> dict[int, _BestPlace]:
    """Return the best place of each flagged model that fits, by its position in `snapshot.models`.

    A fit counts if its level is not beyond `worst_rank`; a lower one is better. Only `node` counts, unless it is empty.
    """
    best = dict[int, _BestPlace]()
    for profile in snapshot.profiles:
        if node and node not in profile.names:
            continue
        for fit in table.rank_models(snapshot.models, profile):
            if fit.level > worst_rank or not flags[fit.position]:
                continue

            # Keep it if it is better: a lower level, a lower slowness or, with an equal fit, the first node by name.
            place = _BestPlace(rank=(fit.level, fit.slowness), node=node or profile.names[0], profile=profile)
            previous = best.get(fit.position)
            if previous is None or (place.rank, place.node) < (previous.rank, previous.node):
                best[fit.position] = place
    return best


def _build_row(model: KnownModel, place: PlaceFit, node: str, context_length: int) -> dict[str, Any]:
    """Return a model on a node."""
    names = {"name": model.full_name, "node_name": node, "title": model.title, "source": model.source}
    is_moe = model.active_share is not None
    row = build_row(place.fit, place.runtime, context_length, model.parameters, is_moe=is_moe, **names)
    return {**row, "score": place.score, "best_quant": model.quantization or None}
