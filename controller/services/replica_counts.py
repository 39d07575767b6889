"""The replicas of a service by their accelerator: how many have a node or host, how many serve, and who waits.

How many there should be is `wanted_replicas` in `crds/inferenceservice.py`.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final, NamedTuple

from controller.models.served import METAL
from controller.placement.displacement import find_displacements, list_moved, read_orders
from controller.placement.pod_requests import count_requests
from controller.reconcile.plan import Snapshot, decode_stored
from controller.reconcile.triggers import ENDED
from controller.services.endpoints import find_exposed_hosts
from controller.services.metal_processes import read_hosts
from controller.services.pods.observed_deployments import accelerator_label, is_ready, list_service_pods, node_of
from controller.services.rollout import is_host_lost
from crds.inferenceservice import InferenceService
from crds.metalprocess import HOLDS_NO_MEMORY, MetalProcess
from devices.vendors import Vendors
from kube.client import Obj
from kube.resources import DEPLOYMENTS, METAL_PROCESSES


class ReplicaCounts(NamedTuple):
    """The replicas on one accelerator."""

    running: int = 0
    """Those that have a node or host."""
    ready: int = 0
    """Those of them that serve."""
    waiting_since: tuple[datetime, ...] = ()
    """When each of those was made that have no node or host."""

    def count_settled(self, now: datetime, seconds: float) -> int:
        """Return the number of replicas that have waited for at least `seconds`."""
        return sum((now - since).total_seconds() >= seconds for since in self.waiting_since)


NO_REPLICAS: Final = ReplicaCounts()


def count_replicas(snapshot: Snapshot, service: InferenceService, vendors: Vendors) -> Mapping[str, ReplicaCounts]:
    """Return the replicas of a service that are not being deleted, by accelerator."""
    labels = find_pod_labels(snapshot, service, vendors)
    in_pods = {
        accelerator: _count_pods(list_service_pods(snapshot, service, label).pods) for accelerator, label in labels
    }
    on_hosts = _count_processes(snapshot, service)  # METAL is the accelerator of hosts
    return in_pods | ({METAL: on_hosts} if on_hosts != NO_REPLICAS else {})


def find_pod_labels(snapshot: Snapshot, service: InferenceService, vendors: Vendors) -> list[tuple[str, str]]:
    """Return each accelerator of which a service has a Deployment, with the label of its pods.

    A service that was made for one accelerator has pods without a label. They keep that when it may use several.
    """
    owned = snapshot.children(DEPLOYMENTS, service.metadata.namespace, service.metadata.uid)
    return sorted({(_accelerator_of(deployment, vendors), accelerator_label(deployment)) for deployment in owned})


def choose_label(labels: Iterable[tuple[str, str]], accelerator: str) -> str:
    """Return the label of the pods on one of several accelerators.

    It is empty if they were made while the service used one accelerator. If none exist, new ones get the accelerator.
    """
    return max((label for name, label in labels if name == accelerator), default=accelerator)


def find_single_label(snapshot: Snapshot, service: InferenceService, accelerator: str | None) -> str:
    """Return the label of the pods of a service that uses one accelerator now.

    Pods that were made while it could use several are labelled with their accelerator, and keep that; others have none.
    """
    owned = snapshot.children(DEPLOYMENTS, service.metadata.namespace, service.metadata.uid)
    return next((label for deployment in owned if (label := accelerator_label(deployment)) == accelerator), "")


def _accelerator_of(deployment: Obj, vendors: Vendors) -> str:
    """Return the accelerator of a Deployment: by its label, else by its devices; empty if it has neither."""
    if label := accelerator_label(deployment):
        return label
    requests = count_requests(deployment["spec"]["template"]["spec"])
    devices = [resource for resource, amount in requests.items() if amount]
    return next((name for name, vendor in vendors.items() if any(map(vendor.offers, devices))), "")


def _count_pods(pods: Iterable[Obj]) -> ReplicaCounts:
    """Return the replicas in these pods."""
    living = [pod for pod in pods if pod.get("status", {}).get("phase") not in ENDED]
    placed = [pod for pod in living if node_of(pod)]
    waiting = [datetime.fromisoformat(pod["metadata"]["creationTimestamp"]) for pod in living if not node_of(pod)]
    return ReplicaCounts(running=len(placed), ready=sum(map(is_ready, placed)), waiting_since=tuple(waiting))


def _count_processes(snapshot: Snapshot, service: InferenceService) -> ReplicaCounts:
    """Return the replicas of a service on hosts.

    A process runs if it has a host, unless that is lost or the process has to leave it, and is ready if clients reach
    it as well. One that has stopped, or that its host rejected, is no replica: it holds no memory.
    """
    metadata, store = service.metadata, snapshot.store
    children = snapshot.children(METAL_PROCESSES, metadata.namespace, metadata.uid)
    if not children:
        return NO_REPLICAS

    # Left out are those that are being deleted, have stopped, or were rejected.
    processes = [
        process
        for process in decode_stored(store, METAL_PROCESSES, children, MetalProcess)
        if process.metadata.deletion_timestamp is None and process.status.phase not in HOLDS_NO_MEMORY
    ]

    # Those with a place: a host that lives, and that they need not leave.
    hosts = read_hosts(store, {process.spec.host_name for process in processes})
    # Those that have to leave their host: by an order of an administrator (`read_orders`), or for a better host.
    displaced = find_displacements(processes, read_orders(store), service.spec.tolerations, list_moved(processes))
    placed = [
        process
        for process in processes
        if (name := process.spec.host_name) and not is_host_lost(name, hosts) and process.metadata.uid not in displaced
    ]

    # Hosts with a ready endpoint for the service, by which clients reach its process there.
    exposed = find_exposed_hosts(snapshot.store, metadata.namespace, metadata.name)
    ready = sum(process.status.phase == "Ready" and process.spec.host_name in exposed for process in placed)

    # Those without a host have waited since they were created.
    created = [process.metadata.creation_timestamp for process in processes if not process.spec.host_name]
    waiting_since = tuple(map(datetime.fromisoformat, created))
    return ReplicaCounts(running=len(placed), ready=ready, waiting_since=waiting_since)
