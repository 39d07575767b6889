"""The endpoints of a service: the addresses that its EndpointSlices offer, and those that are its replicas'."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.services.pods.pod_proxy import PORT_NAME
from crds.meta import HTTPS, split_slice_name
from kube.client import Obj
from kube.resources import ENDPOINT_SLICES
from kube.store import Store


class Endpoint(NamedTuple):
    """An address that a Service sends requests to."""

    address: str
    port: int
    scheme: Literal["http", "https"] = "http"
    host: str = ""
    """Its MetalHost; empty for a pod."""
    node: str = ""
    """Its Node; empty for a host."""

    @property
    def url(self) -> str:
        """Its base URL."""
        place = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.scheme}://{place}:{self.port}"


def list_ready_endpoints(slices: Iterable[Obj]) -> tuple[Endpoint, ...]:
    """Return the ready addresses that the EndpointSlices of one Service offer, sorted, each with its node or host.

    Kubernetes writes the slices for pods; the agent of a host writes one of its own, whose name tells the host.
    """
    endpoints = set()
    for endpoint_slice in slices:
        ports = [port for port in endpoint_slice.get("ports") or [] if port.get("name") == PORT_NAME]
        # The name tells the host; empty for a slice of pods.
        _service, host = split_slice_name(endpoint_slice["metadata"]["name"])

        for endpoint in endpoint_slice.get("endpoints") or []:
            # An absent `ready` means ready, as for every consumer of slices.
            if endpoint.get("conditions", {}).get("ready", True) is not False:
                endpoints |= {
                    Endpoint(
                        address=address,
                        port=port["port"],
                        scheme="https" if port.get("appProtocol") == HTTPS else "http",
                        host=host,
                        # A host is no node, whatever its agent states.
                        node="" if host else endpoint.get("nodeName", ""),
                    )
                    for address in endpoint["addresses"]
                    for port in ports
                }
    return tuple(sorted(endpoints))


def find_exposed_hosts(store: Store, namespace: str, service: str) -> set[str]:
    """Return the hosts whose EndpointSlice for a service has a ready endpoint."""
    slices = store.by_index(ENDPOINT_SLICES, SERVICE_INDEX, namespaced(namespace, service))
    return {endpoint.host for endpoint in list_ready_endpoints(slices)}


def list_replica_addresses(pods: Iterable[Obj], hosts: Iterable[Obj]) -> set[str]:
    """Return the addresses of the pods and MetalHosts of a service: its token is sent to no other address."""
    addresses = {address["ip"] for pod in pods for address in pod.get("status", {}).get("podIPs") or []}
    return addresses | {host.get("status", {}).get("address", "") for host in hosts}
