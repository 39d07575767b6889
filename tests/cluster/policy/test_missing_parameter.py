"""The policy of the ports of hosts without its ConfigMap: it refuses the slices of hosts, and those of nobody else."""

from http import HTTPStatus

from kube.errors import ApiError
from kube.resources import ENDPOINT_SLICES
from metal_agent.cluster.endpoint_slices import FIELD_MANAGER
from tests.cluster.policy.conftest import Hosts
from tests.cluster.policy.objects import build_slice
from tests.controlplane.members import CONTROLLER_NAMESPACE
from tests.controlplane.plane import ControlPlane
from tests.support.eventually import eventually

PATH = f"/api/v1/namespaces/{CONTROLLER_NAMESPACE}/configmaps"
PORTS = f"{PATH}/pomona-host-ports"


async def refusal_of_a_host(hosts: Hosts) -> str:
    """Return why a host may not publish its process; empty if it may."""
    resource, made = build_slice(hosts.processes["chat-1"])
    try:
        await hosts.own.apply(resource, made, field_manager=FIELD_MANAGER)
    except ApiError as error:
        return str(error)
    return ""


async def test_slices_of_other_services_need_no_ports_of_hosts(plane: ControlPlane, hosts: Hosts) -> None:
    ports = await plane.request("GET", PORTS)
    await plane.request("DELETE", PORTS)
    try:

        async def host_is_refused() -> bool:
            return "no params found" in await refusal_of_a_host(hosts)

        await eventually(host_is_refused)
        others = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "web-1",
                "namespace": hosts.namespace,
                "labels": {"kubernetes.io/service-name": "web"},
            },
            "addressType": "IPv4",
            "endpoints": [],
        }
        assert await hosts.admin.create(ENDPOINT_SLICES, others)
    finally:
        kept = {key: ports["metadata"].get(key) for key in ("name", "labels", "annotations")}
        await plane.request("POST", PATH, {"metadata": kept, "data": ports["data"]}, accept={HTTPStatus.CONFLICT})

    async def host_publishes() -> bool:
        return not await refusal_of_a_host(hosts)

    await eventually(host_publishes)
