"""A transport by which a controller sees one namespace and the hosts named after it, as if there were nothing else.

So many controllers run at once in one process, on one API server, and none works for another's objects. Each world has
a ledger of the queue of its own, in its namespace. All see the same nodes, and there the pods of their own namespace.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from controller.placement.ledger import LEDGER
from crds.meta import CONTROLLER_NAMESPACE, HOSTS_NAMESPACE
from kube.client import Obj
from kube.resources import ACCELERATOR_POOLS, CONFIG_MAPS, LEASES, METAL_HOSTS, NODES, ROLE_BINDINGS, ROLES
from kube.transport import Request, Response, Stream, Transport

_OF_CLUSTER: Final = frozenset(
    {
        METAL_HOSTS.path(None),
        ACCELERATOR_POOLS.path(None),
        *(resource.path(HOSTS_NAMESPACE) for resource in (LEASES, ROLES, ROLE_BINDINGS)),
    }
)
_CONFIG_MAPS: Final = CONFIG_MAPS.path(CONTROLLER_NAMESPACE)
_LEDGER: Final = CONFIG_MAPS.path(CONTROLLER_NAMESPACE, LEDGER)
_PARTS_OF_ALL: Final = {"api": 3, "apis": 4}
"""Segments of the path of a collection in all namespaces: `/api/v1/pods`, `/apis/apps/v1/deployments`."""


class ScopedTransport:
    """The transport `inner`, limited to `namespace` and to hosts and pools that are named after it.

    `ledgers` writes the ledger: a policy keeps the controller's own account to the one of the installation.
    """

    def __init__(self, inner: Transport, namespace: str, ledgers: Transport) -> None:
        self._inner = inner
        self._namespace = namespace
        self._ledgers = ledgers

    async def request(self, request: Request) -> Response:
        if request.path == _LEDGER or (request.path == _CONFIG_MAPS and request.method == "POST"):
            return await self._ledgers.request(self._move_ledger(request))
        response = await self._inner.request(self._narrow(request))
        if request.method == "GET" and request.path in _OF_CLUSTER and response.status == 200:
            listing = msgspec.json.decode(response.body)
            listing["items"] = [obj for obj in listing["items"] if self._is_ours(obj)]
            return replace(response, body=msgspec.json.encode(listing))
        return response

    @contextlib.asynccontextmanager
    async def stream(self, request: Request, *, idle_seconds: float) -> AsyncIterator[Stream]:
        async with self._inner.stream(self._narrow(request), idle_seconds=idle_seconds) as stream:
            chunks = self._select(stream.chunks) if request.path in _OF_CLUSTER else stream.chunks
            yield replace(stream, chunks=chunks)

    async def reconnect(self) -> None:
        await self._inner.reconnect()

    async def close(self) -> None:
        await self._inner.close()

    def _move_ledger(self, request: Request) -> Request:
        """Return the request for the ledger of this world."""
        path = request.path.replace(_CONFIG_MAPS, CONFIG_MAPS.path(self._namespace))
        body = request.body
        if request.method == "POST":
            obj = msgspec.json.decode(body or b"{}")
            body = msgspec.json.encode(obj | {"metadata": obj["metadata"] | {"namespace": self._namespace}})
        return replace(request, path=path, body=body)

    def _narrow(self, request: Request) -> Request:
        """Return the request for one namespace if it is one for all."""
        parts = request.path.strip("/").split("/")
        if request.method != "GET" or len(parts) != _PARTS_OF_ALL[parts[0]]:
            return request
        if request.path in _OF_CLUSTER or request.path == NODES.path():
            return request
        return replace(request, path="/".join(["", *parts[:-1], "namespaces", self._namespace, parts[-1]]))

    def _is_ours(self, obj: Mapping[str, Any]) -> bool:
        return self._namespace in str(obj["metadata"]["name"])

    async def _select(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        rest = b""
        async for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                event: Obj = msgspec.json.decode(line)
                if event["type"] in {"BOOKMARK", "ERROR"} or self._is_ours(event["object"]):
                    yield line + b"\n"
