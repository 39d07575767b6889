"""A thief with the token of host studio-1 opens nothing else, and the host itself lacks nothing."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from crds.meta import (
    HOSTS_NAMESPACE,
    LABEL_HOST,
    LABEL_MANAGED_BY,
    LABEL_SERVICE_NAME,
    LABEL_SLICE_MANAGED_BY,
    MANAGED_BY,
)
from kube.client import Obj
from kube.errors import Forbidden
from kube.resources import (
    ENDPOINT_SLICES,
    EVENTS,
    INFERENCE_SERVICES,
    LEASES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    NODES,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    SERVICES,
    Resource,
)
from tests.cluster.policy.conftest import Hosts
from tests.cluster.policy.objects import ADDRESSES, build_event, build_lease, build_process, build_slice
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.support.agent_objects import lease_of_host
from tests.support.eventually import eventually

MANAGER = "pomona-metal-agent"
Attempt = Callable[[Hosts], Awaitable[object]]
OTHERS = ADDRESSES["studio-2"]


def apply(hosts: Hosts, written: tuple[Resource, Obj], subresource: str = "") -> Awaitable[object]:
    return hosts.own.apply(*written, field_manager=MANAGER, subresource=subresource)


def own_slice(**changes: Any) -> Attempt:
    """Write the slice of studio-1 with some parts changed."""
    return lambda hosts: apply(hosts, build_slice(hosts.processes["chat-1"], **changes))


def endpoint(**more: Any) -> list[Obj]:
    return [{"addresses": [ADDRESSES["studio-1"]], "conditions": {"ready": True}, **more}]


def port(**fields: Any) -> list[Obj]:
    return [{"name": "http", "port": 18000, "protocol": "TCP", **fields}]


def labels(service: str, by: str = "metal-agent.pomona.dev", ours: str = MANAGED_BY) -> dict[str, str]:
    return {LABEL_SERVICE_NAME: service, LABEL_SLICE_MANAGED_BY: by, LABEL_MANAGED_BY: ours, LABEL_HOST: "studio-1"}


def owner(hosts: Hosts, **changes: Any) -> list[Obj]:
    (reference,) = build_slice(hosts.processes["chat-1"])[1]["metadata"]["ownerReferences"]
    return [{**reference, **changes}]


def status(hosts: Hosts, process: str, phase: str = "Stopped") -> Awaitable[object]:
    obj = {"metadata": {"namespace": hosts.namespace, "name": process}, "status": {"phase": phase}}
    return apply(hosts, (METAL_PROCESSES, obj), "status")


def host_status(hosts: Hosts, name: str) -> Awaitable[object]:
    return apply(hosts, (METAL_HOSTS, {"metadata": {"name": name}, "status": {"availableBytes": 0}}), "status")


def read(resource: Resource, name: str, namespace: str | None = None) -> Attempt:
    return lambda hosts: hosts.own.get(resource, name, namespace)


def read_all(resource: Resource, namespace: str | None = None) -> Attempt:
    return lambda hosts: hosts.own.list(resource, namespace)


async def replace_by_name(hosts: Hosts) -> None:
    """Replace the slice of studio-1, whose address type cannot be changed."""
    await hosts.own.delete(ENDPOINT_SLICES, "chat.studio-1", hosts.namespace)
    await own_slice(addressType="FQDN", endpoints=[{"addresses": ["thief.example"]}])(hosts)


SLICES: dict[str, tuple[str, Attempt]] = {
    "slice of another host": (
        r"host studio-1 writes only EndpointSlices named SERVICE\.studio-1, not chat\.studio-2",
        own_slice(name="chat.studio-2"),
    ),
    "change of another host's slice": (
        r"not other\.studio-2",
        lambda hosts: apply(hosts, build_slice(hosts.processes["other-1"])),
    ),
    "deletion of another host's slice": (
        r"not other\.studio-2",
        lambda hosts: hosts.own.delete(ENDPOINT_SLICES, "other.studio-2", hosts.namespace),
    ),
    "slice of a service that is not bound": (
        "no process of service .*/other is bound to host studio-1",
        own_slice(name="other.studio-1", labels=labels("other")),
    ),
    "slice for a foreign service": (
        r"needs the labels kubernetes\.io/service-name: chat, ",
        own_slice(labels=labels("kubernetes")),
    ),
    "the API server's own slice": (
        "not kubernetes",
        own_slice(namespace="default", name="kubernetes", labels=labels("kubernetes"), ownerReferences=[]),
    ),
    "slice beside the API server's": (
        "no process of service default/kubernetes is bound",
        own_slice(namespace="default", name="kubernetes.studio-1", labels=labels("kubernetes"), ownerReferences=[]),
    ),
    "deletion of the API server's slice": (
        "not kubernetes",
        lambda hosts: hosts.own.delete(ENDPOINT_SLICES, "kubernetes", "default"),
    ),
    "slice of the cluster's DNS": (
        "no process of service kube-system/kube-dns is bound",
        own_slice(namespace="kube-system", name="kube-dns.studio-1", labels=labels("kube-dns"), ownerReferences=[]),
    ),
    "same service in another namespace": (
        "no process of service default/chat is bound",
        own_slice(namespace="default", ownerReferences=[]),
    ),
    "slice that Kubernetes would keep": ("needs the labels", own_slice(labels=labels("chat", by="thief"))),
    "slice that the controller does not see": ("needs the labels", own_slice(labels=labels("chat", ours="thief"))),
    "slice that counts as another host's": (
        "needs the label inference.pomona.dev/host: studio-1",
        own_slice(labels=labels("chat") | {LABEL_HOST: "studio-2"}),
    ),
    "address of another host": (
        r"an address in EndpointSlice chat\.studio-1 is not granted to host studio-1: see the condition AddressAcc",
        own_slice(endpoints=[{"addresses": [OTHERS], "conditions": {"ready": True}}]),
    ),
    "address of another host behind its own": (
        "is not granted",
        own_slice(endpoints=[*endpoint(), {"addresses": [OTHERS], "conditions": {"ready": False}}]),
    ),
    "name in place of an address": ("addressType is IPv4 or IPv6", replace_by_name),
    "port of a kubelet": ("TCP ports 18000-18999 only: start the agent with such", own_slice(ports=port(port=10250))),
    "port below the range": ("18000-18999 only", own_slice(ports=port(port=17999))),
    "port above the range": ("18000-18999 only", own_slice(ports=port(port=19000))),
    "all ports": ("18000-18999 only", own_slice(ports=[{"name": "http", "protocol": "TCP"}])),
    "UDP": ("TCP ports", own_slice(ports=port(protocol="UDP"))),
    "second port": ("18000-18999 only", own_slice(ports=[*port(), {"name": "ssh", "port": 22, "protocol": "TCP"}])),
    "no port": ("18000-18999 only", own_slice(ports=[])),
    "endpoint on a node": ("neither nodeName", own_slice(endpoints=endpoint(nodeName="cpu-1"))),
    "endpoint with a name in DNS": ("nor hostname", own_slice(endpoints=endpoint(hostname="db"))),
    "endpoint of a pod": ("targetRef", own_slice(endpoints=endpoint(targetRef={"kind": "Pod", "name": "a"}))),
    "owner of another kind": (
        "is owned by MetalProcesses",
        lambda hosts: own_slice(ownerReferences=owner(hosts, kind="Deployment", apiVersion="apps/v1"))(hosts),
    ),
    "owner that cannot be deleted": (
        "nor blocks from deletion",
        lambda hosts: own_slice(ownerReferences=owner(hosts, blockOwnerDeletion=True))(hosts),
    ),
    "slice that cannot be deleted": ("adds no finalizer", own_slice(finalizers=["thief.example/stay"])),
}
OBJECTS: dict[str, tuple[str, Attempt]] = {
    "registration of another host": (
        "writes only its own MetalHost and Lease, not those of studio-3",
        lambda hosts: hosts.own.create(METAL_HOSTS, {"metadata": {"name": "studio-3"}, "spec": {}}),
    ),
    # The policy answers before the API server sees that studio-1 is registered already.
    "registration for a namespace of its choice": (
        "the namespaces of a host are given by an administrator",
        lambda hosts: hosts.own.create(
            METAL_HOSTS, {"metadata": {"name": "studio-1"}, "spec": {"namespaces": [hosts.namespace]}}
        ),
    ),
    "registration with a drain": (
        "a host is cordoned and drained by an administrator",
        lambda hosts: hosts.own.create(METAL_HOSTS, {"metadata": {"name": "studio-1"}, "spec": {"drain": True}}),
    ),
    "registration with a taint": (
        "the labels and taints of a host are given by an administrator",
        lambda hosts: hosts.own.create(
            METAL_HOSTS,
            {
                "metadata": {"name": "studio-1"},
                "spec": {"taints": [{"key": "dedicated", "effect": "NoSchedule"}]},
            },
        ),
    ),
    "registration with a label that services select": (
        "the labels and taints of a host are given by an administrator",
        lambda hosts: hosts.own.create(
            METAL_HOSTS, {"metadata": {"name": "studio-1", "labels": {"team": "finance"}}, "spec": {}}
        ),
    ),
    "status of another host": ("not those of studio-2", lambda hosts: host_status(hosts, "studio-2")),
    "spec of its own host": (
        'cannot patch resource "metalhosts"',
        lambda hosts: apply(hosts, (METAL_HOSTS, {"metadata": {"name": "studio-1"}, "spec": {}})),
    ),
    "deletion of another host": (
        'cannot delete resource "metalhosts"',
        lambda hosts: hosts.own.delete(METAL_HOSTS, "studio-2"),
    ),
    "status of another host's process": (
        "MetalProcess .*/other-1 is not bound to host studio-1",
        lambda hosts: status(hosts, "other-1"),
    ),
    "status of a process that waits": ("/waiting-1 is not bound", lambda hosts: status(hosts, "waiting-1", "Rejected")),
    "creation of a process": (
        'cannot create resource "metalprocesses"',
        lambda hosts: hosts.own.create(METAL_PROCESSES, build_process(hosts.namespace, "more-1", "studio-1")),
    ),
    "binding of a process": (
        'cannot patch resource "metalprocesses"',
        lambda hosts: hosts.own.patch_json(
            METAL_PROCESSES,
            "waiting-1",
            hosts.namespace,
            [{"op": "add", "path": "/spec/hostName", "value": "studio-1"}],
        ),
    ),
    "deletion of its own process": (
        'cannot delete resource "metalprocesses"',
        lambda hosts: hosts.own.delete(METAL_PROCESSES, "chat-1", hosts.namespace),
    ),
    "renewal of another host's Lease": (
        'cannot patch resource "leases"',
        lambda hosts: apply(hosts, build_lease(hosts.processes["other-1"])),
    ),
    "Lease of a host to come": (
        'cannot create resource "leases"',
        lambda hosts: hosts.own.create(*build_lease(hosts.processes["chat-1"], name="studio-3")),
    ),
    "Lease that cannot be deleted": (
        "adds no finalizer",
        lambda hosts: apply(hosts, build_lease(hosts.processes["chat-1"], finalizers=["thief.example/stay"])),
    ),
    "Lease that outlives a minute": (
        "has leaseDurationSeconds of at most 60",
        lambda hosts: apply(hosts, (LEASES, lease_of_host("studio-1", duration_seconds=61))),
    ),
    "leadership of the controller": (
        'cannot patch resource "leases"',
        lambda hosts: apply(
            hosts, build_lease(hosts.processes["chat-1"], namespace="pomona-system", name="pomona-controller")
        ),
    ),
    "Event about another host's process": (
        "Events about itself, in namespace default, and about the MetalProcesses that are bound to it, only",
        lambda hosts: hosts.own.create(*build_event(hosts.processes["other-1"], "studio-1")),
    ),
    "Event about another kind": (
        "and about the MetalProcesses",
        lambda hosts: hosts.own.create(
            *build_event({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "cpu-1"}}, "studio-1")
        ),
    ),
    "Event in another host's name": (
        r"reports Events as pomona\.dev/metal-agent, instance studio-1, only",
        lambda hosts: hosts.own.create(*build_event(hosts.processes["chat-1"], "studio-2")),
    ),
    "Event in the controller's name": (
        r"reports Events as pomona\.dev/metal-agent",
        lambda hosts: hosts.own.create(
            *build_event(hosts.processes["chat-1"], "studio-1", reportingController="pomona.dev/controller")
        ),
    ),
    "its own grants": (
        'cannot patch resource "roles"',
        lambda hosts: apply(
            hosts,
            (ROLES, {"metadata": {"namespace": HOSTS_NAMESPACE, "name": "grants:studio-1"}, "rules": []}),
        ),
    ),
    "Secrets of all namespaces": ('cannot list resource "secrets"', read_all(SECRETS)),
    "Secrets of the hosts": ('cannot list resource "secrets"', read_all(SECRETS, HOSTS_NAMESPACE)),
    "Secret of another host": ('cannot get resource "secrets"', read(SECRETS, "studio-2", HOSTS_NAMESPACE)),
    "Secret of its name elsewhere": ('cannot get resource "secrets"', read(SECRETS, "studio-1", "default")),
    "pods": ('cannot list resource "pods"', read_all(PODS)),
    "nodes": ('cannot list resource "nodes"', read_all(NODES)),
    "Models": ('cannot list resource "models"', read_all(MODELS)),
    "InferenceServices": ('cannot list resource "inferenceservices"', read_all(INFERENCE_SERVICES)),
    "role bindings": ('cannot list resource "rolebindings"', read_all(ROLE_BINDINGS, HOSTS_NAMESPACE)),
    "a pod of its own": (
        'cannot create resource "pods"',
        lambda hosts: hosts.own.create(PODS, {"metadata": {"namespace": hosts.namespace, "name": "a"}, "spec": {}}),
    ),
    "a Service of its own": (
        'cannot create resource "services"',
        lambda hosts: hosts.own.create(
            SERVICES, {"metadata": {"namespace": hosts.namespace, "name": "a"}, "spec": {"ports": [{"port": 80}]}}
        ),
    ),
}
BY_KUBECTL = {
    "deletion of all slices": (
        "cannot deletecollection",
        "delete --raw=/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
    ),
    "deletion of each slice": ("not kubernetes", "delete --all endpointslices --namespace=default"),
    "impersonation of an administrator": (r"\(Forbidden\)", "get secrets --as=admin --as-group=system:masters"),
    "impersonation of another host": (
        r"\(Forbidden\)",
        f"get mh --as=system:serviceaccount:{HOSTS_NAMESPACE}:studio-2",
    ),
    "token of another host": ("cannot create", f"create token studio-2 --namespace={HOSTS_NAMESPACE}"),
    "token of its own for longer": (
        "30 days at most",
        f"create token studio-1 --namespace={HOSTS_NAMESPACE} --duration=721h",
    ),
    "token of the controller": ("cannot create", "create token pomona-controller --namespace=pomona-system"),
    "end of the policy": ("cannot delete", "delete validatingadmissionpolicy pomona-host-slices"),
    "wider range of ports": (
        "cannot",
        """patch configmap pomona-host-ports --namespace=pomona-system --patch={"data":{"firstPort":"1"}}""",
    ),
}


@pytest.fixture
async def waiting(hosts: Hosts) -> Hosts:
    await hosts.admin.create(METAL_PROCESSES, build_process(hosts.namespace, "waiting-1", None))
    return hosts


async def test_stolen_host_token_opens_nothing_else(waiting: Hosts) -> None:
    """The attempts share their hosts, which take longer to set up than all attempts take."""
    accepted = []
    for name, (says, attempt) in {**SLICES, **OBJECTS}.items():
        try:
            await attempt(waiting)
        except Forbidden as error:
            assert_readable(name, str(error), says)
        else:
            accepted.append(name)
    assert accepted == []


def assert_readable(name: str, message: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(message)
    assert "no such key" not in message, f"{name}: {message}"
    assert "failed expression" not in message, f"{name}: {message}"


@pytest.mark.parametrize(("says", "command"), BY_KUBECTL.values(), ids=BY_KUBECTL)
async def test_stolen_host_token_is_no_way_around(
    hosts: Hosts, plane: ControlPlane, tmp_path: Path, says: str, command: str
) -> None:
    del hosts  # the identity exists
    kubeconfig = await plane.service_account_kubeconfig(HOSTS_NAMESPACE, "studio-1")
    with pytest.raises(PlaneError, match=says):
        await plane.kubectl(f"--kubeconfig={kubeconfig}", f"--cache-dir={tmp_path}", *command.split())


async def test_slice_that_an_administrator_made_is_not_changed(hosts: Hosts) -> None:
    """A slice of a host's name that no agent made stays as it is, and its service stays the same."""
    resource, foreign = build_slice(hosts.processes["chat-1"], labels=labels("chat", by="someone"))
    await hosts.own.delete(resource, foreign["metadata"]["name"], hosts.namespace)
    await hosts.admin.create(resource, foreign)
    with pytest.raises(Forbidden, match=r"was not made by a metal agent for Service chat"):
        await own_slice()(hosts)
    with pytest.raises(Forbidden, match=r"was not made by a metal agent for Service chat"):
        await hosts.own.delete(resource, foreign["metadata"]["name"], hosts.namespace)


