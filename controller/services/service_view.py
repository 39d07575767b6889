"""The view of a service: all of the watch cache that decides about it, gathered once; and the inputs beside it."""

from typing import Final, NamedTuple

import msgspec

from controller.models.served import runtime_of
from controller.placement.standing import ServiceStanding
from controller.pod_settings import DEFAULT_SETTINGS, PodSettings
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.reconcile.plan import Snapshot
from controller.services import preconditions
from controller.services.accelerator_choice import ChosenAccelerators
from controller.services.checked_replica import CheckedReplica, check_replica, read_models
from controller.services.endpoints import list_ready_endpoints, list_replica_addresses
from controller.services.metal_processes import observe_hosts
from controller.services.pods.pod_replicas import observe_pods
from controller.services.queue_report import NO_REPORT, KueueReport, explain_kueue_wait
from controller.services.replica_counts import find_single_label
from controller.services.replica_memory import ReplicaMemory
from controller.services.replicas import Replicas, combine_replicas
from controller.services.several_accelerators import find_pod_runtime, list_parts, observe_several, summarize_parts
from controller.services.speed_report import SpeedReport
from controller.services.status import ServiceView
from controller.services.tokens import TokenStep
from controller.services.traffic import Traffic
from crds.inferenceservice import InferenceService, wanted_replicas
from kube.resources import ENDPOINT_SLICES, METAL_HOSTS, METAL_PROCESSES, PODS, ObjectKey
from runtimes.probe import ProbeResult

AWAITS_UPDATE: Final = "its pods are of an earlier version of Pomona until other services have been updated"
"""Remark about a service whose pods an update replaces after those of other services."""


class ViewFacts(NamedTuple):
    """Facts about a service that are not in the watch cache, by which its view is built."""

    may_roll_out: bool = True
    """True if an update of Pomona may replace the pods of this service now."""
    standing: ServiceStanding | None = None
    """Place in the queue of the first replica that waits; None: none waits."""
    kueue: KueueReport = NO_REPORT
    """Facts about Kueue."""
    accelerator_choice: ChosenAccelerators | None = None
    """The accelerators of a service that may use several; None: it uses one."""
    has_claims: bool = True
    """True if devices can be claimed in the cluster."""


NO_FACTS: Final = ViewFacts()


class ServiceInputs(NamedTuple):
    """Inputs that are not in the watch cache."""

    view: ServiceView | None = None
    """All inputs of the watch cache, as they were at `revision` of the store."""
    revision: int = 0
    answer: ProbeResult | None = None
    """The last answer to the question of `view`; None before the first, or if there is nothing to probe."""
    token: TokenStep = TokenStep()
    is_monitored: bool = False
    """True if the cluster has PodMonitors."""
    traffic: Traffic | None = None
    """The traffic of its pods; None before it was read."""
    facts: ViewFacts = NO_FACTS
    speed: SpeedReport = SpeedReport()
    """All that is known of its speed."""


