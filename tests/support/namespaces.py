"""A new namespace for one test, which leaves nothing in it that a controller of a later test would find.

The namespace itself stays. Its deletion would list and delete the objects of each of some forty kinds, about seventy
requests: for hundreds of tests these were most of what the API server did.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Final

from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    JOBS,
    METAL_PROCESSES,
    MODELS,
    NAMESPACES,
    PODS,
    PVCS,
    SERVICES,
    Resource,
)
from tests.controlplane.plane import ControlPlane
from tests.support.eventually import eventually

_ENDPOINTS: Final = Resource("", "v1", "endpoints", "Endpoints")
_REPLICA_SETS: Final = Resource("apps", "v1", "replicasets", "ReplicaSet")
_ORDER: Final = (
    (INFERENCE_SERVICES, MODELS),
    (DEPLOYMENTS, METAL_PROCESSES),
    (_REPLICA_SETS, JOBS),
    (PODS, PVCS, SERVICES, _ENDPOINTS, ENDPOINT_SLICES),
)
"""Kinds of the objects in a namespace, makers before what they make: they would make anew what is deleted."""


@contextlib.asynccontextmanager
async def open_namespace(plane: ControlPlane, prefix: str = "test") -> AsyncIterator[str]:
    """Create a namespace, ready for pods; its objects are deleted at the end, even if nobody removes finalizers."""
    name = f"{prefix}-{secrets.token_hex(4)}"
    await plane.request("POST", NAMESPACES.path(), {"metadata": {"name": name}})

    async def has_account() -> bool:
        plane.revive_controller_manager()
        return bool(await plane.request("GET", f"/api/v1/namespaces/{name}/serviceaccounts/default"))

    # Without the account no pod is admitted; just after an outage the controller manager needs seconds to create it.
    await eventually(has_account)
    try:
        yield name
    finally:
        await plane.end_outage()
        await _delete_objects(plane, name)


async def _delete_objects(plane: ControlPlane, name: str) -> None:
    options = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
    for kinds in _ORDER:
        await asyncio.gather(*(plane.request("DELETE", kind.path(name), options) for kind in kinds))
    for process in (await plane.request("GET", METAL_PROCESSES.path(name)))["items"]:
        path = METAL_PROCESSES.path(name, process["metadata"]["name"])
        await plane.request("PATCH", path, {"metadata": {"finalizers": None}}, accept={404})
