"""The fit of the models of the catalog on a node, in the shape of llmfit's rows.

A row is about one device of the node, with what is free now. A model has a row if the catalog knows the layout of a
source that an engine takes on the node's devices: others are not guessed.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from crds.nodefitness import NodeFitnessStatus
from crds.serving import ServingOptions
from fitness.catalog_entries import CatalogEntry, load_catalog
from fitness.fit import FIT_LEVELS, Fit, FitLevel, assess_fit
from fitness.llmfit_rows import build_row
from fitness.serving_devices import ServingDevices, describe_devices

CONTEXT_LENGTH: Final = 8192
"""Context of the rows, as by llmfit."""
MOST_ROWS: Final = 1000
LONGEST_SEARCH: Final = 256


class FitQuery(NamedTuple):
    """The rows to answer with."""

    limit: int
    min_fit: FitLevel = "marginal"
    search: str = ""
    """Part of the name or title, in any case; empty: all."""


def parse_fit_query(query: Mapping[str, str], *, limit: int, search: str = "") -> FitQuery:
    """Return the checked query of a request for fits. Raises ValueError with a message for the client.

    Args:
        query: the parameters of its URL; llmfit also names the limit `n`.
        limit: the limit if it states none.
        search: a part of the name of models, which is in the path; empty: all.
    """
    stated = query.get("limit", query.get("n", str(limit)))
    is_short_number = stated.isascii() and stated.isdecimal() and len(stated) <= len(str(MOST_ROWS))
    if not is_short_number or int(stated) > MOST_ROWS:
        raise ValueError(f"limit is a number from 0 to {MOST_ROWS}")

    level = query.get("min_fit", "marginal")
    min_fit = next((fit_level for fit_level in FIT_LEVELS if fit_level == level), None)
    if min_fit is None:
        raise ValueError(f"min_fit is one of {', '.join(FIT_LEVELS)}")

    if len(search) > LONGEST_SEARCH:
        raise ValueError(f"the name of a model has at most {LONGEST_SEARCH} characters")
    return FitQuery(limit=int(stated), min_fit=min_fit, search=search.casefold())


def list_fits(hardware: NodeFitnessStatus, query: FitQuery) -> list[dict[str, Any]]:
    """Return a row for each model of the catalog that matches the query, the best fit first, then the largest model.

    Models whose layout is not known for the devices of the node have no row. The limit of the query is not applied.
    """
    devices = _describe_first_device(hardware)
    worst_rank = FIT_LEVELS.index(query.min_fit)
    # Rank of the level (0 is the best), negated number of parameters, and the row: sorted by the first two.
    candidates = list[tuple[int, float, dict[str, Any]]]()

    for name, entry in load_catalog().items():
        if query.search not in name.casefold() and query.search not in entry.title.casefold():
            continue
        fit = _assess_entry(entry, devices)
        if fit and (rank := FIT_LEVELS.index(fit.level)) <= worst_rank:
            largest_first = -entry.parameter_count
            candidates.append((rank, largest_first, _build_row(name, entry, devices.vendor, fit)))

    return [row for _, _, row in sorted(candidates, key=lambda candidate: candidate[:2])]


def describe_filters(query: FitQuery, *, top_only: bool) -> dict[str, Any]:
    """Return the filters that were obeyed, in llmfit's keys."""
    return {
        "limit": query.limit,
        "min_fit": query.min_fit,
        "search": query.search or None,
        "top_only": top_only,
        "max_context": CONTEXT_LENGTH,
    }


def _describe_first_device(hardware: NodeFitnessStatus) -> ServingDevices:
    """Return the first device of a node as the devices of a replica, or its processor if it has none.

    One is enough, since the devices of a node are usually alike, and each row is about a replica on one of them.
    """
    if not hardware.devices:
        # The device class, by which measured speeds are found, is left empty: speeds are estimated here.
        return ServingDevices(
            vendor="cpu",
            device_class="",
            product=hardware.processor,
            memory_bytes=hardware.memory_bytes,
            free_bytes=hardware.available_bytes,
            bandwidth_bytes_per_second=hardware.memory_bandwidth_bytes_per_second,
            cores=hardware.cpu_cores or 1,
        )

    device = hardware.devices[0]
    return describe_devices(
        hardware.vendor,
        device.product,
        partition=device.partition,
        memory_bytes=device.memory_bytes,
        free_bytes=device.free_bytes,
        bandwidth=device.memory_bandwidth_bytes_per_second,
    )


def _assess_entry(entry: CatalogEntry, devices: ServingDevices) -> Fit | None:
    """Return the fit of a model of the catalog on these devices; None if no source of known layout is for them."""
    workload = entry.find_workload(devices.vendor)
    if workload is None:
        return None
    options = ServingOptions(context_length=CONTEXT_LENGTH, parallel=1, mode=entry.mode)
    return assess_fit(workload, options, devices, active_share=entry.active_share)


def _build_row(name: str, entry: CatalogEntry, vendor: str, fit: Fit) -> dict[str, Any]:
    """Return the row of a model of the catalog in llmfit's keys.

    It names the source that an engine takes on devices of this vendor.
    """
    source = entry.find_source(vendor) or entry.sources[0]
    names = {"name": name, "title": entry.title, "source": source.source}
    is_moe = bool(entry.active)  # a mixture of experts: only a part of the parameters is active for a token
    row = build_row(fit, source.runtime, CONTEXT_LENGTH, entry.parameter_count, is_moe=is_moe, **names)
    return {**row, "parameter_count": entry.parameters}
