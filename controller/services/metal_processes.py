"""The replicas of a service on hosts: the spec, the state and the release of its MetalProcesses.

A MetalProcess is released, which means that its finalizer is removed, only when no host can be running it any more.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from controller.models.served import Served
from controller.placement.capacity import HostCapacity, list_capacities
from controller.placement.displacement import choose_moves, find_displacements, is_requested, list_moved, read_orders
from controller.placement.queued_service import HostDemands, require_host
from controller.placement.units import HostRequirement
from controller.reconcile.indexes import HOST_INDEX
from controller.reconcile.plan import Patch, Plan, Reconciler, Snapshot, decode_stored
from controller.reconcile.triggers import Trigger, all_but_status, serving_facts
from controller.services import diagnosis, replica_memory
from controller.services.endpoints import find_exposed_hosts
from controller.services.preconditions import ServiceProblem
from controller.services.replica_memory import MemoryAdvice
from controller.services.replicas import Replicas
from controller.services.rollout import (
    MetalProcessSteps,
    SortedProcesses,
    is_current,
    is_host_lost,
    plan_steps,
    process_prefix,
    process_ref,
    sort_processes,
)
from controller.services.tokens import token_name
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_MANAGED_BY, MANAGED_BY, PROCESS_FINALIZER, REBALANCE_AT, ObjectMeta
from crds.metalhost import MetalHost
from crds.metalprocess import (
    ADAPTERS_ON_REQUEST,
    Artifact,
    FurtherArtifact,
    HostedProcess,
    MetalProcess,
    MetalProcessSpec,
)
from crds.model import Model
from crds.serving import stated_options
from kube.client import Client, Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES, ObjectKey, object_key
from kube.store import Store

LOOK_AGAIN_SECONDS: Final = 10.0
BINDING_SECONDS: Final = 2.0
"""Time after which a service is looked at again that waits for a binding although its replica fits."""


def observe_hosts(
    snapshot: Snapshot, service: InferenceService, served: Served | None, wanted: int, memory: int | None = None
) -> Replicas:
    """Return the replicas of a service on hosts, and the next steps towards `wanted` ones of `memory` bytes each.

    1. Read the hosts. 2. Sort the processes: which serve on, are too many, or leave their host. 3. Plan which to
    create and delete, and diagnose those that do not serve. Without `served` or `memory`, none is created.
    """
    children = snapshot.children(METAL_PROCESSES, service.metadata.namespace, service.metadata.uid)
    spec = build_process_spec(service, served, memory) if served is not None and memory is not None else None
    if not children and not (spec and wanted):
        return Replicas(total=0)
    processes = decode_stored(snapshot.store, METAL_PROCESSES, children, MetalProcess)

    # 1. Read all hosts only for a replica that waits for one of them, or may move because the annotation asks it.
    requested_at = service.metadata.annotations.get(REBALANCE_AT)
    is_waiting = len(processes) < wanted or any(process.spec.host_name is None for process in processes)
    if is_waiting or is_requested(requested_at, snapshot.now):
        hosts, capacities = list_hosts(snapshot.store)
    else:
        hosts, capacities = read_hosts(snapshot.store, {process.spec.host_name for process in processes}), []

    # 2. Find the processes that move to a better host, and sort all by their next step.
    # A process is named by a hash of its spec. One that has a host is kept after a change of an estimated memory.
    name = process_prefix(service.metadata.name, spec) if spec else None
    estimated = spec if served is not None and not replica_memory.is_memory_stated(served) else None
    # An exposed host has a ready endpoint, by which clients reach its process.
    exposed = find_exposed_hosts(snapshot.store, service.metadata.namespace, service.metadata.name)
    demands = HostDemands(frozenset(service.spec.node_selector.items()), tuple(service.spec.tolerations))

    moving_uids = set[str]()
    if name is not None and (requested_at or list_moved(processes)):
        current = [process for process in processes if is_current(process, name, estimated)]
        moving_uids = choose_moves(current, requested_at, demands, capacities, snapshot.now)
    # Why processes should leave their hosts, by uid: by an order of an administrator, or to move to a better host.
    displacements = find_displacements(processes, read_orders(snapshot.store), demands.tolerations, moving_uids)
    grouped = sort_processes(
        name,
        wanted,
        processes,
        hosts,
        exposed=exposed,
        estimated=estimated,
        demands=demands,
        displacements=displacements,
    )

    # 3. Plan the steps, and describe the replicas. `taken` are the names that no new process may have.
    taken = {obj["metadata"]["name"] for obj in children}
    steps = plan_steps(
        service, spec, wanted, grouped, exposed=exposed, taken=taken, capacities=capacities, now=snapshot.now
    )

    def advise(free_bytes: int) -> MemoryAdvice:
        return replica_memory.advise_memory(service, served, free_bytes) if served else MemoryAdvice()

    problems = _diagnose_kept(grouped, capacities, advise, demands)
    return _describe_replicas(grouped, wanted, hosts, steps, problems)


def _describe_replicas(
    grouped: SortedProcesses,
    wanted: int,
    hosts: Mapping[str, MetalHost],
    steps: MetalProcessSteps,
    problems: Sequence[ServiceProblem | None],
) -> Replicas:
    """Return the counts of the replicas on hosts, their most severe problem, and the next steps.

    Kept processes are those that are wanted; surplus ones are too many, and superseded ones serve until kept ones do.
    `ready` counts for the wanted spec alone, at most `wanted`; `available` counts all that serve on hosts that live.
    """
    # A displaced process, which is about to leave its host, has the wanted spec and counts while it answers.
    displaced = (leaving.process for leaving in grouped.displaced)
    answering = [process for process in (*grouped.kept, *displaced) if process.status.phase == "Ready"]

    # All that exist, of any spec.
    existing = (*grouped.kept, *grouped.surplus, *grouped.superseded)
    serving = [process for process in existing if process.status.phase == "Ready"]

    return Replicas(
        total=len(existing),
        ready=tuple(sorted(process.metadata.uid for process in answering[:wanted])),
        available=sum(not is_host_lost(process.spec.host_name or "", hosts) for process in serving),
        nodes=frozenset(process.spec.host_name for process in grouped.kept if process.spec.host_name),
        problem=diagnosis.pick_most_severe(problems),
        create=steps.create,
        patch=steps.patch,
        delete=steps.delete,
        again_seconds=_find_recheck_seconds(steps, grouped, problems),
    )


def _find_recheck_seconds(
    steps: MetalProcessSteps, grouped: SortedProcesses, problems: Sequence[ServiceProblem | None]
) -> float | None:
    """Return the seconds after which a service is decided again although no event enqueues it; None: it need not be."""
    if any(problem is not None and problem.reason == "Binding" for problem in problems):  # it fits on a host already
        # It will be bound in a moment, or other processes will take the memory that is free for it now.
        return BINDING_SECONDS
    if grouped.superseded and any(process.spec.host_name is None for process in grouped.kept):
        # A new process waits for a host. Memory that others free may be enough together with that of the superseded
        # process, which is then deleted; no event tells of it.
        return min(steps.again_seconds, LOOK_AGAIN_SECONDS) if steps.again_seconds else LOOK_AGAIN_SECONDS
    return steps.again_seconds


def _diagnose_kept(
    grouped: SortedProcesses,
    capacities: Sequence[HostCapacity],
    advise: Callable[[int], MemoryAdvice],
    demands: HostDemands,
) -> list[ServiceProblem | None]:
    """Return why each process that is kept does not serve.

    Processes that wait for a host with the same demands and memory have the same diagnosis, which is made once.
    """
    problems = []
    # The diagnoses of processes that wait for a host, by their demands and memory.
    waiting_problems: dict[tuple[HostRequirement, int], ServiceProblem | None] = {}

    for process in grouped.kept:
        is_waiting = process.spec.host_name is None
        requirement = require_host(process, demands)
        demand = requirement, process.spec.memory_bytes

        if is_waiting and demand in waiting_problems:
            problem = waiting_problems[demand]
        else:
            problem = diagnosis.diagnose_process(process, capacities, grouped, advise, requirement)
            if is_waiting:
                waiting_problems[demand] = problem
        problems.append(problem)
    return problems


def list_hosts(store: Store) -> tuple[dict[str, MetalHost], list[HostCapacity]]:
    """Return all registered hosts, and the capacities of those that live: the same for all that wait."""

    def compute() -> tuple[dict[str, MetalHost], list[HostCapacity]]:
        hosts = read_hosts(store, [host["metadata"]["name"] for host in store.list(METAL_HOSTS)])
        return hosts, list_capacities(store, [host for name, host in hosts.items() if not is_host_lost(name, hosts)])

    return store.summarize((METAL_HOSTS, METAL_PROCESSES), "hosts and capacities", compute)


def read_hosts(store: Store, names: Iterable[str | None]) -> dict[str, MetalHost]:
    """Return the hosts with these names that are registered and stay, by name."""
    stored = [host for name in names if name and (host := store.get(METAL_HOSTS, name)) is not None]
    decoded = decode_stored(store, METAL_HOSTS, stored, MetalHost)
    return {host.metadata.name: host for host in decoded if host.metadata.deletion_timestamp is None}


def build_process_spec(service: InferenceService, served: Served, memory_bytes: int) -> MetalProcessSpec:
    """Return the spec of the process that serves one replica; its host reserves `memory_bytes`."""
    spec, model = service.spec, served.model
    return MetalProcessSpec(
        service_name=service.metadata.name,
        model_name=model.metadata.name,
        runtime=served.runtime,
        artifact=build_artifact(model),
        memory_bytes=memory_bytes,
        token_secret=token_name(service.metadata.name),
        further_artifacts=[
            FurtherArtifact(
                role=companion.role,
                artifact=build_artifact(companion.model),
                scale=companion.scale,
                request_name=companion.request_name,
                source_secret=_name_source_secret(companion.model),
            )
            for companion in served.companions
            if companion.model is not None
        ],
        draft_max_tokens=spec.speculative.max_tokens if spec.speculative else None,
        priority=spec.priority,
        protected=spec.eviction_protection,
        drain_seconds=spec.drain_seconds,
        benchmark=spec.benchmark,
        source_secret=_name_source_secret(model),
        features=[ADAPTERS_ON_REQUEST] if any(companion.request_name for companion in served.companions) else [],
        **stated_options(spec),  # those of the engine, such as the context length
    )


def build_artifact(model: Model) -> Artifact:
    """Return what a host needs to fetch the weights of a Model."""
    return Artifact(
        source=model.spec.source,
        revision=model.status.revision,
        sha256=model.spec.sha256 or model.status.sha256,
        size_bytes=model.status.size_bytes,
        files=model.spec.files,
        mirrors=model.spec.mirrors,
    )


def _name_source_secret(model: Model) -> str | None:
    return model.spec.source_secret_ref.name if model.spec.source_secret_ref else None


def release_reconciler(wait_seconds: Callable[[str], float | None]) -> Reconciler:
    """Return the reconciler of MetalProcesses: it releases each once no host can be running it, and deletes orphans.

    To release a process is to remove its finalizer. A host whose Lease has expired may be alive behind a broken
    network, so its processes are released only after a wait: `wait_seconds` returns the rest of it for the named host;
    None: its Lease has not expired.
    """

    async def observe(_client: Client, snapshot: Snapshot, key: ObjectKey) -> float | None:
        # Called before each decision. The result becomes `snapshot.inputs`, which `decide_release` reads.
        process = snapshot.get(METAL_PROCESSES, key)
        host = process["spec"].get("hostName") if process else None
        return wait_seconds(host) if host else None

    return Reconciler(
        resource=METAL_PROCESSES,
        decide=decide_release,
        observe=observe,
        # A process is decided again when these facts of it change, or the `serving_facts` of its host.
        reads=_release_facts,
        triggers=(Trigger(METAL_HOSTS, _deleted_processes_of_host, serving_facts),),
    )


def _release_facts(process: Obj) -> object:
    return all_but_status(process), process.get("status", {}).get("phase")


def _deleted_processes_of_host(store: Store, host: Obj) -> list[ObjectKey]:
    """Return the processes of a host that are being deleted: a change of the host may release them."""
    name = host["metadata"]["name"]
    bound = store.by_index(METAL_PROCESSES, HOST_INDEX, name)
    return [object_key(obj) for obj in bound if "deletionTimestamp" in obj["metadata"]]


def decide_release(snapshot: Snapshot, key: ObjectKey) -> Plan:
    """Remove the finalizer of a process that is being deleted once no host can be running it; delete an orphan.

    No host can if none was chosen, if its MetalHost is gone, if its agent has reported the process as stopped, or if it
    has been silent for long enough. The input is the time for which it must still be; None: it is not silent.
    """
    process, wait_seconds = snapshot.read(METAL_PROCESSES, key, HostedProcess), snapshot.inputs
    if process is None:
        return Plan()

    # An orphan is deleted. Of others, only those that are being deleted and have our finalizer matter.
    metadata, host = process.metadata, process.spec.host_name
    if _is_orphan(metadata):
        return Plan(delete=(process_ref(metadata),))
    if metadata.deletion_timestamp is None or PROCESS_FINALIZER not in metadata.finalizers:
        return Plan()

    # Wait while a host may be running it.
    host_exists = host is not None and snapshot.get(METAL_HOSTS, ObjectKey("", host)) is not None
    # `wait_seconds` None: the Lease of the host has not expired.
    may_host_be_alive = host_exists and (wait_seconds is None or wait_seconds > 0)
    if may_host_be_alive and process.status.phase != "Stopped":
        return Plan(again_seconds=wait_seconds)

    # Release it: no host can be running it.
    kept = [finalizer for finalizer in metadata.finalizers if finalizer != PROCESS_FINALIZER]
    operations = (
        {"op": "test", "path": "/metadata/resourceVersion", "value": metadata.resource_version},
        {"op": "replace", "path": "/metadata/finalizers", "value": kept},
    )
    return Plan(patch=(Patch(process_ref(metadata), operations),))


def _is_orphan(metadata: ObjectMeta) -> bool:
    """Return whether a process of ours lost its service by a deletion that orphans what the service owns.

    Nobody else may delete it, and it would keep memory of its host for ever.
    """
    is_ours = metadata.labels.get(LABEL_MANAGED_BY) == MANAGED_BY
    has_owner = any(reference.controller for reference in metadata.owner_references)
    return is_ours and not has_owner and metadata.deletion_timestamp is None
