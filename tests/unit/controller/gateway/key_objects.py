"""A GatewayKey and its Secret, as the API server sends them."""

import base64
from typing import Any

from crds.meta import API_VERSION, ROTATE_KEY
from kube.client import Obj
from tests.support.api_objects import NAMESPACE

KEY = "k" * 40


def gateway_key(
    name: str = "app",
    *,
    namespace: str = NAMESPACE,
    rotate: str = "",
    status: Obj | None = None,
    created: str = "2026-11-21T11:00:00Z",
    version: int = 1,
    **spec: Any,
) -> Obj:
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "generation": 1,
            "resourceVersion": str(version),
            "creationTimestamp": created,
            "annotations": {ROTATE_KEY: rotate} if rotate else {},
        },
        "spec": spec,
        "status": status or {},
    }


def key_secret(key: str = KEY, name: str = "app", *, namespace: str = NAMESPACE, owner_uid: str | None = None) -> Obj:
    """Return the Secret of a GatewayKey; `owner_uid` is that of another owner."""
    owner = {"apiVersion": API_VERSION, "kind": "GatewayKey", "name": name, "uid": owner_uid or f"uid-{name}"}
    return {
        "metadata": {
            "name": f"{name}-key",
            "namespace": namespace,
            "uid": "uid-secret",
            "resourceVersion": "5",
            "ownerReferences": [owner | {"controller": True}],
        },
        "type": "Opaque",
        "data": {"key": base64.b64encode(key.encode()).decode()},
    }
