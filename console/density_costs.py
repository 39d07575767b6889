"""Resources and costs of services, by service and by namespace: pure functions of a snapshot and of prices."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from console.density_answers import CostAnswer, ModelCost, NamespaceCost
from console.density_prices import DensityPrices, find_device_cost, name_priced_device, price_million_tokens
from console.density_queries import Page
from console.density_snapshot import DensitySnapshot, PlacedReplica, Visibility
from console.fit_table import compute_score
from controller.placement.machines import ViewedMachine
from crds.inferenceservice import InferenceService
from crds.placement import FitLevel
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


class _MachineShare(NamedTuple):
    """The part of its machine that a replica has; None is unknown."""

    memory_bytes: float | None
    """Bytes that it needs, of its devices if it has some."""
    base: ServingDevices | None = None
    """Its devices as if nothing else ran there."""
    utilization: float | None = None
    """Percentage of the memory of its devices that it needs."""
    watts: float | None = None
    per_hour: float | None = None
    unknown: Sequence[str] = ()
    """Facts that are not known."""


def list_costs(snapshot: DensitySnapshot, prices: DensityPrices, visible: Visibility, page: Page) -> CostAnswer:
    """Return a page of the services that the caller may see with what each costs, and the sums of their namespaces."""
    # visible is None: the caller may see all namespaces. `groupby` below needs the order by namespace.
    shown = sorted(
        (service for service in snapshot.services if visible is None or service.metadata.namespace in visible),
        key=lambda service: (service.metadata.namespace, service.metadata.name),
    )
    models = [_describe_service(snapshot, prices, service) for service in shown]

    # The sums are over all services of a namespace, whatever part of them is on the page.
    members = itertools.groupby(models, key=lambda model: model.namespace)
    namespaces = [_sum_namespace(namespace, list(costs)) for namespace, costs in members]
    return CostAnswer(
        currency=prices.currency,
        models=list(page.cut(models)),
        namespaces=namespaces,
        total=len(models),
        next_offset=page.find_next(len(models)),
    )


def _describe_service(snapshot: DensitySnapshot, prices: DensityPrices, service: InferenceService) -> ModelCost:
    """Return the resources and costs of a service: the sums of the shares of machines that its replicas have.

    One unknown share makes a sum unknown (None); `unknown` then names the fact that is missing. A service without
    replicas costs 0.
    """
    # 1. The shares of its replicas, and their sums; a sum is None if a share of it is unknown, or if there is no
    #    replica. A cell is a node or a host.
    replicas = snapshot.replicas_of.get((service.metadata.namespace, service.metadata.name), ())
    shares = [_describe_share(snapshot, prices, service, replica) for replica in replicas]
    watts = _sum_unless_empty(share.watts for share in shares)
    per_hour = _sum_unless_empty(share.per_hour for share in shares)
    memory = _sum_unless_empty(share.memory_bytes for share in shares)
    utilizations = [share.utilization for share in shares if share.utilization is not None]
    nodes = sorted({replica.cell for replica in replicas})

    # 2. Its speed, which the status lists by class of devices.
    #    base: the devices of a share; None: hardware or processor unknown
    speed = _find_speed(service, {share.base.device_class for share in shares if share.base is not None})

    # 3. The cost by which tokens are priced: that of the replicas that have this speed. A live speed is that of all
    #    replicas, any other that of one.
    cost_divisor = 1 if speed.source == "live" else len(replicas)
    priced_per_hour = per_hour / cost_divisor if per_hour is not None and cost_divisor else None

    # 4. The facts that are missing for a value that is None.
    unknown = {fact for share in shares for fact in share.unknown}
    if replicas and memory is None:
        unknown.add("memory of a replica")
    if replicas and speed.tokens_per_second is None:
        unknown.add("tokens per second")

    # A service without replicas takes no power and costs nothing; its sums above are None.
    return ModelCost(
        name=service.metadata.name,
        namespace=service.metadata.namespace,
        placed_node=nodes[0] if nodes else None,
        placed_nodes=nodes[:MOST_NODES],
        phase=service.status.phase,
        replicas=len(replicas),
        gpu=sum(replica.devices for replica in replicas),
        memory_required_gb=_round(None if memory is None else memory / GIB, 2),
        utilization_pct=round(max(utilizations), 1) if utilizations else None,
        fitness_score=None if speed.level is None else compute_score(speed.level, speed.tokens_per_second),
        tokens_per_second=speed.tokens_per_second,
        speed_source=speed.source,
        watts=watts if replicas else 0.0,
        cost_per_hour=_round(per_hour, 6) if replicas else 0.0,
        cost_per_million_tokens=_round(price_million_tokens(priced_per_hour, speed.tokens_per_second), 6),
        unknown=sorted(unknown)[:MOST_UNKNOWN],
    )


def _describe_share(
    snapshot: DensitySnapshot, prices: DensityPrices, service: InferenceService, replica: PlacedReplica
) -> _MachineShare:
    """Return the part of its machine that a replica has: its memory, and its share of watts and hourly cost.

    A value that cannot be computed is None, and the list of unknown facts says what is missing for it. A cell is a node
    or a host, and a base the devices of a replica on an otherwise empty machine.
    """
    # 1. Its memory: by the service's status on devices, otherwise as the replica reserves it.
    device_bytes, memory_bytes = service.status.device_memory_bytes, replica.memory_bytes
    if replica.devices and device_bytes is not None:
        memory_bytes = device_bytes * replica.devices

    # 2. Its devices. A replica without any computes on its host, or on the processor of its node, as on one device.
    #    machine.bases: one entry for each number of devices that a replica may have; empty: the hardware is unknown
    machine, device_count = snapshot.machines.get(replica.cell), max(1, replica.devices)
    if machine is None or not machine.bases:
        return _MachineShare(memory_bytes, unknown=["hardware of a node or host"])
    if not replica.devices and machine.cell.kind == "node" and machine.accelerator != "cpu":
        # The bases of this node are those of its devices, and say nothing of its processor.
        return _MachineShare(memory_bytes, unknown=["processor of a node with devices"])
    bases_of_count = (base for base in machine.bases if base.device_count == device_count)
    # Without a base for this number of devices, the first one will do: it is of the same kind of devices.
    base = next(bases_of_count, machine.bases[0])
    utilization = None
    if base.memory_bytes and memory_bytes is not None:
        utilization = 100 * memory_bytes / (base.memory_bytes * device_count)

    # 3. Watts and cost: those of one device, times the number of devices; each fact that is missing gets a name.
    share = _count_devices(snapshot, machine, replica)
    cost = find_device_cost(prices, base.device_class, base.vendor)
    device, unknown = name_priced_device(base.device_class), list[str]()
    if share is None:
        unknown.append("number of pods that share a device")
    if cost.watts is None:
        unknown.append(f"watts of {device}")
    # If only the watts are missing for a price of electricity, they are named already.
    if cost.per_hour is None and (prices.per_kwh is None or cost.watts is not None):
        unknown.append(f"perKwh, or perHour of {device}")
    watts = None if share is None or cost.watts is None else cost.watts * share
    per_hour = None if share is None or cost.per_hour is None else cost.per_hour * share
    return _MachineShare(memory_bytes, base, utilization, watts, per_hour, unknown)


def _count_devices(snapshot: DensitySnapshot, machine: ViewedMachine, replica: PlacedReplica) -> float | None:
    """Return how many whole devices a replica has, less than one if it shares a device; None: that is unknown."""
    if replica.devices:
        # device_share: the part of a device that one requested device is; None: unknown
        return None if machine.device_share is None else replica.devices * machine.device_share
    # A host, or the processor of a node, is one device, which the replicas there that have no devices share.
    neighbours = snapshot.replicas_on.get(replica.cell, ())
    return 1 / max(1, sum(not neighbour.devices for neighbour in neighbours))


def _sum_unless_empty(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if there are no values, or one is unknown."""
    numbers = list(values)
    present = [number for number in numbers if number is not None]
    return sum(present) if numbers and len(present) == len(numbers) else None


