"""The accelerators that a service may use if it does not name a single one, and a prospective replica on each."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from controller.models.served import Companion, accelerator_of
from controller.placement.candidate_room import ProspectiveReplica
from controller.placement.pod_requests import count_requests
from controller.placement.pod_units import build_requirement
from controller.placement.pool_table import PoolTable, read_pools
from controller.placement.queued_service import read_speeds
from controller.placement.units import MEMORY, Amounts, HostRequirement, NodeRequirement, Unit, UnitKey
from controller.pod_settings import PodSettings
from controller.reconcile.conditions import find
from controller.reconcile.indexes import mounted_claims
from controller.services.checked_replica import CheckedReplica, check_replica
from controller.services.class_speeds import FindSpeeds, find_no_speeds
from controller.services.metal_processes import build_process_spec
from controller.services.pods.deployment import build_deployment, companion_weights, mounted_weights
from controller.services.pods.devices import request_devices
from controller.services.pods.queue_gate import is_queued
from controller.services.preconditions import ServiceProblem
from crds.inferenceservice import InferenceService
from crds.meta import AUTO_ACCELERATOR, Accelerator
from crds.model import Model
from crds.placement import ClassSpeed
from devices.vendors import Vendors
from kube.resources import ObjectKey
from kube.store import Store

_CACHED: Final = "Cached"


def list_candidates(
    service: InferenceService, model: Model | None, table: PoolTable, vendors: Vendors
) -> tuple[Accelerator, ...]:
    """Return the accelerators among which a service may choose, in its order of preference.

    Empty: there is nothing to choose, because its spec states an accelerator, or its Model does (or is missing) and no
    pool of the service has another one. Pools that do not exist are left out. Without pools, `auto` stands for all
    accelerators that have devices, and for hosts.
    """
    # The accelerator by the spec and its Model. Without the Model, that of the spec alone, which may be None.
    stated = accelerator_of(service, model) if model is not None else service.spec.hardware.accelerator
    of_pools = dict.fromkeys(table.find_accelerator(name) for name in service.spec.scheduling.pools)
    of_pools.pop("", None)  # find_accelerator returns "" for a pool that does not exist

    # `auto`: those of its pools, else all that have devices.
    if stated == AUTO_ACCELERATOR:
        return tuple(of_pools) if of_pools else tuple(name for name, vendor in vendors.items() if vendor.has_devices)

    # Pools of other accelerators than that of the Model are a choice, unless the service itself states one.
    if service.spec.hardware.accelerator is None and of_pools.keys() - {stated}:
        return tuple(of_pools)
    return ()  # a single one, or none: there is no choice


def state_accelerator(
    service: InferenceService, accelerator: Accelerator, table: PoolTable, replicas: int
) -> InferenceService:
    """Return a copy of a service that states one accelerator; pools of other accelerators are left out.

    Pools that do not exist stay, so that the check of the copy reports them.
    """
    spec = service.spec
    pools = [name for name in spec.scheduling.pools if table.find_accelerator(name) in {accelerator, ""}]
    return replace(
        service,
        spec=replace(
            spec,
            replicas=replicas,
            hardware=replace(spec.hardware, accelerator=accelerator),
            scheduling=replace(spec.scheduling, pools=pools),
        ),
    )


class CheckedCandidate(NamedTuple):
    """An accelerator that a service may use."""

    accelerator: Accelerator
    problem: ServiceProblem | None
    """Why the service can have no replica there."""
    model_problem: ServiceProblem | None
    """The problem of a Model, which a problem of the spec may hide."""
    prospect: ProspectiveReplica | None
    """One replica there; None if there is a problem."""
    speeds: tuple[ClassSpeed, ...] = ()
    """Its speed on each device class there."""


def check_candidate(
    store: Store,
    service: InferenceService,
    accelerator: Accelerator,
    model: Model | None,
    companions: Sequence[Companion],
    *,
    settings: PodSettings,
    has_claims: bool = True,
    find_speeds: FindSpeeds = find_no_speeds,
) -> CheckedCandidate:
    """Return whether an accelerator could run one replica of a service, and how fast on each of its device classes.

    If it could, `prospect` describes the replica to the queue, which counts the room for it. Weights count as fetched
    already, because they are fetched to a volume only after the accelerator is chosen.
    """
    table = read_pools(store, settings.vendors)
    service = state_accelerator(service, accelerator, table, replicas=1)

    # 1. Check the service as if it stated this accelerator, and as if its weights were fetched.
    # Companions are the further Models of a service, such as a draft model.
    assumed_model = _assume_weights(model) if model is not None else None
    assumed_companions = [
        companion._replace(model=_assume_weights(companion.model)) if companion.model is not None else companion
        for companion in companions
    ]
    replica = check_replica(store, service, assumed_model, assumed_companions, settings, has_claims=has_claims)
    problem = replica.checked.problem or _refuse_unqueued_pods(service, replica, settings)

    # 2. Without a problem, describe the replica to the queue, with its speeds.
    pools = service.spec.scheduling.pools or table.list_pools(accelerator)
    prospect = None if problem is not None else _build_prospect(service, replica, tuple(pools), settings)
    speeds: tuple[ClassSpeed, ...] = ()
    if prospect is not None:
        key = ObjectKey(service.metadata.namespace, service.metadata.name)
        speeds = find_speeds(key, service, accelerator, replica.checked.served)
        # The queue reads the speeds from the unit, which is what it places: they say where it may be, and where better.
        profile = read_speeds(speeds, service.spec.placement)
        prospect = prospect._replace(unit=replace(prospect.unit, speeds=profile))

    return CheckedCandidate(accelerator, problem, replica.checked.model_problem, prospect, speeds)


def _assume_weights(model: Model) -> Model:
    """Return a Model as if its weights were on its volume, which its condition Cached says.

    Unchanged stay a Model without that condition, one whose weights are there, and one that copies them to nodes.
    """
    cached = find(model.status.conditions, _CACHED)
    if cached is None or cached.status == "True" or model.spec.cache.scope == "node":
        return model

    conditions = [
        replace(condition, status="True") if condition.type == _CACHED else condition
        for condition in model.status.conditions
    ]
    return replace(model, status=replace(model.status, conditions=conditions))


def _refuse_unqueued_pods(
    service: InferenceService, replica: CheckedReplica, settings: PodSettings
) -> ServiceProblem | None:
    """Return the problem that the queue does not place the pods of a service, so that their room is unknown.

    None: it places them, or there are none, because the replica would run on a host or cannot run.
    """
    engine_in_pod = replica.choice
    if engine_in_pod is None or is_queued(service, request_devices(service, engine_in_pod.vendor), settings):
        return None
    message = "its pods do not go by the queue, which alone knows the room: set spec.scheduling.mode to Queue"
    return ServiceProblem("InvalidSpec", message, "Failed")


def _build_prospect(
    service: InferenceService, replica: CheckedReplica, pools: tuple[str, ...], settings: PodSettings
) -> ProspectiveReplica | None:
    """Return a replica that does not exist yet, as the queue would place it; None if it cannot run there.

    The queue compares its unit (what it needs, and which nodes or hosts suit it) with the free room. It also gets the
    spec of the pod if that mounts a volume which exists already, and so may be tied to the nodes of this volume.
    """
    served, choice = replica.checked.served, replica.choice
    if served is None:
        return None

    # Without an engine in a pod, it is a process on a host.
    if choice is None:
        spec, bytes_needed = service.spec, replica.checked.memory.total_bytes
        if bytes_needed is None:  # the memory of a replica is unknown
            return None
        process = build_process_spec(service, served, bytes_needed)
        selector, tolerations = frozenset(spec.node_selector.items()), tuple(spec.tolerations)
        requirement = HostRequirement(process.runtime, service.metadata.namespace, selector, tolerations)
        return ProspectiveReplica(_build_unit(service, {MEMORY: bytes_needed}, pools, requirement))

    # Else a pod.
    _, deployment = build_deployment(
        service, choice, mounted_weights(served.model), companion_weights(served), settings=settings
    )
    pod = deployment["spec"]["template"]["spec"]
    unit = _build_unit(service, count_requests(pod), pools, build_requirement(pod, None))
    # A volume of its own, such as a copy on a node, is made where a pod can be.
    is_restricted_by_volumes = served.model.spec.cache.scope != "node" and bool(mounted_claims(pod))
    metadata = {"namespace": service.metadata.namespace, "uid": ""}  # there is no such pod yet
    return ProspectiveReplica(unit, {"metadata": metadata, "spec": pod} if is_restricted_by_volumes else None)


def _build_unit(
    service: InferenceService,
    need: Amounts,
    pools: tuple[str, ...],
    requirement: NodeRequirement | HostRequirement,
) -> Unit:
    """Return what the queue would place for one more replica: a unit of one pod or process that waits at the end."""
    metadata, is_process = service.metadata, isinstance(requirement, HostRequirement)
    return Unit(
        key=UnitKey("process" if is_process else "pod", metadata.namespace, metadata.name),
        uid="",  # the API server gives it one later
        service=ObjectKey(metadata.namespace, metadata.name),
        priority=service.spec.priority,
        # It does not exist yet, so all that wait are before it.
        enqueued_at=math.inf,
        parts=(need,),  # one pod or process
        pools=pools,
        requirement=requirement,
        is_protected=service.spec.eviction_protection,
    )