async def test_grant_that_is_taken_away_ends_publishing_but_not_withdrawal(hosts: Hosts) -> None:
    role = {"op": "replace", "path": "/rules", "value": []}
    await hosts.admin.patch_json(ROLES, "grants:studio-1", HOSTS_NAMESPACE, [role])

    async def refused() -> bool:
        try:
            await own_slice()(hosts)
        except Forbidden as error:
            return "no process of service" in str(error)
        return False

    await eventually(refused)
    await hosts.own.delete(ENDPOINT_SLICES, "chat.studio-1", hosts.namespace)


async def test_host_writes_all_that_it_needs(hosts: Hosts) -> None:
    own, namespace, process = hosts.own, hosts.namespace, hosts.processes["chat-1"]
    registered = await own.get(METAL_HOSTS, "studio-1")
    for written, subresource in (
        (build_lease(process), ""),
        ((METAL_HOSTS, {"metadata": {"name": "studio-1"}, "status": {"availableBytes": 7}}), "status"),
        (
            (METAL_PROCESSES, {"metadata": {"namespace": namespace, "name": "chat-1"}, "status": {"phase": "Ready"}}),
            "status",
        ),
        (build_slice(process), ""),
        (build_slice(process, ports=port(port=18999, appProtocol="https")), ""),
        (build_slice(process, endpoints=endpoint(conditions={"ready": False, "serving": True})), ""),
    ):
        await own.apply(*written, field_manager=MANAGER, subresource=subresource)
    for event in (build_event(process, "studio-1"), build_event(registered, "studio-1")):
        made = await own.create(*event)
        series = {"op": "add", "path": "/series", "value": {"count": 2, "lastObservedTime": made["eventTime"]}}
        await own.patch_json(EVENTS, made["metadata"]["name"], made["metadata"]["namespace"], [series])
    secret = {"metadata": {"namespace": HOSTS_NAMESPACE, "name": "studio-1"}, "data": {"a": "Zm9v"}}
    await hosts.admin.create(SECRETS, secret)
    listed = await own.list(SECRETS, HOSTS_NAMESPACE, field_selector="metadata.name=studio-1")
    assert [item["data"] for item in listed.items] == [{"a": "Zm9v"}]
    bound = await own.list(METAL_PROCESSES, field_selector="spec.hostName=studio-1")
    assert [item["metadata"]["name"] for item in bound.items] == ["chat-1"]
    ours = f"{LABEL_SLICE_MANAGED_BY}=metal-agent.pomona.dev"
    selected = await own.list_metadata(ENDPOINT_SLICES, label_selector=f"{ours},{LABEL_HOST}=studio-1")
    assert {item["metadata"]["name"] for item in selected.items} == {"chat.studio-1"}
    await own.delete(ENDPOINT_SLICES, "chat.studio-1", namespace)
    assert (await own.get(METAL_HOSTS, "studio-1"))["status"]["availableBytes"] == 7