def _sum_or_zero(values: Iterable[float | None]) -> float | None:
    """Return the sum, 0 if there are no values; None if one is unknown."""
    numbers = list(values)
    return _sum_unless_empty(numbers) if numbers else 0.0


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _find_speed(service: InferenceService, classes: set[str]) -> _ServiceSpeed:
    """Return the tokens a second of a service, and the level of its fit: both by its status.

    The speed is the live one of all replicas; else the measured one, else the estimated one, of one replica; else None.

    Args:
        service: the service.
        classes: the device classes of its replicas. The status lists a fit and a speed by class; the slowest counts.
    """
    # The listed speed of the slowest of these classes, with its level. Speeds are listed from the fastest.
    status = service.status
    listed = next((speed for speed in reversed(status.speeds) if speed.device_class in classes), None)
    level = listed.fit if listed else None

    # 1. The live speed, else the measured one; `_read_rate` returns None for a speed that is unknown or 0.
    if live := _read_rate(status.tokens_per_second):
        return _ServiceSpeed(live, "live", level)
    if status.performance is not None and (measured := _read_rate(status.performance.tokens_per_second)):
        return _ServiceSpeed(measured, "measured", level)

    # 2. The listed speed, from measurements of this class of devices or from an estimate: its source says which.
    estimated = _read_rate(listed.tokens_per_second or "") if listed else None
    if listed is None or estimated is None:
        return _ServiceSpeed(None, None, level)
    return _ServiceSpeed(estimated, "measured" if listed.source == "Measured" else "estimated", level)


def _read_rate(text: str) -> float | None:
    """Return a rate of the API; None if it is unknown or 0."""
    rate = float(text) if text else 0.0
    return rate or None


def _sum_namespace(namespace: str, members: Sequence[ModelCost]) -> NamespaceCost:
    """Return the sums of the services of a namespace; one unknown value makes a sum unknown (None).

    The exception is `known_cost_per_hour`, which adds up the costs that are known.
    """
    # The cost of a service without a replica is 0, so the costs of all services are added.
    per_hour = _sum_or_zero(member.cost_per_hour for member in members)

    # Such a service has no memory and no speed: these sums are over services with replicas only. Without any, the
    # memory is 0, and the speed, of which there is none, is None.
    placed = [member for member in members if member.replicas]
    tokens = _sum_unless_empty(_count_tokens(cost) for cost in placed)
    return NamespaceCost(
        namespace=namespace,
        model_count=len(members),
        total_gpu=sum(member.gpu for member in members),
        total_memory_gb=_round(_sum_or_zero(cost.memory_required_gb for cost in placed), 2),
        watts=_sum_or_zero(member.watts for member in members),
        cost_per_hour=_round(per_hour, 6),
        known_cost_per_hour=round(sum(member.cost_per_hour or 0.0 for member in members), 6),
        tokens_per_second=tokens,
        cost_per_million_tokens=_round(price_million_tokens(per_hour, tokens), 6),
    )


def _count_tokens(cost: ModelCost) -> float | None:
    """Return the tokens per second of all replicas of a service; a live speed covers all of them already."""
    if cost.tokens_per_second is None or cost.speed_source == "live":
        return cost.tokens_per_second
    return cost.tokens_per_second * cost.replicas
