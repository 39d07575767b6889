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
        (service for service in snapshot.services if visible is None or service.metadata.namespace in visible),
        key=lambda service: (service.metadata.namespace, service.metadata.name),
    )
    models = [_describe_service(snapshot, prices, service) for service in shown]
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
    bases = [_find_base(snapshot.machines.get(replica.cell), replica) for replica in replicas]
    parts = [_find_part(snapshot, replica) for replica in replicas]
    costs = [_cost_replica(prices, base, part) for base, part in zip(bases, parts, strict=True)]
    watts, per_hour = _sum_known(cost[0] for cost in costs), _sum_known(cost[1] for cost in costs)
    speed = _find_speed(service, bases)
    divided = len(replicas) if speed.source != "live" else 1
    memory = _sum_known(_find_memory(service, replica) for replica in replicas)
    nodes = sorted({replica.cell for replica in replicas})
    share = per_hour / divided if per_hour is not None and divided else None
    million = price_million_tokens(share, speed.tokens_per_second)
    return ModelCost(
        name=service.metadata.name,
        namespace=service.metadata.namespace,
        placed_node=nodes[0] if nodes else None,
        placed_nodes=nodes[:MOST_NODES],
        phase=service.status.phase,
        replicas=len(replicas),
        gpu=sum(replica.devices for replica in replicas),
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
    unknown = set[str]()
    for base, part in zip(bases, parts, strict=True):
        if base is None:
            unknown.add("hardware of a node or host")
            continue
        if part is None:
            unknown.add("number of pods that share a device")
        device = name_priced_device(base.device_class)
        cost = find_device_cost(prices, base.device_class, base.vendor)
        if cost.watts is None:
            unknown.add(f"watts of {device}")
        if cost.per_hour is None and (prices.per_kwh is None or cost.watts is not None):
            unknown.add(f"perKwh, or perHour of {device}")
    if bases and memory is None:
        unknown.add("memory of a replica")
    if bases and tokens_per_second is None:
        unknown.add("tokens per second")
    return sorted(unknown)[:MOST_UNKNOWN]


def _find_part(snapshot: DensitySnapshot, replica: PlacedReplica) -> float | None:
    """Return the devices that a replica has to itself, or its part of one that others share; None: unknown."""
    machine = snapshot.machines.get(replica.cell)
    if machine is None:
        return None
    if replica.devices:
        return None if machine.device_share is None else replica.devices * machine.device_share
    # A host, or the processor of a node, is one device for all replicas that are there.
    return 1 / max(1, sum(not placed_replica.devices for placed_replica in snapshot.replicas_on.get(replica.cell, ())))


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
    cost = find_device_cost(prices, base.device_class, base.vendor)
    return (
        None if cost.watts is None else cost.watts * part,
        None if cost.per_hour is None else cost.per_hour * part,
    )


def _sum_known(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if there is none, or one is unknown."""
    numbers = list(values)
    present = [number for number in numbers if number is not None]
    return sum(present) if numbers and len(present) == len(numbers) else None


def _sum_all(values: Iterable[float | None]) -> float | None:
    """Return the sum, 0 of none; None if one is unknown."""
    numbers = list(values)
    return _sum_known(numbers) if numbers else 0.0


def _find_memory(service: InferenceService, replica: PlacedReplica) -> float | None:
    device_bytes = service.status.device_memory_bytes
    return device_bytes * replica.devices if replica.devices and device_bytes is not None else replica.memory_bytes


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
    classes = {base.device_class for base in bases if base is not None}
    return next((speed for speed in reversed(speeds) if speed.device_class in classes), None)


def _read_rate(text: str) -> float | None:
    return float(text) or None if text else None


def _sum_namespaces(models: Sequence[ModelCost]) -> list[NamespaceCost]:
    by_namespace: dict[str, list[ModelCost]] = {}
    for model in models:
        by_namespace.setdefault(model.namespace, []).append(model)
    return [_sum_namespace(namespace, members) for namespace, members in sorted(by_namespace.items())]


def _sum_namespace(namespace: str, members: Sequence[ModelCost]) -> NamespaceCost:
    # What has no replica takes nothing, and generates nothing.
    placed = [member for member in members if member.replicas]
    per_hour = _sum_all(member.cost_per_hour for member in members)
    tokens = _sum_known(_count_tokens(cost) for cost in placed)
    million = price_million_tokens(per_hour, tokens)
    memory = _sum_all(cost.memory_required_gb for cost in placed)
    return NamespaceCost(
        namespace=namespace,
        model_count=len(members),
        total_gpu=sum(member.gpu for member in members),
        total_memory_gb=None if memory is None else round(memory, 2),
        watts=_sum_all(member.watts for member in members),
        cost_per_hour=None if per_hour is None else round(per_hour, 6),
        known_cost_per_hour=round(sum(member.cost_per_hour or 0.0 for member in members), 6),
        tokens_per_second=tokens,
        cost_per_million_tokens=None if million is None else round(million, 6),
    )


def _count_tokens(cost: ModelCost) -> float | None:
    """Return the tokens per second of all replicas of a service: the speed of now is that of all already."""
    if cost.tokens_per_second is None or cost.speed_source == "live":
        return cost.tokens_per_second
    return cost.tokens_per_second * cost.replicas
