"""Resources and costs of services, by service and by namespace: pure functions of a snapshot and of prices."""

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from console.density_answers import CostAnswer, ModelCost, NamespaceCost
from console.density_prices import DensityPrices, find_device_cost, name_priced_device, price_million_tokens
from console.density_queries import Page
from console.density_snapshot import DensitySnapshot, PlacedReplica, Visibility
from console.fit_table import compute_score
from controller.placement.machines import ViewedMachine
from crds.inferenceservice import InferenceService
from crds.placement import ClassSpeed, FitLevel
from crds.size import GIB
from fitness.serving_devices import ServingDevices

MOST_NODES: Final = 20
"""Nodes that are named for each service."""
MOST_UNKNOWN: Final = 20
"""Facts that are named for each service."""

SpeedOrigin = Literal["live", "measured", "estimated"]


class _ServiceSpeed(NamedTuple):
    tokens_per_second: float | None
    source: SpeedOrigin | None
    level: FitLevel | None


def list_costs(snapshot: DensitySnapshot, prices: DensityPrices, visible: Visibility, page: Page) -> CostAnswer:
    """Return the services that the caller may see with what each costs, and the sums of their namespaces."""
    shown = sorted(
        (each for each in snapshot.services if visible is None or each.metadata.namespace in visible),
        key=lambda each: (each.metadata.namespace, each.metadata.name),
    )
    models = [_describe_service(snapshot, prices, each) for each in shown]
    return CostAnswer(
        currency=prices.currency,
        models=list(page.cut(models)),
        namespaces=_sum_namespaces(models),
        total=len(models),
        next_offset=page.find_next(len(models)),
    )


def _describe_service(snapshot: DensitySnapshot, prices: DensityPrices, service: InferenceService) -> ModelCost:
    key = service.metadata.namespace, service.metadata.name
    replicas = snapshot.replicas_of.get(key, ())
    bases = [_find_base(snapshot.machines.get(each.cell), each) for each in replicas]
    parts = [_find_part(snapshot, each) for each in replicas]
    costs = [_cost_replica(prices, base, part) for base, part in zip(bases, parts, strict=True)]
    watts, per_hour = _sum_known(each[0] for each in costs), _sum_known(each[1] for each in costs)
    speed = _find_speed(service, bases)
    divided = len(replicas) if speed.source != "live" else 1
    memory = _sum_known(_find_memory(service, each) for each in replicas)
    nodes = sorted({each.cell for each in replicas})
    share = per_hour / divided if per_hour is not None and divided else None
    million = price_million_tokens(share, speed.tokens_per_second)
    return ModelCost(
        name=service.metadata.name,
        namespace=service.metadata.namespace,
        placed_node=nodes[0] if nodes else None,
        placed_nodes=nodes[:MOST_NODES],
        phase=service.status.phase,
        replicas=len(replicas),
        gpu=sum(each.devices for each in replicas),
        memory_required_gb=None if memory is None else round(memory / GIB, 2),
        utilization_pct=_find_utilization(service, bases, replicas),
        fitness_score=None if speed.level is None else compute_score(speed.level, speed.tokens_per_second),
        tokens_per_second=speed.tokens_per_second,
        speed_source=speed.source,
        watts=watts if replicas else 0.0,
        cost_per_hour=(None if per_hour is None else round(per_hour, 6)) if replicas else 0.0,
        cost_per_million_tokens=None if million is None else round(million, 6),
        unknown=_list_unknown(prices, bases, parts, memory, speed.tokens_per_second),
    )


def _list_unknown(
    prices: DensityPrices,
    bases: Sequence[ServingDevices | None],
    parts: Sequence[float | None],
    memory: float | None,
    tokens_per_second: float | None,
) -> list[str]:
    """Return what is not known of a service that has replicas."""
    found = set[str]()
    for base, part in zip(bases, parts, strict=True):
        if base is None:
            found.add("hardware of a node or host")
            continue
        if part is None:
            found.add("number of pods that share a device")
        device = name_priced_device(base.device_class)
        cost = find_device_cost(prices, base.device_class, base.vendor)
        if cost.watts is None:
            found.add(f"watts of {device}")
        if cost.per_hour is None and (prices.per_kwh is None or cost.watts is not None):
            found.add(f"perKwh, or perHour of {device}")
    if bases and memory is None:
        found.add("memory of a replica")
    if bases and tokens_per_second is None:
        found.add("tokens per second")
    return sorted(found)[:MOST_UNKNOWN]


def _find_part(snapshot: DensitySnapshot, replica: PlacedReplica) -> float | None:
    """Return the devices that a replica has to itself, or its part of one that others share; None: unknown."""
    machine = snapshot.machines.get(replica.cell)
    if machine is None:
        return None
    if replica.devices:
        return None if machine.device_share is None else replica.devices * machine.device_share
    # A host, or the processor of a node, is one device for all replicas that are there.
    return 1 / max(1, sum(not each.devices for each in snapshot.replicas_on.get(replica.cell, ())))


