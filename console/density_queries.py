"""The answers about nodes and models: pure functions of a snapshot and of what the caller may see."""

import bisect
import heapq
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

from console.density_answers import (
    CatalogAnswer,
    CatalogModel,
    CatalogNode,
    EngineEntry,
    ExcludedNode,
    InstalledModel,
    InstalledModelsAnswer,
    ModelFit,
    NodeDetailAnswer,
    NodeEntry,
    NodeModels,
    NodeRuntimes,
    NodesAnswer,
    QueryAnswer,
    RankedNode,
    RuntimesAnswer,
)
from console.density_models import KnownModel, UseCase, choose_for_machine
from console.density_snapshot import DensitySnapshot, MachineProfile, Visibility
from console.fit_table import RANKS, FitTable, PlaceFit, RankedFit
from crds.size import GIB
from devices.vendors import Vendors
from fitness.fit import FitLevel
from runtimes.registry import RUNTIMES

DEFAULT_LIMIT: Final = 100
MOST_LIMIT: Final = 1000
MOST_CATALOG_NODES: Final = 20
"""Nodes that the catalog names for each model."""
_CATEGORIES: Final[tuple[UseCase, ...]] = ("embedding", "multimodal", "coding", "reasoning", "chat", "general")
"""A model is of the first that applies."""

T = TypeVar("T")


