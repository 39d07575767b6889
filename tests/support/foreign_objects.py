"""Objects of others, one of each kind that the controller writes for its own, which it must not touch.

They carry Pomona's label, so that the controller sees them, and lack its owner reference. Kubernetes' own controllers
leave them alone, too, so that each can be compared as a whole, resourceVersion and managed fields included.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from crds.meta import HOSTS_NAMESPACE, LABEL_MANAGED_BY, MANAGED_BY
from kube.client import Client, Obj
from kube.errors import ApiError
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    JOBS,
    LEASES,
    NETWORK_POLICIES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    PVCS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    SERVICES,
    Resource,
)
from tests.support.eventually import eventually

FOREIGN: Final = "foreign"
"""The name of each, with the namespace behind it for those of hosts."""
_POD: Final = {"containers": [{"name": "a", "image": "a"}], "restartPolicy": "Never"}
_TEMPLATE: Final = {"metadata": {"labels": {"app": FOREIGN}}, "spec": _POD}
_IN_NAMESPACE: Final[dict[Resource, Obj]] = {
    SECRETS: {"stringData": {"token": "theirs"}},
    SERVICES: {"spec": {"clusterIP": "None", "ports": [{"port": 1}]}},
    ENDPOINT_SLICES: {"addressType": "IPv4", "endpoints": [{"addresses": ["10.77.0.9"]}], "ports": []},
    PVCS: {
        "spec": {"storageClassName": "", "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": 1}}}
    },
    POD_DISRUPTION_BUDGETS: {"spec": {"maxUnavailable": 1}},
    NETWORK_POLICIES: {"spec": {"podSelector": {"matchLabels": {"app": FOREIGN}}, "policyTypes": ["Ingress"]}},
    PODS: {"spec": _POD | {"schedulingGates": [{"name": "theirs.example/never"}]}},
    JOBS: {"spec": {"managedBy": "theirs.example/never", "template": _TEMPLATE}},
    DEPLOYMENTS: {
        "spec": {
            "replicas": 0,
            "paused": True,
            "selector": {"matchLabels": {"app": FOREIGN}},
            "template": {**_TEMPLATE, "spec": _POD | {"restartPolicy": "Always"}},
        }
    },
}
_OF_HOSTS: Final[dict[Resource, Obj]] = {
    SECRETS: {"stringData": {"token": "theirs"}},
    LEASES: {"spec": {"holderIdentity": "theirs"}},
    ROLES: {"rules": []},
    ROLE_BINDINGS: {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": FOREIGN}},
}


@contextlib.asynccontextmanager
async def foreign_objects(client: Client, namespace: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Create them, and yield a function which asserts that they are as they were."""
    bodies = [(each, FOREIGN, namespace, body) for each, body in _IN_NAMESPACE.items()]
    in_hosts = [(host, f"{FOREIGN}-{namespace}", HOSTS_NAMESPACE, body) for host, body in _OF_HOSTS.items()]
    labels = {LABEL_MANAGED_BY: MANAGED_BY}

    async def create(resource: Resource, name: str, namespace: str, body: Obj) -> None:
        await client.create(resource, {"metadata": {"name": name, "namespace": namespace, "labels": labels}, **body})

    async def read() -> list[Obj]:
        return [await client.get(resource, name, namespace) for resource, name, namespace, _ in bodies + in_hosts]

    async def is_observed() -> bool:
        """Return whether Kubernetes' controllers have written all that they write."""
        budget = (await client.get(POD_DISRUPTION_BUDGETS, FOREIGN, namespace))["status"]
        status = (await client.get(DEPLOYMENTS, FOREIGN, namespace))["status"]
        deployed = status["observedGeneration"], status["conditions"][0]["reason"]
        return (budget["observedGeneration"], *deployed) == (1, 1, "DeploymentPaused")

    # One after the other: many worlds begin at once, and each request beside another opens a connection of its own.
    for foreign in bodies + in_hosts:
        await create(*foreign)
    await eventually(is_observed)
    before = await read()

    async def assert_unchanged() -> None:
        assert await read() == before

    try:
        yield assert_unchanged
    finally:
        for resource, name, hosts_namespace, _ in in_hosts:
            with contextlib.suppress(ApiError):
                await client.delete(resource, name, hosts_namespace)
