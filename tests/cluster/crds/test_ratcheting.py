"""Objects that were stored under CRDs without the checks of the present ones, which would refuse them.

The API server ratchets: a field that was valid once and is not changed is not refused (beta since Kubernetes 1.30, so
on by default). Pomona relies on it: whoever updates the CRDs must still be able to edit and delete what is there.
"""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
import yaml

from crds.meta import PROCESS_FINALIZER
from kube.client import Client, Obj
from kube.errors import Invalid, NotFound
from kube.resources import INFERENCE_SERVICES, METAL_PROCESSES, MODELS, Resource
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.controlplane.process import CHECKOUT
from tests.support.eventually import eventually
from tests.support.refused_manifests import MODEL, make_manifest

HOLD: Final = "example.com/hold"
ONCE_VALID: Final[dict[Resource, dict[str, Any]]] = {
    MODELS: {"cache": {"storageClassName": "Fast_Disk"}},
    INFERENCE_SERVICES: {"modelRef": "../other", "adapters": [{"modelRef": "Accent"}]},
    METAL_PROCESSES: {
        "serviceName": "../../kube-system",
        "modelName": "Tiny Model",
        "hostName": "Studio_1",
        "artifact": {**MODEL, "sha256": "none"},
    },
}
"""Fields that CRDs without these checks accept."""
CHECKS: Final = ("pattern", "maxLength", "x-kubernetes-validations")
RESOURCES: Final = tuple(ONCE_VALID)
LONG: Final = "long"
"""Name of a service whose memory is a quantity of a million digits."""


def once_valid(resource: Resource, namespace: str) -> Obj:
    manifest = make_manifest(resource, namespace, **ONCE_VALID[resource])
    finalizer = PROCESS_FINALIZER if resource == METAL_PROCESSES else HOLD
    manifest["metadata"]["finalizers"] = [finalizer]
    return manifest


@pytest_asyncio.fixture
async def stored(plane: ControlPlane, client: Client, namespace: str, tmp_path: Path) -> AsyncIterator[str]:
    """A namespace with one such object of each kind; the present CRDs are in force."""

    async def accepts(resource: Resource, *, accepted: bool) -> bool:
        try:
            path = f"{resource.path(namespace)}?dryRun=All"
            manifest = once_valid(resource, namespace)
            # The stored object's name would be refused whichever checks are in force.
            manifest["metadata"]["name"] = "tried"
            await plane.request("POST", path, manifest)
        except PlaneError:
            return not accepted
        return accepted

    for path in (CHECKOUT / "crds").glob("*.yaml"):
        (tmp_path / path.name).write_text(yaml.safe_dump(_without_checks(yaml.safe_load(path.read_text()))))
    await plane.apply(tmp_path)
    try:
        for resource in RESOURCES:
            await eventually(partial(accepts, resource, accepted=True))
            await client.create(resource, once_valid(resource, namespace))
        memory = {"memory": "9" * 990_000}
        await client.create(INFERENCE_SERVICES, make_manifest(INFERENCE_SERVICES, namespace, LONG, resources=memory))
    finally:
        await plane.apply(CHECKOUT / "crds")
    for resource in RESOURCES:
        await eventually(partial(accepts, resource, accepted=False))
    yield namespace


def _without_checks(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {name: _without_checks(each) for name, each in schema.items() if name not in CHECKS}
    return [_without_checks(each) for each in schema] if isinstance(schema, list) else schema


async def read_condition(client: Client, resource: Resource, namespace: str, name: str = "one") -> Obj:
    found = await client.get(resource, name, namespace)
    return next(each for each in found["status"]["conditions"] if each["type"] == "Ready")


@pytest.mark.usefixtures("controller")
async def test_objects_that_were_stored_without_checks_stay_usable(client: Client, stored: str) -> None:
    async def patch(resource: Resource, path: str, value: object, operation: str = "add") -> Obj:
        operations = [{"op": operation, "path": path} | ({} if operation == "remove" else {"value": value})]
        return await client.patch_json(resource, "one", stored, operations)

    # The controller writes their statuses ...
    for resource in (MODELS, INFERENCE_SERVICES):
        assert await eventually(partial(read_condition, client, resource, stored))
    waits = await read_condition(client, INFERENCE_SERVICES, stored)
    assert (waits["reason"], "../other" in waits["message"]) == ("ModelNotFound", True)

    long = await eventually(partial(read_condition, client, INFERENCE_SERVICES, stored, LONG))
    assert (long["reason"], long["message"][:26]) == ("InvalidSpec", "resources.memory is 999999")
    assert len(long["message"]) < 256
    await client.delete(INFERENCE_SERVICES, LONG, stored)

    # ... an owner edits another field, and a wrong one only to a valid one, ...
    await patch(INFERENCE_SERVICES, "/spec/replicas", 2)
    applied = make_manifest(INFERENCE_SERVICES, stored, **ONCE_VALID[INFERENCE_SERVICES], contextLength=8192)
    await client.apply(INFERENCE_SERVICES, applied, field_manager="owner")
    await patch(MODELS, "/spec/memoryBytes", 1 << 30)
    with pytest.raises(Invalid, match=r"spec\.modelRef: .*should match"):
        await patch(INFERENCE_SERVICES, "/spec/modelRef", "../another")
    edited = await patch(INFERENCE_SERVICES, "/spec/modelRef", "one")
    assert (edited["spec"]["replicas"], edited["spec"]["contextLength"]) == (2, 8192)

    async def followed() -> bool:
        ready, generation = await read_condition(client, INFERENCE_SERVICES, stored), edited["metadata"]["generation"]
        return bool(ready["observedGeneration"] == generation)

    await eventually(followed)

    # ... and each can be deleted, whoever has a finalizer: the controller has that of a process without a host.
    for resource in RESOURCES:
        await client.delete(resource, "one", stored)
    for resource in (MODELS, INFERENCE_SERVICES):
        assert HOLD in (await client.get(resource, "one", stored))["metadata"]["finalizers"]
        await patch(resource, "/metadata/finalizers", None, "remove")

    async def is_gone(resource: Resource) -> bool:
        try:
            await client.get(resource, "one", stored)
        except NotFound:
            return True
        return False

    for resource in RESOURCES:
        await eventually(partial(is_gone, resource))
