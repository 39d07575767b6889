"""An applied object is recognized as applied, and a changed one is not, as a real API server stores them."""

from collections.abc import Mapping
from typing import Any

import pytest

from kube import credentials
from kube.apply import UndeclaredFields, apply_status, is_applied
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    JOBS,
    LEASES,
    METAL_HOSTS,
    PVCS,
    SECRETS,
    SERVICES,
    Resource,
)
from kube.transport import AiohttpTransport
from tests.controlplane.plane import ControlPlane
from tests.support.api_faults import FaultyTransport

MANAGER = "pomona-test"


def pod_template(**spec: Any) -> Obj:
    container = {
        "name": "server",
        "image": "example.com/server:1",
        "command": ["serve", "--port", "8080"],
        "env": [
            {"name": "EMPTY", "value": ""},
            {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "one", "key": "token"}}},
        ],
        "ports": [{"name": "http", "containerPort": 8080}],
        "resources": {"requests": {"cpu": "1000m", "memory": "1024Mi"}, "limits": {"memory": "2147483648", "cpu": 2}},
        "securityContext": {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5},
        "volumeMounts": [
            {"name": "models", "mountPath": "/models", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    volumes = [
        {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1024Mi"}},
        {"name": "token", "secret": {"secretName": "one", "items": [{"key": "token", "path": "token"}]}},
    ]
    return {
        "metadata": {"labels": {"app": "one"}},
        "spec": {"containers": [container], "volumes": volumes, **spec},
    }


def deployment(namespace: str, **template: Any) -> Obj:
    return {
        "metadata": {"namespace": namespace, "name": "one", "labels": {"app": "one"}},
        "spec": {
            "replicas": 0,
            "minReadySeconds": 0,
            "selector": {"matchLabels": {"app": "one"}},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": pod_template(**template),
        },
    }


def kinds(namespace: str) -> list[tuple[Resource, Obj]]:
    metadata = {"namespace": namespace, "name": "one"}
    owner = {"apiVersion": "v1", "kind": "Secret", "name": "owner", "uid": "1234", "controller": True}
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1024Mi"}}}
    failure = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    job = {"backoffLimit": 3, "podFailurePolicy": {"rules": [failure]}}
    ready = {"ready": True, "serving": True, "terminating": False}
    return [
        (DEPLOYMENTS, deployment(namespace, tolerations=[toleration], nodeSelector={"gpu": "yes"})),
        (
            SERVICES,
            {"metadata": metadata, "spec": {"selector": {"app": "one"}, "ports": [{"name": "http", "port": 8080}]}},
        ),
        (
            SECRETS,
            {"metadata": {**metadata, "ownerReferences": [owner], "finalizers": ["pomona.dev/test"]}, "data": {}},
        ),
        (PVCS, {"metadata": {**metadata, "name": "models"}, "spec": claim}),
        (JOBS, {"metadata": metadata, "spec": {**job, "template": pod_template(restartPolicy="Never")}}),
        (
            ENDPOINT_SLICES,
            {
                "metadata": metadata,
                "addressType": "IPv4",
                "endpoints": [{"addresses": ["10.77.9.9"], "conditions": ready}],
                "ports": [{"name": "http", "port": 18000}],
            },
        ),
        (LEASES, {"metadata": metadata, "spec": {"holderIdentity": "one", "leaseDurationSeconds": 40}}),
    ]


async def test_an_applied_object_is_recognized_after_the_server_defaulted_it(client: Client, namespace: str) -> None:
    for resource, desired in kinds(namespace):
        await client.apply(resource, desired, field_manager=MANAGER)
        # Read it back: the answer to the write may differ from the stored object.
        observed = await client.get(resource, desired["metadata"]["name"], namespace)
        assert is_applied(resource, desired, observed, MANAGER), f"{resource} would be written at each reconcile"
    leftover = [{"op": "remove", "path": "/metadata/finalizers"}]
    await client.patch_json(SECRETS, "one", namespace, leftover)


def edit(desired: Any, path: str, value: Any = None) -> Any:
    """Return a copy of `desired` with `value` at `path`, or without `path`."""
    head, _, rest = path.partition(".")
    key: Any = int(head) if head.isdecimal() else head
    if not rest:
        if isinstance(desired, list):
            return desired[:key] + ([] if value is None else [value]) + desired[key + 1 :]
        without = {name: kept for name, kept in desired.items() if name != key}
        return without if value is None else {**without, key: value}
    new = desired.copy()
    new[key] = edit(desired[key], rest, value)
    return new


CONTAINER = "spec.template.spec.containers.0"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.replicas", 2),
        ("metadata.labels", None),
        ("spec.strategy", None),
        ("spec.template.spec.tolerations", None),
        ("spec.template.spec.tolerations.0", None),
        ("spec.template.spec.nodeSelector", None),
        ("spec.template.spec.nodeSelector", {"zone": "a"}),
        ("spec.template.spec.nodeSelector.gpu", None),
        (f"{CONTAINER}.command", ["serve"]),
        (f"{CONTAINER}.command.2", "8081"),
        (f"{CONTAINER}.env.0", None),
        (f"{CONTAINER}.env.0.value", "full"),
        (f"{CONTAINER}.env.1.valueFrom.fieldRef.fieldPath", "status.hostIP"),
        (f"{CONTAINER}.env", None),
        (f"{CONTAINER}.ports.0.containerPort", 8081),
        (f"{CONTAINER}.resources.limits.memory", "3Gi"),
        (f"{CONTAINER}.resources.requests.cpu", None),
        (f"{CONTAINER}.readinessProbe", None),
        (f"{CONTAINER}.readinessProbe.httpGet.path", "/ready"),
        (f"{CONTAINER}.securityContext.readOnlyRootFilesystem", None),
        (f"{CONTAINER}.volumeMounts.1", None),
        ("spec.template.spec.volumes.1.emptyDir.sizeLimit", "2Gi"),
    ],
)
async def test_an_edit_or_removal_is_detected_and_applied(
    client: Client, namespace: str, path: str, value: Any
) -> None:
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists"}
    first = deployment(namespace, tolerations=[toleration], nodeSelector={"gpu": "yes", "zone": "a"})
    before = await client.apply(DEPLOYMENTS, first, field_manager=MANAGER)
    second = edit(first, path, value)
    assert not is_applied(DEPLOYMENTS, second, before, MANAGER)
    after = await client.apply(DEPLOYMENTS, second, field_manager=MANAGER)
    assert after["metadata"]["generation"] > before["metadata"]["generation"] or path.startswith("metadata")
    assert after["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]
    assert is_applied(DEPLOYMENTS, second, after, MANAGER)


async def test_fields_of_other_managers_are_no_difference(client: Client, namespace: str) -> None:
    desired = deployment(namespace)
    await client.apply(DEPLOYMENTS, desired, field_manager=MANAGER)
    sidecar = {"name": "sidecar", "image": "example.com/sidecar:1"}
    injected = [
        {"op": "add", "path": "/metadata/annotations", "value": {"injected": "true"}},
        {"op": "add", "path": "/spec/template/spec/containers/0", "value": sidecar},
        {"op": "add", "path": "/spec/template/spec/containers/1/env/0", "value": {"name": "PROXY", "value": "1"}},
    ]
    observed = await client.patch_json(DEPLOYMENTS, "one", namespace, injected)
    assert is_applied(DEPLOYMENTS, desired, observed, MANAGER)
    drifted = [{"op": "replace", "path": "/spec/template/spec/containers/1/image", "value": "example.com/other"}]
    observed = await client.patch_json(DEPLOYMENTS, "one", namespace, drifted)
    assert not is_applied(DEPLOYMENTS, desired, observed, MANAGER)
    assert not is_applied(DEPLOYMENTS, desired, observed, "another-manager")


async def test_a_significant_order_is_applied(client: Client, namespace: str) -> None:
    desired = deployment(namespace)
    before = await client.apply(DEPLOYMENTS, desired, field_manager=MANAGER)
    container = desired["spec"]["template"]["spec"]["containers"][0]
    container["env"] = container["env"][::-1]
    assert not is_applied(DEPLOYMENTS, desired, before, MANAGER)
    after = await client.apply(DEPLOYMENTS, desired, field_manager=MANAGER)
    env = after["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [variable["name"] for variable in env] == ["TOKEN", "ADDRESS", "EMPTY"]
    assert is_applied(DEPLOYMENTS, desired, after, MANAGER)


async def test_status_is_written_only_when_it_differs_and_only_to_the_same_uid(
    faulty: Client, transport: FaultyTransport, plane: ControlPlane
) -> None:
    del plane
    host = await faulty.apply(METAL_HOSTS, {"metadata": {"name": "status-test"}, "spec": {}}, field_manager=MANAGER)
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Up",
        "message": "",
        "lastTransitionTime": "2026-11-21T13:10:00Z",
    }
    status: Mapping[str, Any] = {"conditions": [condition]}
    transport.sent.clear()
    host = await apply_status(faulty, METAL_HOSTS, host, status, MANAGER)
    assert host["status"] == status
    await apply_status(faulty, METAL_HOSTS, host, status, MANAGER)
    assert len(transport.sent) == 1
    host = await apply_status(faulty, METAL_HOSTS, host, {"chip": "M4"}, MANAGER)
    assert host["status"] == {"chip": "M4"}, "what is left out is given up"
    await faulty.apply(METAL_HOSTS, {"metadata": {"name": "status-test", "labels": {"a": "b"}}}, field_manager="user")
    behind = await apply_status(faulty, METAL_HOSTS, host, status, MANAGER)
    assert (behind["metadata"]["labels"], behind["status"]) == ({"a": "b"}, status), "only behind: the same object"
    await faulty.delete(METAL_HOSTS, "status-test")
    with pytest.raises(NotFound):
        await apply_status(faulty, METAL_HOSTS, host, status, MANAGER)
    again = await faulty.apply(METAL_HOSTS, {"metadata": {"name": "status-test"}, "spec": {}}, field_manager=MANAGER)
    with pytest.raises(NotFound, match="another has its name"):
        await apply_status(faulty, METAL_HOSTS, host, status, MANAGER)
    await faulty.delete(METAL_HOSTS, "status-test", uid=again["metadata"]["uid"])


async def test_status_with_fields_of_a_later_release_is_written_without_them(plane: ControlPlane) -> None:
    transport, undeclared = FaultyTransport(AiohttpTransport(credentials.load(plane.kubeconfig()))), UndeclaredFields()
    client = Client(transport)
    observed = await client.create(METAL_HOSTS, {"metadata": {"name": "later"}, "spec": {}})
    levels = [{"name": "Super", "cores": 6, "speed": 3}]
    later = {"address": "10.0.0.7", "tomorrow": ["a"], "moods": {"good": True}}
    try:
        for status in (later, later, {**later, "coreLevels": levels}):
            observed = await apply_status(client, METAL_HOSTS, observed, status, MANAGER, undeclared=undeclared)
            kept = {"coreLevels": [{"name": "Super", "cores": 6}]} if "coreLevels" in status else {}
            assert observed["status"] == {"address": "10.0.0.7", **kept}
    finally:
        await client.delete(METAL_HOSTS, "later")
        await transport.close()
    writes = [request for request in transport.sent if request.method == "PATCH"]
    assert len(writes) == 5, "one is refused for each field, two are written, and the same is not sent again"
