"""The API server's verbs on plain JSON objects.

One method is one request (a list is one per page), so it is clear between which requests a caller can die. A refusal
is an ApiError that names the call; only 429 is retried here, because the server requests a retry and states the delay.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from kube.apply_body import APPLY_TYPE, encode_apply_body
from kube.credentials import Credentials
from kube.errors import BY_STATUS, ApiError, Conflict, Gone, Invalid, Unreachable
from kube.resources import PODS, VERSIONS, Resource
from kube.transport import AiohttpTransport, Request, Response, Transport

Obj = dict[str, Any]
"""An object of the API as decoded JSON."""

Read = Callable[[msgspec.Raw], Obj]
"""Decodes the part of an object that is needed, with its metadata: whole objects cost ten times as much and more."""
OnCall = Callable[[str, Resource, int, float], None]
"""Called with verb, resource, HTTP status (0: no answer) and seconds of each request."""

PAGE = 500
WATCH_IDLE_SECONDS = 70.0
"""The server sends a bookmark at least each minute; longer silence is a dead connection."""
LOG_IDLE_SECONDS = 86_400.0
"""A container may log nothing for hours."""
_THROTTLED_TRIES = 4
_THROTTLED_MOST_SECONDS = 10.0
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ObjectList:
    """A consistent list and the resourceVersion to watch from."""

    items: list[Obj]
    resource_version: str


class WatchEvent(msgspec.Struct, frozen=True):
    """ADDED, MODIFIED, DELETED or BOOKMARK (whose object has a metadata.resourceVersion only)."""

    type: str
    object: Obj


class _ListMetadata(msgspec.Struct, frozen=True, rename={"resource_version": "resourceVersion", "more": "continue"}):
    resource_version: str = ""
    more: str = ""


class _Page(msgspec.Struct, Generic[T], frozen=True):
    metadata: _ListMetadata
    items: list[T] | None = None


class _UnreadEvent(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Cause(msgspec.Struct, frozen=True):
    field: str = ""
    message: str = ""


class _Details(msgspec.Struct, frozen=True):
    causes: list[_Cause] = []


class _Status(msgspec.Struct, frozen=True):
    """The fields of metav1.Status that we read."""

    message: str = ""
    reason: str = ""
    code: int = 0
    details: _Details | None = None


class Client:
    """The API server, reached through `transport`, which the caller closes (see `connect`).

    `on_call(verb, resource, status, seconds)` is called after each request, with status 0 if it was not answered.

    Every method raises ApiError (by status: NotFound, Conflict, Gone, Forbidden, Invalid) and Unreachable.
    """

    def __init__(self, transport: Transport, on_call: OnCall | None = None) -> None:
        self._transport = transport
        self._on_call: OnCall = on_call or (lambda *_: None)

    async def reconnect(self) -> None:
        """Use new connections from now on: those of an address that this host has lost would fail only by time-out."""
        await self._transport.reconnect()

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        """Read one object."""
        return await self._call("get", resource, namespace, name, Request("GET", resource.path(namespace, name)))

    async def get_version(self) -> str:
        """Read the version of the API server, such as v1.35.4."""
        version = await self._call("get", VERSIONS, None, None, Request("GET", "/version"))
        return str(version.get("gitVersion", ""))

    async def get_subresource(self, resource: Resource, name: str, namespace: str | None, subresource: str) -> Obj:
        """Read a subresource of an object, also of a kind whose objects cannot be read."""
        path = resource.path(namespace, name, subresource)
        return await self._call(f"get {subresource} of", resource, namespace, name, Request("GET", path))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        read: Read | None = None,
        part: Callable[[Obj], Obj] | None = None,
        most: int | None = None,
    ) -> ObjectList:
        """Read all objects that match, in pages; each has apiVersion and kind, unless `read` is given.

        Args:
            resource: the kind of objects.
            namespace: None: all namespaces.
            label_selector: the labels of the objects that match.
            field_selector: the fields of the objects that match.
            read: decodes each object from its JSON to what is kept of it, so that the rest is never decoded.
            part: returns what is kept of each decoded object, so that only one page is in memory as a whole.
            most: the most objects to read; None: all.
        """
        query = _build_selectors(label_selector, field_selector)

        def complete(item: Obj) -> Obj:  # called with each object as soon as its page is decoded
            item.setdefault("apiVersion", resource.api_version)
            item.setdefault("kind", resource.kind)
            return part(item) if part is not None else item

        completion = complete if read is None else None
        return await self._list_pages(resource, namespace, query, read=read, complete=completion, most=most)

    async def list_cached(self, resource: Resource, *, field_selector: str = "") -> ObjectList:
        """Read what matches from the API server's cache: it may be old, and lacks apiVersion and kind."""
        # With a limit, some API servers would read from etcd.
        query = _build_selectors("", field_selector) | {"resourceVersion": "0"}
        call = _describe_call("list", resource, None, None)
        body = await self._send(call, "list", resource, Request("GET", resource.path(None), query))
        page = _decode(call, body, _Page[Obj])
        return ObjectList(page.items or [], page.metadata.resource_version)

    async def list_metadata(
        self, resource: Resource, namespace: str | None = None, *, label_selector: str = ""
    ) -> ObjectList:
        """Read the metadata of all objects that match: a cheap way to find out which exist."""
        return await self._list_pages(resource, namespace, _build_selectors(label_selector, ""), _METADATA_LIST)

    async def try_list(self, resource: Resource, namespace: str | None = None) -> None:
        """Read the metadata of one object, if any exists: an error says why objects of the kind cannot be listed."""
        request = Request("GET", resource.path(namespace), query={"limit": "1"}, accept=_METADATA_LIST)
        call = _describe_call("list", resource, namespace, None)
        _decode(call, await self._send(call, "list", resource, request), _Page[Obj])

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
        read: Read | None = None,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield the changes since `resource_version`, until the server ends the watch; arguments are as of `list`.

        A caller that stops early has to close it, as by `contextlib.aclosing`, or its connection stays open.

        Raises, besides the usual: Gone when the version is too old; Unreachable when neither an event nor a bookmark
        came for 70 seconds.
        """
        call = _describe_call("watch", resource, namespace, None)
        query = _build_selectors(label_selector, field_selector)
        query |= {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": resource_version}
        request = Request("GET", resource.path(namespace), query)

        started = time.monotonic()
        async with self._transport.stream(request, idle_seconds=WATCH_IDLE_SECONDS) as stream:
            self._on_call("watch", resource, stream.status, time.monotonic() - started)
            if stream.status != 200:  # noqa: PLR2004 - OK
                body = b"".join([chunk async for chunk in stream.chunks])
                raise _build_refusal(call, Response(stream.status, body, stream.retry_after_seconds))
            async for line in _split_lines(stream.chunks):
                event = _decode(call, line, WatchEvent) if read is None else _read_event(call, line, read)
                if event.type == "ERROR":
                    raise _build_error(call, _read_status(event.object))
                yield event

    async def create(self, resource: Resource, obj: Mapping[str, Any]) -> Obj:
        """Create an object that must not exist yet (else Conflict, with reason AlreadyExists)."""
        namespace, name = _read_identity(obj)
        body = msgspec.json.encode(_add_type(resource, obj))
        request = Request("POST", resource.path(namespace), body=body)
        return await self._call("create", resource, namespace, name, request)

    async def review(self, resource: Resource, spec: Mapping[str, Any]) -> Obj:
        """Ask for a review, such as a TokenReview: the answer is an object that the server does not store."""
        body = msgspec.json.encode(_add_type(resource, {"spec": spec}))
        return await self._call("create", resource, None, None, Request("POST", resource.path(), body=body))

    async def create_subresource(
        self, resource: Resource, name: str, namespace: str | None, subresource: str, obj: Mapping[str, Any]
    ) -> Obj:
        """Create what a subresource of an object makes, such as the TokenRequest of a ServiceAccount."""
        request = Request("POST", resource.path(namespace, name, subresource), body=msgspec.json.encode(obj))
        return await self._call(f"create {subresource} of", resource, namespace, name, request)

    async def apply(
        self,
        resource: Resource,
        obj: Mapping[str, Any],
        *,
        field_manager: str,
        subresource: str = "",
        force: bool = True,
    ) -> Obj:
        """Apply `obj` server-side: it has all fields that `field_manager` sets; fields that it leaves out are given up.

        A metadata.uid or metadata.resourceVersion in `obj` is a precondition (Conflict).
        """
        namespace, name = _read_identity(obj)
        path = resource.path(namespace, name, subresource)
        query = {"fieldManager": field_manager, "force": "true" if force else "false"}
        request = Request("PATCH", path, query, encode_apply_body(_add_type(resource, obj)), APPLY_TYPE)
        try:
            return await self._call("apply", resource, namespace, name, request)
        except Invalid as error:
            # If the name belongs to a successor, the server reports an attempt to change the uid, not a conflict.
            if any(field == "metadata.uid" for field, _ in error.causes):
                raise _build_conflict(error, "the name belongs to another object now") from error
            raise

    async def patch_json(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        operations: Sequence[Mapping[str, Any]],
        *,
        subresource: str = "",
    ) -> Obj:
        """Send a JSON patch; a failed `test`, or a path that does not exist, raises Conflict."""
        body = msgspec.json.encode(operations)
        path = resource.path(namespace, name, subresource)
        request = Request("PATCH", path, body=body, content_type="application/json-patch+json")
        try:
            return await self._call("patch", resource, namespace, name, request)
        except Invalid as error:
            # The server reports a patch that does not fit the object as invalid too, but names no field.
            if error.causes:
                raise
            raise _build_conflict(error, "the object is not as the patch expects it") from error

    async def patch_merge(
        self, resource: Resource, name: str, namespace: str | None, patch: Mapping[str, Any], *, field_manager: str
    ) -> Obj:
        """Merge fields into an object that exists; a field that is None is removed."""
        path, query = resource.path(namespace, name), {"fieldManager": field_manager}
        body = msgspec.json.encode(patch)
        request = Request("PATCH", path, query, body, content_type="application/merge-patch+json")
        return await self._call("patch", resource, namespace, name, request)

    async def stream_log(
        self, pod: str, namespace: str, container: str, *, follow: bool = False, tail_lines: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a container's log as they are; with `follow` until the container ends."""
        call = _describe_call("get", PODS, namespace, f"{pod}/log")
        query = {"container": container, "follow": str(follow).lower()}
        if tail_lines is not None:
            query["tailLines"] = str(tail_lines)
        request = Request("GET", PODS.path(namespace, pod, "log"), query, accept="*/*")

        idle_seconds = LOG_IDLE_SECONDS if follow else WATCH_IDLE_SECONDS
        async with self._transport.stream(request, idle_seconds=idle_seconds) as stream:
            if stream.status != 200:  # noqa: PLR2004 - OK
                body = b"".join([chunk async for chunk in stream.chunks])
                raise _build_refusal(call, Response(stream.status, body, stream.retry_after_seconds))
            rest = b""
            async for chunk in stream.chunks:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line
            if rest:
                yield rest

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        propagation: str = "Background",
    ) -> None:
        """Delete one object; with `uid` only if it has this uid (else Conflict)."""
        options: Obj = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if uid:
            options["preconditions"] = {"uid": uid}
        request = Request("DELETE", resource.path(namespace, name), body=msgspec.json.encode(options))
        await self._call("delete", resource, namespace, name, request)

    async def take(self, resource: Resource, name: str, namespace: str | None = None, *, dry_run: bool = False) -> Obj:
        """Delete one object and return it; of several clients, one gets it and all others get NotFound.

        The request is sent once, also if the connection is cut before the answer: a repetition could not tell whether
        the first one got the object. Servers answer a deletion with the object for some kinds only, PodTemplates among
        them, and not for Secrets. With `dry_run` the object stays.
        """
        options: Obj = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if dry_run:
            options["dryRun"] = ["All"]  # in the query, the server ignores it beside a body
        request = Request("DELETE", resource.path(namespace, name), body=msgspec.json.encode(options), once=True)
        return await self._call("delete", resource, namespace, name, request)

    async def _call(
        self, verb: str, resource: Resource, namespace: str | None, name: str | None, request: Request
    ) -> Obj:
        """Send a request, and return the object that the server answers. Raises ApiError and Unreachable."""
        call = _describe_call(verb, resource, namespace, name)
        return _decode(call, await self._send(call, verb, resource, request), Obj)

    async def _list_pages(
        self,
        resource: Resource,
        namespace: str | None,
        query: dict[str, str],
        accept: str = "application/json",
        *,
        read: Read | None = None,
        complete: Callable[[Obj], Obj] | None = None,
        most: int | None = None,
    ) -> ObjectList:
        """Read all pages of a list, which all are of the resourceVersion of the first one.

        If that version expires meanwhile (410 Gone), all is read again in one page, without a limit. With `most`, only
        one page of at most so many objects is read. `complete` changes each object as soon as its page is decoded.
        """
        call, path = _describe_call("list", resource, namespace, None), resource.path(namespace)
        items: list[Obj] = []
        page_query = {**query, "limit": str(most or PAGE)}
        while True:
            try:
                body = await self._send(call, "list", resource, Request("GET", path, page_query, accept=accept))
            except Gone:
                if "continue" not in page_query:
                    raise
                items, page_query = [], query  # from the start, without a limit
                continue
            page = _decode(call, body, _Page[Obj]) if read is None else _read_page(call, body, read)
            objects = page.items or []
            items += map(complete, objects) if complete is not None else objects
            if most or not page.metadata.more:
                return ObjectList(items, page.metadata.resource_version)
            page_query = {**page_query, "continue": page.metadata.more}

    async def _send(self, call: str, verb: str, resource: Resource, request: Request) -> bytes:
        """Send a request, and return the body of the answer. Raises ApiError and Unreachable.

        It is sent again a few times if the server is busy (429) and says for how long.
        """
        for tries_left in reversed(range(_THROTTLED_TRIES)):  # 0 in the last try
            started, status = time.monotonic(), 0
            try:
                response = await self._transport.request(request)
                status = response.status
            finally:
                self._on_call(verb, resource, status, time.monotonic() - started)  # status 0: no answer
            wait = response.retry_after_seconds
            if response.status != 429 or wait is None or not tries_left:  # noqa: PLR2004 - Too Many Requests
                break
            await asyncio.sleep(min(wait, _THROTTLED_MOST_SECONDS))

        if not 200 <= response.status < 300:  # noqa: PLR2004 - success
            raise _build_refusal(call, response)
        return response.body


