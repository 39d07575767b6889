"""Unusual ways to write: forms of requests and objects that no agent, controller or tenant uses."""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from kube.client import Client, Obj
from kube.errors import ApiError, Invalid
from kube.resources import (
    ENDPOINT_SLICES,
    EVENTS,
    INFERENCE_SERVICES,
    LEASES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    SERVICES,
    Resource,
)
from kube.transport import Request
from tests.cluster.policy.conftest import Hosts
from tests.cluster.policy.objects import ADDRESSES, build_event, build_lease, build_slice
from tests.cluster.policy.test_stolen_host_token import apply, own_slice
from tests.support.refused_manifests import make_manifest

Attempt = Callable[[Hosts], Awaitable[object]]
OTHERS = ADDRESSES["studio-2"]
ENDPOINTS = Resource("", "v1", "endpoints", "Endpoints")
CORE_EVENTS = Resource("", "v1", "events", "Event")


def at(address: str, **changes: Any) -> Attempt:
    return own_slice(endpoints=[{"addresses": [address], "conditions": {"ready": True}}], **changes)


def create_slice(**metadata: Any) -> Attempt:
    async def attempt(hosts: Hosts) -> None:
        resource, obj = build_slice(hosts.processes["chat-1"])
        del obj["metadata"]["name"]
        await hosts.own.create(resource, {**obj, "metadata": obj["metadata"] | metadata})

    return attempt


def generate(resource: Resource, prefix: str) -> Attempt:
    """Create an object whose name the API server makes of a prefix."""

    async def attempt(hosts: Hosts) -> None:
        process = hosts.processes["chat-1"]
        bodies: dict[Resource, Obj] = {
            ENDPOINT_SLICES: build_slice(process)[1],
            LEASES: build_lease(process)[1],
            METAL_HOSTS: {"metadata": {}, "spec": {}},
        }
        metadata = {key: content for key, content in bodies[resource]["metadata"].items() if key != "name"}
        namespace = metadata.get("namespace")
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **bodies[resource]}
        request = Request(
            "POST",
            resource.path(namespace),
            {},
            msgspec.json.encode(body | {"metadata": metadata | {"generateName": prefix}}),
        )
        await hosts.own._call("create", resource, namespace, None, request)

    return attempt


def event_about_host(namespace: str = "default", note: str = "", **metadata: Any) -> tuple[Resource, Obj]:
    host = {"apiVersion": METAL_HOSTS.api_version, "kind": "MetalHost", "metadata": {"name": "studio-1"}}
    resource, obj = build_event(host, "studio-1", note=note)
    regarding = obj["regarding"] | {"namespace": namespace}
    return resource, {**obj, "metadata": obj["metadata"] | {"namespace": namespace} | metadata, "regarding": regarding}


async def take_event(hosts: Hosts) -> None:
    """Rewrite an Event of the older form, as kubelets write it."""
    about = {"apiVersion": METAL_HOSTS.api_version, "kind": "MetalHost", "name": "studio-1"}
    body = {"reason": "Stolen", "message": "the host was seen elsewhere", "source": {"component": "watchman"}}
    metadata = {"namespace": "default", "name": f"seen-{hosts.namespace}"}
    old = {"metadata": metadata, "involvedObject": {**about, "namespace": "default"}, **body}
    await hosts.admin.create(CORE_EVENTS, old)
    fields = {"reportingController": "pomona.dev/metal-agent", "reportingInstance": "studio-1", "note": "all is well"}
    operations = [put(f"/{field}", value) for field, value in fields.items()]
    await hosts.own.patch_json(EVENTS, metadata["name"], "default", operations)


def patch(resource: Resource, name: str, *operations: Obj, namespace: str | None = None, sub: str = "") -> Attempt:
    return lambda hosts: hosts.own.patch_json(
        resource, name, namespace if namespace != "own" else hosts.namespace, operations, subresource=sub
    )


def put(path: str, value: Any, op: str = "add") -> Obj:
    return {"op": op, "path": path, "value": value}


