"""The names and endpoints of Services, as kube-proxy and CoreDNS take them from their objects."""

import struct

import pytest

from kube.client import Obj
from tests.controlplane.cluster_dns import answer, resolv_conf
from tests.controlplane.service_proxy import Address, find_endpoints

A, AAAA = 1, 28


def service(name: str, cluster_ip: str | None = "10.0.1.1", *ports: Obj) -> Obj:
    spec = {"clusterIP": cluster_ip, "ports": list(ports or ({"port": 80},))}
    return {"metadata": {"name": name, "namespace": "team"}, "spec": {k: v for k, v in spec.items() if v is not None}}


def endpoint_slice(service: str, ports: list[Obj] | None, *endpoints: Obj) -> Obj:
    labels = {"kubernetes.io/service-name": service}
    metadata = {"name": f"{service}-x", "namespace": "team", "labels": labels}
    return {"metadata": metadata, "ports": ports, "endpoints": list(endpoints) or None}


def endpoint(address: str, ready: bool | None = True) -> Obj:
    return {"addresses": [address], "conditions": {} if ready is None else {"ready": ready}}


def test_ready_endpoints_of_all_slices_are_found_by_the_name_of_the_port() -> None:
    services = [service("chat", "10.0.1.1", {"name": "http", "port": 80}, {"name": "metrics", "port": 90})]
    slices = [
        endpoint_slice("chat", [{"name": "http", "port": 8080}], endpoint("10.77.1.1"), endpoint("10.77.1.2", False)),
        endpoint_slice("chat", [{"name": "http", "port": 18000}], endpoint("10.77.100.1", None)),
        endpoint_slice("other", [{"name": "metrics", "port": 1}], endpoint("10.77.1.3")),
    ]
    assert find_endpoints(services, slices) == {
        Address("10.0.1.1", 80): [Address("10.77.1.1", 8080), Address("10.77.100.1", 18000)]
    }


def test_services_without_address_tcp_or_endpoint_have_no_listener() -> None:
    udp = service("dns", "10.0.1.2", {"port": 53, "protocol": "UDP"})
    services = [service("headless", "None"), service("external", None), udp, service("empty"), service("none")]
    slices = [
        *(endpoint_slice(name, [{"port": 1}], endpoint("10.77.1.1")) for name in ("headless", "external", "dns")),
        endpoint_slice("empty", None),
    ]
    assert find_endpoints(services, slices) == {}


def ask(name: str, kind: int) -> tuple[int, list[bytes]]:
    """Return status and records of an answer about a Service `chat` of `team` at 10.0.1.1."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    question = labels + struct.pack(">BHH", 0, kind, 1)
    query = struct.pack(">HHHHHH", 7, 0x0120, 1, 0, 0, 1) + question + b"\x00\x00\x29\x04\xd0" + bytes(6)
    response = answer(query, lambda *service: "10.0.1.1" if service == ("chat", "team") else None)
    number, flags, questions, records, authorities, more = struct.unpack_from(">HHHHHH", response)
    assert (number, flags & 0x8100, questions, authorities, more) == (7, 0x8100, 1, 0, 0)
    assert response[12:].startswith(question)
    rest = response[12 + len(question) :]
    assert len(rest) == 16 * records
    return flags & 0xF, [rest[at : at + 16] for at in range(0, len(rest), 16)]


@pytest.mark.parametrize("name", ["chat.team.svc.cluster.local", "Chat.TEAM.svc.cluster.local"])
def test_address_of_a_service_is_answered(name: str) -> None:
    assert ask(name, A) == (0, [bytes.fromhex("c00c 0001 0001 00000005 0004") + bytes([10, 0, 1, 1])])


def test_name_of_a_service_has_no_record_of_another_kind() -> None:
    assert ask("chat.team.svc.cluster.local", AAAA) == (0, [])


@pytest.mark.parametrize(
    "name", ["chat.other.svc.cluster.local", "chat.team.pod.cluster.local", "a.chat.team.svc.cluster.local", "example"]
)
def test_any_other_name_does_not_exist(name: str) -> None:
    assert ask(name, A) == (3, [])


def test_names_of_a_pod_are_completed_from_its_own_namespace_on() -> None:
    assert resolv_conf("team", "10.0.0.10") == (
        "search team.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.0.0.10\noptions ndots:5\n"
    )
