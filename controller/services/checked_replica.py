"""A replica of a service on one accelerator before any exists: its Models, memory and engine, or why it cannot be."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from controller.models.served import Companion, read_companions
from controller.placement.nodes import DeviceSizes, find_device_sizes
from controller.placement.pool_table import read_pools
from controller.pod_settings import PodSettings, check_limits, refuse_hosts, refuse_queue
from controller.reconcile.plan import Snapshot
from controller.services import preconditions
from controller.services.pods.deployment import choose_engine, find_pod_problem
from controller.services.pods.pod_template import EngineChoice
from controller.services.preconditions import CheckedService, ServiceProblem
from crds.inferenceservice import InferenceService
from crds.meta import Accelerator
from crds.model import Model
from kube.resources import MODELS, ObjectKey
from kube.store import Store

UNKNOWN_POOL: Final = "UnknownPool"
"""Reason of a service that names a pool which does not exist; it may come back."""


def read_models(snapshot: Snapshot, service: InferenceService) -> tuple[Model | None, tuple[Companion, ...]]:
    """Return the Model of a service and its companions, as far as their Models exist."""

    def read(key: ObjectKey) -> Model | None:
        return snapshot.read(MODELS, key, Model)

    return read(ObjectKey(service.metadata.namespace, service.spec.model_ref)), read_companions(read, service)


class CheckedReplica(NamedTuple):
    """The outcome of all that is checked."""

    accelerator: Accelerator | None
    """None while it depends on a Model that does not exist."""
    checked: CheckedService
    devices: DeviceSizes
    """The devices of the accelerator in the cluster."""
    choice: EngineChoice | None
    """The engine of a pod; None: it runs on a host, or has an unmet precondition."""


def check_replica(
    store: Store,
    service: InferenceService,
    model: Model | None,
    companions: Sequence[Companion],
    settings: PodSettings,
    *,
    other_problem: ServiceProblem | None = None,
    has_claims: bool = True,
) -> CheckedReplica:
    """Check whether a service may have replicas on its one accelerator; return the engine, or the first problem.

    A limit of the controller comes first, then spec, Model and memory, `other_problem`, the pools, and the pod.

    Args:
        store: the watch cache.
        service: the service, which uses one accelerator.
        model: its Model; None if it does not exist.
        companions: its companions.
        settings: options of the controller.
        other_problem: a problem of the service that the caller has found, such as one of Kueue.
        has_claims: devices can be claimed in the cluster.
    """
    accelerator = preconditions.decided_accelerator(service, model)
    devices = find_device_sizes(store, accelerator) if accelerator is not None else DeviceSizes()
    # Spec, Models and memory; `checked.served` is None if there is a problem.
    checked = preconditions.check_service(
        service,
        model,
        tuple(companions),
        settings.vendors,
        largest_device_bytes=devices.largest_bytes,
        has_claims=has_claims,
    )

    # A limit of the controller is reported before any other problem.
    out_of_scope = refuse_hosts(accelerator, settings.vendors, settings.limits) if accelerator is not None else None
    # `refuse` takes the Models to serve out of the outcome, and puts this problem in place of its own.
    exceeded = out_of_scope or refuse_queue(service, settings.limits) or check_limits(service, settings.limits)
    if exceeded:
        checked = checked.refuse(ServiceProblem(*exceeded, "Failed"))
    elif other_problem is not None:
        checked = checked.refuse(checked.problem or other_problem)

    if checked.served is not None and accelerator is not None:
        pool_problem = _refuse_pools(service, accelerator, store, settings)
        checked = checked.refuse(pool_problem) if pool_problem is not None else checked

    choice = choose_engine(service, accelerator, checked, settings)
    # A pod that cannot be made leaves no engine.
    if pod_problem := find_pod_problem(service, checked.served, choice, settings):
        checked, choice = checked.refuse(pod_problem), None
    return CheckedReplica(accelerator=accelerator, checked=checked, devices=devices, choice=choice)


def _refuse_pools(
    service: InferenceService, accelerator: str, store: Store, settings: PodSettings
) -> ServiceProblem | None:
    """Return why a service cannot use the pools that it names, with the way out, or None.

    A pool has hardware of one accelerator, and only the queue knows pools. One that does not exist yet is a
    problem that may end by itself; the other problems are final.
    """
    names = service.spec.scheduling.pools
    if not names:
        return None

    # Each pool must exist, and have hardware of this accelerator.
    table = read_pools(store, settings.vendors)
    offered = f"use {' or '.join(table.list_pools(accelerator))}"
    for name in names:
        actual = table.find_accelerator(name)
        if not actual:
            message = (
                f"spec.scheduling.pools names {name}, which does not exist: {offered}, or create AcceleratorPool {name}"
            )
            return ServiceProblem(UNKNOWN_POOL, message, "Pending")
        if actual != accelerator:
            message = (
                f"spec.scheduling.pools names {name}, which has accelerator {actual}, not {accelerator}: {offered}"
            )
            return ServiceProblem("InvalidSpec", message, "Failed")

    # The queue must place the replicas. Those on hosts always go by it.
    vendor = settings.vendors.get(accelerator)
    mode = service.spec.scheduling.mode or settings.scheduling_mode
    if vendor is not None and vendor.in_pods and mode == "Native":
        message = (
            "spec.scheduling.pools needs the queue, and Kubernetes' scheduler places pods here: set "
            "spec.scheduling.mode to Queue, or remove spec.scheduling.pools"
        )
        return ServiceProblem("InvalidSpec", message, "Failed")
    return None