BY_HOST: dict[str, tuple[str, Attempt]] = {
    "slice with a very long name": ("writes only", create_slice(name="chat." + "a" * 240)),
    "slice named like its host only": ("writes only|no process", create_slice(name="studio-1")),
    "slice with two dots": ("writes only", create_slice(name="chat.x.studio-1")),
    "slice with an empty service": ("writes only|Invalid|invalid", create_slice(name=".studio-1")),
    "IPv4 in the form of IPv6": (
        "not granted|Invalid",
        at(f"::ffff:{OTHERS}", addressType="IPv6", name="chat.studio-1"),
    ),
    "its address with zeros": ("not granted|Invalid|invalid", at("010.77.150.1")),
    "loopback": ("may not be in the loopback range", at("127.0.0.1")),
    "metadata service": ("may not be in the link-local range", at("169.254.169.254")),
    "all addresses": ("must be a valid IP address", at("*")),
    "no addresses": (
        "Invalid|invalid|must contain at least 1",
        own_slice(endpoints=[{"addresses": [], "conditions": {}}]),
    ),
    "patch of a single address": (
        "not granted",
        patch(ENDPOINT_SLICES, "chat.studio-1", put("/endpoints/0/addresses/0", OTHERS, "replace"), namespace="own"),
    ),
    "patch of the service's label": (
        "needs the labels",
        patch(
            ENDPOINT_SLICES,
            "chat.studio-1",
            put("/metadata/labels/kubernetes.io~1service-name", "other", "replace"),
            namespace="own",
        ),
    ),
    "removal of its labels": (
        "needs the labels",
        patch(ENDPOINT_SLICES, "chat.studio-1", {"op": "remove", "path": "/metadata/labels"}, namespace="own"),
    ),
    "patch of the API server's slice": (
        "not kubernetes",
        patch(ENDPOINT_SLICES, "kubernetes", put("/metadata/labels/a", "b"), namespace="default"),
    ),
    "Endpoints that are mirrored": (
        "cannot create",
        lambda hosts: hosts.own.create(ENDPOINTS, {"metadata": {"namespace": hosts.namespace, "name": "chat"}}),
    ),
    "Service that selects others": (
        "cannot patch",
        patch(SERVICES, "kubernetes", put("/spec/selector", {"a": "b"}), namespace="default"),
    ),
    "namespaces of its host by the status": (
        "unchanged",
        patch(METAL_HOSTS, "studio-1", put("/spec/namespaces", ["kube-system"]), sub="status"),
    ),
    "finalizer on its host by the status": (
        "unchanged",
        patch(METAL_HOSTS, "studio-1", put("/metadata/finalizers", ["thief.example/stay"]), sub="status"),
    ),
    "owner of its host by the status": (
        "unchanged",
        patch(
            METAL_HOSTS,
            "studio-1",
            put("/metadata/ownerReferences", [{"apiVersion": "v1", "kind": "Node", "name": "cpu-1", "uid": "a"}]),
            sub="status",
        ),
    ),
    "spec of its process by the status": (
        "unchanged",
        patch(METAL_PROCESSES, "chat-1", put("/spec/memoryBytes", 2), namespace="own", sub="status"),
    ),
    "finalizer on its process by the status": (
        "unchanged",
        patch(
            METAL_PROCESSES,
            "chat-1",
            put("/metadata/finalizers", ["thief.example/stay"]),
            namespace="own",
            sub="status",
        ),
    ),
    "deletion of its process by the status": (
        "unchanged",
        patch(
            METAL_PROCESSES,
            "chat-1",
            put("/metadata/deletionTimestamp", "2026-01-01T00:00:00Z"),
            namespace="own",
            sub="status",
        ),
    ),
    # It becomes the reason of a condition of the service, whose whole status the API server would refuse.
    "reason that is none": (
        "status.reason: .*should match",
        patch(METAL_PROCESSES, "chat-1", put("/status", {"reason": "no reason\n"}), namespace="own", sub="status"),
    ),
    "reason that no Event takes": (
        "status.reason: Too long",
        patch(METAL_PROCESSES, "chat-1", put("/status", {"reason": "A" * 129}), namespace="own", sub="status"),
    ),
    "chip that fills the tables of others": (
        "status.chip: Too long",
        patch(METAL_HOSTS, "studio-1", put("/status", {"chip": "a" * 257}), sub="status"),
    ),
    "engines without end": (
        "status.runtimes: Too many",
        patch(
            METAL_HOSTS, "studio-1", put("/status", {"runtimes": [str(number) for number in range(65)]}), sub="status"
        ),
    ),
    "slice of a generated name": ("writes only EndpointSlices named", generate(ENDPOINT_SLICES, "chat.studio-1")),
    "slice of a generated host": ("writes only EndpointSlices named", generate(ENDPOINT_SLICES, "chat.x")),
    "host of a generated name": ("writes only its own MetalHost", generate(METAL_HOSTS, "studio-1")),
    "Lease of a generated name": ("cannot create", generate(LEASES, "studio-1")),
    "Event about itself in a system's namespace": (
        "about itself, in namespace default",
        lambda hosts: hosts.own.create(*event_about_host(namespace="kube-system")),
    ),
    "Event about itself in a tenant's namespace": (
        "about itself, in namespace default",
        lambda hosts: hosts.own.create(*event_about_host(namespace=hosts.namespace)),
    ),
    "Event that cannot be deleted": (
        "no labels, annotations, finalizers and owners",
        lambda hosts: hosts.own.create(*event_about_host(finalizers=["thief.example/stay"])),
    ),
    "Event that is much larger than others": (
        "no labels, annotations, finalizers and owners",
        lambda hosts: hosts.own.create(*event_about_host(annotations={"a": "a" * 200_000})),
    ),
    "Event with a long note": (
        "can have at most 1024 characters",
        lambda hosts: hosts.own.create(*event_about_host(note="a" * 200_000)),
    ),
    "Event that another has reported": ("field is immutable", take_event),
    "Lease of another host, renewed": (
        "cannot patch|not those of",
        lambda hosts: apply(hosts, build_lease(hosts.processes["other-1"])),
    ),
    "Lease with a finalizer": (
        "adds no finalizer",
        lambda hosts: apply(hosts, build_lease(hosts.processes["chat-1"], finalizers=["thief.example/stay"])),
    ),
    "Lease of the controller": (
        "cannot",
        patch(LEASES, "pomona-controller", put("/spec/holderIdentity", "thief"), namespace="pomona-system"),
    ),
    "Lease of a node": (
        "cannot",
        patch(LEASES, "cpu-1", put("/spec/holderIdentity", "x"), namespace="kube-node-lease"),
    ),
}