def build_view(
    snapshot: Snapshot,
    key: ObjectKey,
    service: InferenceService,
    settings: PodSettings = DEFAULT_SETTINGS,
    facts: ViewFacts = NO_FACTS,
) -> ServiceView:
    """Gather all that the watch cache says about a service, and what follows: its replicas, their problem, endpoints.

    `facts` adds what is not in the cache. Nothing is written here; `decide_service` makes the plan from the view.
    """
    may_roll_out, kueue, chosen, store = facts.may_roll_out, facts.kueue, facts.accelerator_choice, snapshot.store
    model, companions = read_models(snapshot, service)
    wanted = wanted_replicas(service)

    # 1. Its replicas, and the blocker, because of which none can be created now: on one accelerator, or on several.
    pod_runtime = ""  # stays empty for one accelerator
    if chosen is None:
        described_service = service  # the one that the remarks are about
        replica = check_replica(
            store, service, model, companions, settings, other_problem=kueue.problem, has_claims=facts.has_claims
        )
        blocker = replica.checked.problem
        replicas = _observe_replicas(snapshot, service, replica, wanted, settings=settings, may_roll_out=may_roll_out)
    else:
        parts = list_parts(store, service, chosen, model, companions, settings=settings)
        replica, described_service, blocker = summarize_parts(service, chosen, parts)
        pod_runtime = find_pod_runtime(parts)
        replicas = observe_several(snapshot, service, parts, wanted, settings=settings, may_roll_out=may_roll_out)
    checked = replica.checked
    replicas = msgspec.structs.replace(replicas, problem=explain_kueue_wait(replicas.problem, kueue.standing))

    # 2. Its endpoints; only those at the address of a replica are its own, and are sent its token.
    slices = store.by_index(ENDPOINT_SLICES, SERVICE_INDEX, namespaced(key.namespace, key.name))
    endpoints = list_ready_endpoints(slices)
    addresses = _list_replica_addresses(snapshot, key, service) if endpoints else set()

    # 3. Remarks for its users.
    remarks = preconditions.list_remarks(
        described_service, model, settings.vendors, checked.memory, smallest_device_bytes=replica.devices.smallest_bytes
    )
    is_known = model is not None and replica.accelerator is not None
    return ServiceView(
        service=service,
        accelerator=replica.accelerator,
        accelerator_choice=chosen,
        runtime=runtime_of(described_service, model, settings.vendors) if model is not None and is_known else "",
        pod_runtime=pod_runtime,
        remarks=(*remarks, AWAITS_UPDATE) if replicas.awaiting and not may_roll_out else remarks,
        memory=checked.memory if checked.served is not None else ReplicaMemory(),
        served=checked.served,
        model_problem=checked.model_problem,
        blocker=blocker,
        wanted=wanted,
        replicas=replicas,
        endpoints=endpoints,
        own_endpoints=tuple(endpoint for endpoint in endpoints if endpoint.address in addresses),
        standing=facts.standing,
        kueue=kueue.standing if wanted else None,
    )


def _list_replica_addresses(snapshot: Snapshot, key: ObjectKey, service: InferenceService) -> set[str]:
    """Return the addresses of the pods and hosts of a service: an endpoint elsewhere is foreign, and is not probed."""
    pods = snapshot.store.by_index(PODS, SERVICE_INDEX, namespaced(key.namespace, key.name))
    children = snapshot.children(METAL_PROCESSES, key.namespace, service.metadata.uid)
    names = {process["spec"].get("hostName") for process in children}
    hosts = (snapshot.get(METAL_HOSTS, ObjectKey("", name)) for name in names if name)
    return list_replica_addresses(pods, (host for host in hosts if host is not None))


def _observe_replicas(
    snapshot: Snapshot,
    service: InferenceService,
    replica: CheckedReplica,
    wanted: int,
    *,
    settings: PodSettings,
    may_roll_out: bool,
) -> Replicas:
    """Return the replicas of a service on its one accelerator, and those of another kind that serve until they do.

    After a change of accelerator, pods stay beside hosts, or hosts beside pods. A service that may not run now keeps
    its replicas and gets no new one.
    """
    checked, choice = replica.checked, replica.choice
    label = find_single_label(snapshot, service, replica.accelerator)
    pods = observe_pods(
        snapshot, service, checked.served, choice, wanted, settings=settings, may_roll_out=may_roll_out, label=label
    )

    # No pod is wanted: the replicas are on hosts, or none may be created.
    if checked.served is None or choice is None:
        hosts = observe_hosts(snapshot, service, checked.served, wanted, checked.memory.total_bytes)
        return combine_replicas((pods, hosts))

    # For each pod that is not ready yet, one earlier replica on a host stays, but does not count as ready.
    earlier = observe_hosts(snapshot, service, None, max(0, wanted - len(pods.ready)))
    return combine_replicas((pods, msgspec.structs.replace(earlier, ready=(), problem=None)))