class Page(NamedTuple):
    """The part of a list that is answered."""

    offset: int = 0
    limit: int = DEFAULT_LIMIT

    def cut(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items of the page."""
        return items[self.offset : self.offset + self.limit]

    def find_next(self, total: int) -> int | None:
        """Return the offset of the next page; None: this is the last one."""
        return self.offset + self.limit if self.offset + self.limit < total else None


class DensityQuery(NamedTuple):
    """A question which nodes run a model."""

    text: str
    """Part of the name, title or source of a model in any case; "*": all."""
    min_fit: FitLevel = "marginal"
    use_case: UseCase | None = None


def list_nodes(
    snapshot: DensitySnapshot, table: FitTable, vendors: Vendors, visible: Visibility, page: Page
) -> NodesAnswer:
    """Return a page of all nodes and hosts, with the number of models that fit there; stale ones are marked.

    Nodes that are alike share a profile, for which the models are counted once. Where nothing may be placed, there is
    no profile, and the number is 0.
    """
    # visible_flags: 1 for each model that the caller may see, in the order of `snapshot.models`
    visible_flags = snapshot.flag_models(visible)
    counts: dict[int, int] = {}  # of models that fit, by the `id` of a profile: to hash its content would take longer
    nodes = []
    for name in page.cut(snapshot.names):
        # The first node of a profile has its models counted; further ones use that number.
        machine, profile = snapshot.machines[name], snapshot.profile_of.get(name)
        if profile is not None and id(profile) not in counts:
            counts[id(profile)] = count_fitting(snapshot, table, profile, visible_flags)

        nodes.append(
            NodeEntry(
                node_name=name,
                kind=machine.cell.kind,
                last_seen=machine.last_seen,
                stale=machine.is_stale,
                unavailable=machine.exclusion,
                system=snapshot.describe_machine(name),
                model_fit_count=counts[id(profile)] if profile is not None else 0,
                runtimes=list_engines(snapshot, name, vendors, visible),
                installed_models=list_installed(snapshot, name, visible),
            )
        )
    return NodesAnswer(nodes=nodes, total=len(snapshot.names), next_offset=page.find_next(len(snapshot.names)))


def count_fitting(snapshot: DensitySnapshot, table: FitTable, profile: MachineProfile, flags: bytearray) -> int:
    """Return the number of flagged models that fit on a profile; `flags` has one for each model."""
    too_tight = RANKS["too_tight"]
    return sum(fit.level < too_tight and flags[fit.position] for fit in table.rank_models(snapshot.models, profile))


def describe_node(
    snapshot: DensitySnapshot, table: FitTable, vendors: Vendors, visible: Visibility, *, name: str, page: Page
) -> NodeDetailAnswer:
    """Return one node or host with a page of the models that fit there, the best first.

    All models are ranked by a cheap computation; only those of the page get their full fit. Where nothing may be
    placed, there is no profile, and no model fits.
    """
    machine = snapshot.machines[name]
    # visible_flags: 1 for each model that the caller may see, in the order of `snapshot.models`
    visible_flags, profile = snapshot.flag_models(visible), snapshot.profile_of.get(name)
    fitting, model_fits = list[RankedFit](), list[ModelFit]()
    if profile is not None:
        # Leave out what does not fit or may not be seen. A lower level is better. `position` is the place of the model
        # in `snapshot.models`.
        ranked, too_tight = table.rank_models(snapshot.models, profile), RANKS["too_tight"]
        fitting = [fit for fit in ranked if fit.level < too_tight and visible_flags[fit.position]]

        # Only for the page: the full fit of each model, with its speed and memory.
        models = (snapshot.models[fit.position] for fit in page.cut(fitting))
        places = ((model, table.find_best_fit(model, profile)) for model in models)
        model_fits = [describe_fit(model, place) for model, place in places if place is not None]

    return NodeDetailAnswer(
        node_name=name,
        kind=machine.cell.kind,
        last_seen=machine.last_seen,
        stale=machine.is_stale,
        unavailable=machine.exclusion,
        system=snapshot.describe_machine(name),
        model_fits=model_fits,
        total=len(fitting),
        next_offset=page.find_next(len(fitting)),
        runtimes=list_engines(snapshot, name, vendors, visible),
        installed_models=list_installed(snapshot, name, visible),
    )


def list_engines(snapshot: DensitySnapshot, name: str, vendors: Vendors, visible: Visibility) -> list[EngineEntry]:
    """Return the engines of a host as its agent reports them, or those with an image for the accelerator of a node.

    An engine of a node counts as installed if a replica that the caller may see runs there with it.
    """
    # 1. A host reports its engines.
    machine = snapshot.machines[name]
    if machine.cell.kind == "host":
        return [EngineEntry(name=engine, installed=True) for engine in sorted(machine.cell.runtimes)]

    # 2. A node has none if its accelerator is of no known vendor.
    running = {installed.runtime for installed in list_installed(snapshot, name, visible)}
    vendor = vendors.get(machine.accelerator)
    if vendor is None:
        return []

    # 3. Else it may have each engine with an image for its accelerator.
    offered = []
    for engine, runtime in RUNTIMES.items():
        pod = runtime.pod  # how the engine runs in pods; None: it does not
        if pod is None or pod.from_container is not None:
            continue  # it runs on hosts only, or in a container that its service describes
        if pod.find_image(machine.accelerator, vendor, engine) is None:
            continue
        offered.append(EngineEntry(name=engine, installed=engine in running))
    return offered


def list_installed(snapshot: DensitySnapshot, name: str, visible: Visibility) -> list[InstalledModel]:
    """Return the models that run on a node or host with their engine, and those of which only the weights are there.

    Only models of the namespaces that the caller may see are listed.
    """
    # 1. Models that run there. An entry is namespace, model and engine. visible is None: all may be seen.
    installed = set[tuple[str, str, str]]()
    for replica in snapshot.replicas_on.get(name, ()):
        service = snapshot.service_of.get((replica.namespace, replica.service))
        if service is not None and (visible is None or replica.namespace in visible):
            installed.add((replica.namespace, service.spec.model_ref, service.status.runtime))

    # 2. Models whose weights are there, with "" as their engine, unless they run there.
    served = {(namespace, model) for namespace, model, _ in installed}
    for model in snapshot.stored_on.get(name, ()):
        namespace, model_name = model.metadata.namespace, model.metadata.name
        if (visible is None or namespace in visible) and (namespace, model_name) not in served:
            installed.add((namespace, model_name, ""))

    return [
        InstalledModel(name=model_name, namespace=namespace, runtime=runtime)
        for namespace, model_name, runtime in sorted(installed)
    ]


def list_runtimes(snapshot: DensitySnapshot, vendors: Vendors, visible: Visibility, page: Page) -> RuntimesAnswer:
    """Return a page of all nodes and hosts with their engines."""
    nodes = [
        NodeRuntimes(node_name=name, runtimes=list_engines(snapshot, name, vendors, visible))
        for name in page.cut(snapshot.names)
    ]
    return RuntimesAnswer(nodes=nodes, total=len(snapshot.names), next_offset=page.find_next(len(snapshot.names)))


def list_installed_models(snapshot: DensitySnapshot, visible: Visibility, page: Page) -> InstalledModelsAnswer:
    """Return a page of all nodes and hosts with the models that run there, or whose weights are there."""
    nodes = [
        NodeModels(node_name=name, models=list_installed(snapshot, name, visible)) for name in page.cut(snapshot.names)
    ]
    total = len(snapshot.names)
    return InstalledModelsAnswer(nodes=nodes, total=total, next_offset=page.find_next(total))


def query_nodes(
    snapshot: DensitySnapshot, table: FitTable, visible: Visibility, query: DensityQuery, page: Page
) -> QueryAnswer:
    """Return a page of pairs of a matching model and a node on which it fits, the best level first, then the fastest.

    A profile stands for all nodes that are alike, on which a model has the same fit. Nodes are many thousands, so the
    pairs are not listed and sorted, but taken from the ranking of each profile up to the end of the page.
    """
    # flags: 1 for each model that may be shown and matches, in the order of `snapshot.models`. A lower rank is better.
    flags = flag_matches(snapshot, visible, query)
    all_match = all(flags)
    worst_rank = RANKS[query.min_fit]

    # 1. Each profile has its models in order already: cut its list behind the worst level that is asked for, and leave
    #    out models that do not match. The ordinal of the profile goes with each model.
    total, streams = 0, []
    for ordinal, profile in enumerate(snapshot.profiles):
        ranked = table.rank_models(snapshot.models, profile)
        # count: models before the first one whose level is worse than asked for
        count = bisect.bisect_left(ranked, worst_rank + 1, key=operator.attrgetter("level"))
        if not all_match:
            ranked = [fit for fit in itertools.islice(ranked, count) if flags[fit.position]]
            count = len(ranked)
        total += count * len(profile.names)
        streams.append(zip(itertools.islice(ranked, count), itertools.repeat(ordinal), strict=False))

    # 2. Merge the lists up to the end of the page: ranked fits sort by level, then slowness, then name.
    nodes = _cut_page(snapshot, table, heapq.merge(*streams), page)
    return QueryAnswer(
        query=query.text,
        min_fit=query.min_fit,
        use_case=query.use_case,
        ranked_nodes=nodes,
        total=total,
        next_offset=page.find_next(total),
        excluded_nodes=list_excluded(snapshot),
    )


def _cut_page(
    snapshot: DensitySnapshot, table: FitTable, merged: Iterable[tuple[RankedFit, int]], page: Page
) -> list[RankedNode]:
    """Return the pairs of a page from `merged`: the best fits first, each with the ordinal of its profile.

    An entry stands for a pair with each node of its profile. The page may begin and end among these.
    """
    nodes = list[RankedNode]()
    entry_end, page_end = 0, page.offset + page.limit
    for ranked_fit, ordinal in merged:
        # The entry has the pairs with the numbers from entry_start to entry_end.
        profile = snapshot.profiles[ordinal]
        entry_start = entry_end
        entry_end += len(profile.names)

        # Entries before the page are only counted; for one that reaches into it, the full fit is computed.
        if entry_end > page.offset:
            model = snapshot.models[ranked_fit.position]
            place = table.find_best_fit(model, profile)
            if place is not None:
                fit, level = describe_fit(model, place), place.fit.level
                shown = profile.names[max(0, page.offset - entry_start) : page_end - entry_start]
                nodes += [RankedNode(node_name=name, score=fit.score, fit_level=level, model=fit) for name in shown]
        if entry_end >= page_end:
            break
    return nodes


def flag_matches(snapshot: DensitySnapshot, visible: Visibility, query: DensityQuery) -> bytearray:
    """Return a flag for each model: 1 if the caller may see it, and it matches."""
    text, flags = query.text.casefold(), snapshot.flag_models(visible)
    for index, model in enumerate(snapshot.models):
        is_wanted = query.use_case is None or query.use_case in model.use_cases
        if not is_wanted or not model.matches(text):
            flags[index] = 0
    return flags


def list_excluded(snapshot: DensitySnapshot) -> list[ExcludedNode]:
    """Return the nodes and hosts on which nothing is placed, at most as many as a page has."""
    names = (name for name in snapshot.names if name not in snapshot.profile_of)
    return [
        ExcludedNode(node_name=name, reason=snapshot.machines[name].exclusion or "its hardware is unknown")
        for name in itertools.islice(names, MOST_LIMIT)
    ]


def list_catalog(snapshot: DensitySnapshot, table: FitTable, visible: Visibility, page: Page) -> CatalogAnswer:
    """Return a page of all models in the order of the alphabet, and where each fits."""
    visible_models = itertools.compress(snapshot.models, snapshot.flag_models(visible))
    shown = sorted(visible_models, key=lambda model: model.full_name)
    models = [_describe_catalog_model(snapshot, table, model) for model in page.cut(shown)]
    return CatalogAnswer(models=models, total=len(shown), next_offset=page.find_next(len(shown)))


def _describe_catalog_model(snapshot: DensitySnapshot, table: FitTable, model: KnownModel) -> CatalogModel:
    """Return a model with the nodes on which it fits, the best first; at most 20 are named, and all are counted.

    The fit is computed once for each profile, which stands for all nodes that are alike.
    """
    # 1. The profiles on which it fits. A place is its fit on the devices of a profile.
    places = list[tuple[PlaceFit, MachineProfile]]()
    for profile in snapshot.profiles:
        place = table.find_best_fit(model, profile)
        if place is not None and place.fit.level != "too_tight":
            places.append((place, profile))

    # 2. Their nodes, the best first. rank: the best level first, there the fastest
    places.sort(key=lambda place_and_profile: place_and_profile[0].rank)
    nodes = list[CatalogNode]()
    for place, profile in places:
        names = profile.names[: MOST_CATALOG_NODES - len(nodes)]  # as many as there is still room for
        nodes += [CatalogNode(node_name=name, score=place.score, fit_level=place.fit.level) for name in names]

    best = nodes[0] if nodes else None
    return CatalogModel(
        model_name=model.name,
        namespace=model.namespace,
        source=model.source,
        best_score=best.score if best else None,
        best_node=best.node_name if best else None,
        fit_level=best.fit_level if best else None,
        node_count=sum(len(profile.names) for _place, profile in places),
        nodes=nodes,
    )


def describe_fit(model: KnownModel, place: PlaceFit) -> ModelFit:
    """Return the fit of a model on a place, the devices of a node or host, as the API describes it.

    Sizes are in GiB, speeds in tokens a second with one decimal; null: the speed is unknown, or the model does not fit.
    """
    # generation: tokens that are generated a second, as expected and as bounds; prompt: tokens that are read
    fit, speed = place.fit, place.fit.speed
    chosen = choose_for_machine(model, [place.devices])
    return ModelFit(
        name=model.name,
        namespace=model.namespace,
        score=place.score,
        fit_level=fit.level,
        fit_level_if_idle=fit.level_if_idle,
        run_mode=fit.run_mode,
        runtime=place.runtime,
        chosen_context=chosen.context_tokens if chosen is not None else None,
        best_quant=model.quantization,
        device_class=place.devices.device_class,
        device_count=place.devices.device_count,
        estimated_tps=round(speed.generation.expected, 1) if speed else None,
        low_tps=round(speed.generation.low, 1) if speed else None,
        high_tps=round(speed.generation.high, 1) if speed else None,
        speed_method=speed.method if speed else None,
        prefill_tps=round(speed.prompt.expected, 1) if speed and speed.prompt else None,
        memory_required_gb=round(fit.needed_bytes / GIB, 2),
        memory_available_gb=round(fit.available_bytes / GIB, 2),
        utilization_pct=round(100 * fit.utilization, 1) if fit.available_bytes else None,
        shortfall=fit.shortfall,
        # _CATEGORIES: the use cases, the most special first
        category=next((use_case for use_case in _CATEGORIES if use_case in model.use_cases), "general"),
    )
