"""A kubelet's calls to the API server beyond `kube.client`: strategic merge patch, pod tokens, final deletion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kube.client import Client, Obj
from kube.errors import BY_STATUS, ApiError, Conflict, NotFound
from kube.resources import PODS, Resource
from kube.transport import Request, Transport

CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
PERSISTENT_VOLUMES = Resource("", "v1", "persistentvolumes", "PersistentVolume", namespaced=False)
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")


class NodeAPI:
    """Requests of one node to the API server. Methods raise ApiError and Unreachable as `Client` does."""

    def __init__(self, transport: Transport) -> None:
        self.client = Client(transport)
        self._transport = transport

    async def patch_status(self, resource: Resource, obj: Obj, status: Mapping[str, Any]) -> Obj:
        """Write a status by strategic merge patch, which keeps conditions of other writers; only for this uid."""
        metadata = obj["metadata"]
        body: Obj = {"status": status}
        if uid := metadata.get("uid"):
            body["metadata"] = {"uid": uid}
        path = resource.path(metadata.get("namespace"), metadata["name"], "status")
        return await self._send("PATCH", path, body, "application/strategic-merge-patch+json")

    async def patch_merge(self, resource: Resource, name: str, namespace: str | None, body: Obj) -> Obj:
        """Merge fields into an object by JSON merge patch."""
        return await self._send("PATCH", resource.path(namespace, name), body, "application/merge-patch+json")

    async def find_address(self, namespace: str, pod: str) -> str:
        """Return the address of a pod. Raises LookupError: it has none yet."""
        return str((await self.client.get(PODS, pod, namespace))["status"]["podIP"])

    async def token(self, pod: Obj, *, audience: str | None, expiration_seconds: int) -> str:
        """Return a token of the pod's ServiceAccount that is bound to the pod."""
        metadata = pod["metadata"]
        path = SERVICE_ACCOUNTS.path(metadata["namespace"], pod["spec"].get("serviceAccountName", "default"), "token")
        bound = {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"]}
        spec: Obj = {"expirationSeconds": expiration_seconds, "boundObjectRef": bound}
        if audience:
            spec["audiences"] = [audience]
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = await self._send("POST", path, body)
        return str(answer["status"]["token"])

    async def delete_now(self, pod: Obj) -> None:
        """Delete the object of a stopped pod at once; do nothing if it is gone or replaced by another pod."""
        metadata = pod["metadata"]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        try:
            await self._send("DELETE", PODS.path(metadata["namespace"], metadata["name"]), body)
        except (NotFound, Conflict):
            return

    async def _send(self, method: str, path: str, body: Obj, content_type: str = "application/json") -> Obj:
        answer = await self._transport.request(
            Request(method, path, body=msgspec.json.encode(body), content_type=content_type)
        )
        if answer.status < 300:
            return msgspec.json.decode(answer.body, type=dict[str, Any])
        try:
            problem = msgspec.json.decode(answer.body, type=dict[str, Any])
        except msgspec.DecodeError:
            problem = {"message": answer.body.decode(errors="replace")}
        raise BY_STATUS.get(answer.status, ApiError)(
            f"{method} {path}",
            status=answer.status,
            reason=problem.get("reason", ""),
            message=problem.get("message", ""),
        )
