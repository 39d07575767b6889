"""The API server's verbs on plain JSON objects.

One method is one request (a list is one per page), so a caller knows between which calls it can die. A refusal is
an ApiError that names the call; only 429 is waited for, because the server asks for it and says how long.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kube.credentials import Credentials
from kube.resources import Resource
from kube.transport import AiohttpTransport, Transport

Obj = dict[str, Any]
"""An object of the API as decoded JSON."""


@dataclass(frozen=True, slots=True)
class ObjectList:
    """A consistent list and the resourceVersion to watch from."""

    items: list[Obj]
    resource_version: str


class WatchEvent(msgspec.Struct, frozen=True):
    """ADDED, MODIFIED, DELETED or BOOKMARK (whose object has a metadata.resourceVersion only)."""

    type: str
    object: Obj


class Client:
    """The API server, spoken to through `transport`, which the caller closes (see `connect`).

    Every method raises ApiError (by status: NotFound, Conflict, Gone, Forbidden, Invalid) and Unreachable.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        """Read one object."""
        raise NotImplementedError

    async def list(
        self, resource: Resource, namespace: str | None = None, *, label_selector: str = "", field_selector: str = ""
    ) -> ObjectList:
        """Read all objects that match, in pages; items carry apiVersion and kind."""
        raise NotImplementedError

    async def list_metadata(
        self, resource: Resource, namespace: str | None = None, *, label_selector: str = "", field_selector: str = ""
    ) -> ObjectList:
        """Read the metadata of all objects that match: cheap, enough to know who exists."""
        raise NotImplementedError

    def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
    ) -> AsyncIterator[WatchEvent]:
        """Changes since `resource_version`, until the server ends the watch.

        Raises, besides the usual: Gone when the version is too old; Unreachable when neither an event nor a bookmark
        came for 70 seconds.
        """
        raise NotImplementedError

    async def create(self, resource: Resource, obj: Mapping[str, Any]) -> Obj:
        """Create an object that must not exist yet (else Conflict, with reason AlreadyExists)."""
        raise NotImplementedError

    async def apply(
        self,
        resource: Resource,
        obj: Mapping[str, Any],
        *,
        field_manager: str,
        subresource: str = "",
        force: bool = True,
    ) -> Obj:
        """Server-side apply: `obj` is everything that `field_manager` wants; what it left out, it gives up.

        A metadata.uid or metadata.resourceVersion in `obj` is a precondition (Conflict).
        """
        raise NotImplementedError

    async def patch_json(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        operations: Sequence[Mapping[str, Any]],
        *,
        subresource: str = "",
    ) -> Obj:
        """JSON patch; a failed `test`, or a path that is not there, raises Conflict."""
        raise NotImplementedError

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: str = "Background",
    ) -> None:
        """Delete one object; with `uid` or `resource_version` only this very one (else Conflict)."""
        raise NotImplementedError


@contextlib.asynccontextmanager
async def connect(credentials: Credentials) -> AsyncIterator[Client]:
    """A client over HTTP, whose connections are closed on exit."""
    transport = AiohttpTransport(credentials)
    try:
        yield Client(transport)
    finally:
        await transport.close()
