"""Preconditions of the pools that a service names."""

from controller.placement.pool_table import PoolTable, read_pools
from controller.pod_settings import PodSettings
from controller.services.preconditions import CheckedService, ServiceProblem
from crds.inferenceservice import InferenceService
from crds.meta import SchedulingMode
from devices.vendors import Vendors
from kube.store import Store

UNKNOWN_POOL = "UnknownPool"
"""Reason of a service that names a pool which does not exist; it may come back."""


def check_pools(
    checked: CheckedService, service: InferenceService, accelerator: str | None, store: Store, settings: PodSettings
) -> CheckedService:
    """Check the pools that a service names, unless something else prevents it from being served."""
    if accelerator is None or checked.served is None:
        return checked
    table = read_pools(store, settings.vendors)
    problem = refuse_pools(service, accelerator, table, settings.vendors, settings.scheduling_mode)
    return CheckedService(None, problem, checked.model_problem) if problem is not None else checked


def refuse_pools(
    service: InferenceService, accelerator: str, table: PoolTable, vendors: Vendors, mode: SchedulingMode
) -> ServiceProblem | None:
    """Return why a service cannot use the pools that it names, with the way out, or None.

    Args:
        service: the service.
        accelerator: its accelerator.
        table: all pools.
        vendors: the table of accelerators.
        mode: the mode of services that state none.
    """
    names = service.spec.scheduling.pools
    if not names:
        return None
    pools = table.list_pools(accelerator)
    offered = f"use {' or '.join(pools)}"
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
    in_pods = accelerator in vendors and vendors[accelerator].in_pods
    if in_pods and (service.spec.scheduling.mode or mode) == "Native":
        message = (
            "spec.scheduling.pools needs the queue, and Kubernetes' scheduler places pods here: set "
            "spec.scheduling.mode to Queue, or remove spec.scheduling.pools"
        )
        return ServiceProblem("InvalidSpec", message, "Failed")
    return None
