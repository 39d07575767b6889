"""The number of labels, finalizers and owners of Models and services, which no schema of a CRD can limit."""

import pytest

from kube.client import Client, Obj
from kube.errors import ApiError
from kube.resources import INFERENCE_SERVICES, MODELS, Resource
from tests.cluster.policy.test_tenant_token import tenant
from tests.support.refused_manifests import make_manifest

__all__ = ["tenant"]

LABELS = {f"example.com/label-{number}": "x" for number in range(256)}
FINALIZERS = [f"example.com/finalizer-{number}" for number in range(32)]
# Of a kind that the garbage collector does not know: it deletes an object whose owners it looks for and does not find.
OWNERS = [
    {"apiVersion": "example.com/v1", "kind": "Owner", "name": f"owner-{number}", "uid": f"uid-{number}"}
    for number in range(32)
]
FIELDS: dict[str, tuple[object, object]] = {
    "labels": (LABELS, LABELS | {"one": "more"}),
    "finalizers": (FINALIZERS, [*FINALIZERS, "example.com/more"]),
    "ownerReferences": (OWNERS, [*OWNERS, OWNERS[0] | {"name": "more", "uid": "more"}]),
}
"""As many of each field as an object may have, and one more."""


def with_metadata(resource: Resource, namespace: str, **metadata: object) -> Obj:
    made = make_manifest(resource, namespace)
    return {**made, "metadata": made["metadata"] | metadata}


@pytest.mark.parametrize("resource", [MODELS, INFERENCE_SERVICES], ids=["model", "service"])
@pytest.mark.parametrize("field", FIELDS)
async def test_tenant_stores_only_so_much_metadata(
    tenant: Client, namespace: str, resource: Resource, field: str
) -> None:
    """The leader would keep 4 MB of an object with 20,000 labels, at replicas 0."""
    most, too_many = FIELDS[field]
    with pytest.raises(ApiError, match=rf"metadata\.{field} has \d+ .* at most"):
        await tenant.create(resource, with_metadata(resource, namespace, **{field: too_many}))
    await tenant.create(resource, with_metadata(resource, namespace, **{field: most}))
    path = f"/metadata/{field}"
    with pytest.raises(ApiError, match=rf"metadata\.{field} has \d+ .* at most"):
        await tenant.patch_json(resource, "one", namespace, [{"op": "add", "path": path, "value": too_many}])
    await tenant.patch_json(resource, "one", namespace, [{"op": "remove", "path": path}])
