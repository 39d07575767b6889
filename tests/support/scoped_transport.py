"""A transport by which a controller sees one namespace and the hosts named after it, as if there were nothing else.

So many controllers run at once in one process, on one API server, and none works for another's objects.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from crds.meta import HOSTS_NAMESPACE
from kube.client import Obj
from kube.resources import LEASES, METAL_HOSTS, NODES, ROLE_BINDINGS, ROLES
from kube.transport import Request, Response, Stream, Transport

_OF_HOSTS: Final = frozenset(
    {METAL_HOSTS.path(None), *(each.path(HOSTS_NAMESPACE) for each in (LEASES, ROLES, ROLE_BINDINGS))}
)
_PARTS_OF_ALL: Final = {"api": 3, "apis": 4}
"""Segments of the path of a collection in all namespaces: `/api/v1/pods`, `/apis/apps/v1/deployments`."""


class ScopedTransport:
    """The transport `inner`, limited to `namespace` and to hosts that are named after it."""

    def __init__(self, inner: Transport, namespace: str) -> None:
        self._inner = inner
        self._namespace = namespace

    async def request(self, request: Request) -> Response:
        response = await self._inner.request(self._narrow(request))
        if request.method == "GET" and request.path in _OF_HOSTS and response.status == 200:
            found = msgspec.json.decode(response.body)
            found["items"] = [each for each in found["items"] if self._is_ours(each)]
            return replace(response, body=msgspec.json.encode(found))
        return response

    @contextlib.asynccontextmanager
    async def stream(self, request: Request, *, idle_seconds: float) -> AsyncIterator[Stream]:
        async with self._inner.stream(self._narrow(request), idle_seconds=idle_seconds) as stream:
            chunks = self._select(stream.chunks) if request.path in _OF_HOSTS else stream.chunks
            yield replace(stream, chunks=chunks)

    async def reconnect(self) -> None:
        await self._inner.reconnect()

    async def close(self) -> None:
        await self._inner.close()

    def _narrow(self, request: Request) -> Request:
        """Return the request for one namespace if it is one for all."""
        parts = request.path.strip("/").split("/")
        if request.method != "GET" or len(parts) != _PARTS_OF_ALL[parts[0]]:
            return request
        if request.path in _OF_HOSTS or request.path == NODES.path():
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