async def test_unusual_requests_of_a_host_open_nothing(hosts: Hosts) -> None:
    wrong: dict[str, str] = {}
    for name, (says, attempt) in BY_HOST.items():
        before = await guarded(hosts)
        try:
            await attempt(hosts)
        except ApiError as error:
            outcome = f"{type(error).__name__}: {error.message}"
        else:
            outcome = "unchanged" if await guarded(hosts) == before else "accepted"
        if not re.search(says, outcome):
            wrong[name] = outcome
    assert wrong == {}


async def guarded(hosts: Hosts) -> list[object]:
    """Return all that a host may not change: metadata and spec of its host and its process."""
    objects = [
        await hosts.admin.get(METAL_HOSTS, "studio-1"),
        await hosts.admin.get(METAL_PROCESSES, "chat-1", hosts.namespace),
    ]
    return [
        (
            obj["spec"],
            {key: obj["metadata"].get(key) for key in ("labels", "finalizers", "ownerReferences", "deletionTimestamp")},
        )
        for obj in objects
    ]


@pytest.mark.parametrize(
    ("resource", "name"),
    [
        (INFERENCE_SERVICES, "a.b"),
        (INFERENCE_SERVICES, "a" * 64),
        (INFERENCE_SERVICES, "1a"),
        (MODELS, "a" * 253),
    ],
)
async def test_name_that_would_be_cut_or_split_is_refused(
    client: Client, namespace: str, resource: Resource, name: str
) -> None:
    """Names of Services, slices, Jobs and Secrets are made of it: none may be another object's."""
    with pytest.raises(Invalid, match=r"use a name|use at most 40"):
        await client.create(resource, make_manifest(resource, namespace, name))