def _find_base(machine: ViewedMachine | None, replica: PlacedReplica) -> ServingDevices | None:
    """Return the devices of a replica as if nothing else ran there; None: unknown."""
    if machine is None or not machine.bases:
        return None
    count = max(1, replica.devices)
    return next((base for base in machine.bases if base.device_count == count), machine.bases[0])


def _cost_replica(
    prices: DensityPrices, base: ServingDevices | None, part: float | None
) -> tuple[float | None, float | None]:
    """Return the watts of a replica, and its cost for an hour; None: unknown."""
    if base is None or part is None:
        return None, None
    found = find_device_cost(prices, base.device_class, base.vendor)
    return (
        None if found.watts is None else found.watts * part,
        None if found.per_hour is None else found.per_hour * part,
    )


def _sum_known(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if there is none, or one is unknown."""
    found = list(values)
    known = [each for each in found if each is not None]
    return sum(known) if found and len(known) == len(found) else None


def _sum_all(values: Iterable[float | None]) -> float | None:
    """Return the sum, 0 of none; None if one is unknown."""
    found = list(values)
    return _sum_known(found) if found else 0.0


def _find_memory(service: InferenceService, replica: PlacedReplica) -> float | None:
    each = service.status.device_memory_bytes
    return each * replica.devices if replica.devices and each is not None else replica.memory_bytes


def _find_utilization(
    service: InferenceService, bases: Sequence[ServingDevices | None], replicas: Sequence[PlacedReplica]
) -> float | None:
    shares = [
        100 * needed / (base.memory_bytes * max(1, replica.devices))
        for base, replica in zip(bases, replicas, strict=True)
        if base is not None and base.memory_bytes and (needed := _find_memory(service, replica)) is not None
    ]
    return round(max(shares), 1) if shares else None


def _find_speed(service: InferenceService, bases: Sequence[ServingDevices | None]) -> _ServiceSpeed:
    """Return the speed of all replicas as it is now, else that of one as it was measured, else as it is estimated."""
    status = service.status
    stated = _find_stated(status.speeds, bases)
    level = stated.fit if stated else None
    if live := _read_rate(status.tokens_per_second):
        return _ServiceSpeed(live, "live", level)
    if status.performance is not None and (measured := _read_rate(status.performance.tokens_per_second)):
        return _ServiceSpeed(measured, "measured", level)
    estimated = _read_rate(stated.tokens_per_second or "") if stated else None
    if estimated is None:
        return _ServiceSpeed(None, None, level)
    return _ServiceSpeed(estimated, "measured" if stated and stated.source == "Measured" else "estimated", level)


def _find_stated(speeds: Sequence[ClassSpeed], bases: Sequence[ServingDevices | None]) -> ClassSpeed | None:
    """Return the slowest entry of the classes on which replicas are; they are listed from the fastest."""
    classes = {each.device_class for each in bases if each is not None}
    return next((each for each in reversed(speeds) if each.device_class in classes), None)


def _read_rate(text: str) -> float | None:
    return float(text) or None if text else None


def _sum_namespaces(models: Sequence[ModelCost]) -> list[NamespaceCost]:
    found: dict[str, list[ModelCost]] = {}
    for each in models:
        found.setdefault(each.namespace, []).append(each)
    return [_sum_namespace(namespace, members) for namespace, members in sorted(found.items())]


def _sum_namespace(namespace: str, members: Sequence[ModelCost]) -> NamespaceCost:
    # What has no replica takes nothing, and generates nothing.
    placed = [each for each in members if each.replicas]
    per_hour = _sum_all(each.cost_per_hour for each in members)
    tokens = _sum_known(_count_tokens(each) for each in placed)
    million = price_million_tokens(per_hour, tokens)
    memory = _sum_all(each.memory_required_gb for each in placed)
    return NamespaceCost(
        namespace=namespace,
        model_count=len(members),
        total_gpu=sum(each.gpu for each in members),
        total_memory_gb=None if memory is None else round(memory, 2),
        watts=_sum_all(each.watts for each in members),
        cost_per_hour=None if per_hour is None else round(per_hour, 6),
        known_cost_per_hour=round(sum(each.cost_per_hour or 0.0 for each in members), 6),
        tokens_per_second=tokens,
        cost_per_million_tokens=None if million is None else round(million, 6),
    )


def _count_tokens(cost: ModelCost) -> float | None:
    """Return the tokens per second of all replicas of a service: the speed of now is that of all already."""
    if cost.tokens_per_second is None or cost.speed_source == "live":
        return cost.tokens_per_second
    return cost.tokens_per_second * cost.replicas