@contextlib.asynccontextmanager
async def connect(credentials: Credentials, on_call: OnCall | None = None) -> AsyncIterator[Client]:
    """Open a client over HTTP, whose connections are closed on exit."""
    transport = AiohttpTransport(credentials)
    try:
        yield Client(transport, on_call)
    finally:
        await transport.close()


def _describe_call(verb: str, resource: Resource, namespace: str | None, name: str | None) -> str:
    return f"{verb} {resource} {'/'.join(part for part in (namespace, name) if part)}".rstrip()


def _build_selectors(label_selector: str, field_selector: str) -> dict[str, str]:
    selectors = {"labelSelector": label_selector, "fieldSelector": field_selector}
    return {key: value for key, value in selectors.items() if value}


def _read_identity(obj: Mapping[str, Any]) -> tuple[str | None, str]:
    metadata = obj["metadata"]
    return metadata.get("namespace"), metadata["name"]


def _add_type(resource: Resource, obj: Mapping[str, Any]) -> Obj:
    return {"apiVersion": resource.api_version, "kind": resource.kind, **obj}


def _decode(call: str, body: bytes, type_: type[T]) -> T:
    """Decode an answer. Raises Unreachable if it is not what the API sends."""
    try:
        return msgspec.json.decode(body, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # A proxy on the way may have answered instead of the server; it is not known whether the server did anything.
        raise Unreachable(f"{call}: the answer is not what the API sends: {error}") from error


def _read_page(call: str, body: bytes, read: Read) -> _Page[Obj]:
    page = _decode(call, body, _Page[msgspec.Raw])
    return _Page(page.metadata, [_read_object(call, item, read) for item in page.items or ()])


def _read_event(call: str, line: bytes, read: Read) -> WatchEvent:
    """Decode one line of a watch; `read` decodes the object in it, except in events without a whole object.

    Those are bookmarks, which have a resourceVersion only, and errors, which have a Status.
    """
    event = _decode(call, line, _UnreadEvent)
    if event.type in {"BOOKMARK", "ERROR"}:
        return _decode(call, line, WatchEvent)
    return WatchEvent(event.type, _read_object(call, event.object, read))


def _read_object(call: str, raw: msgspec.Raw, read: Read) -> Obj:
    """Return the part of an object that `read` returns. Raises Unreachable if it cannot be decoded."""
    try:
        return read(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreachable(f"{call}: an object is not what the API sends: {error}") from error


async def _split_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield whole lines; an incomplete last line is dropped."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line


def _build_conflict(error: Invalid, meaning: str) -> Conflict:
    """Return the conflict that the server reports as an invalid object."""
    message = f"{meaning} ({error.message})"
    return Conflict(error.call, status=error.status, reason=error.reason, message=message, causes=error.causes)


def _build_refusal(call: str, response: Response) -> ApiError:
    """Return the error for a response that reports no success, with the message and reason in its body."""
    try:
        status = msgspec.json.decode(response.body, type=_Status)
    except (msgspec.DecodeError, UnicodeDecodeError):
        status = _Status(message=response.body[:200].decode(errors="replace"))
    return _build_error(call, status, response.status, response.retry_after_seconds)


def _read_status(obj: Obj) -> _Status:
    """Return the error in an event of a watch; one that cannot be decoded has a message only."""
    try:
        return msgspec.convert(obj, _Status)
    except msgspec.ValidationError as error:
        return _Status(message=f"the server sent an error that cannot be decoded: {error}")


def _build_error(call: str, status: _Status, http_status: int = 0, retry_after: float | None = None) -> ApiError:
    """Return the exception for a status; 0 as `http_status`: the code in the body counts, as within a watch."""
    code = http_status or status.code
    return BY_STATUS.get(code, ApiError)(
        call,
        status=code,
        reason=status.reason,
        message=status.message,
        retry_after_seconds=retry_after,
        causes=tuple((cause.field, cause.message) for cause in (status.details or _Details()).causes),
    )
