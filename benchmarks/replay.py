"""The bare loop beside a controller: it sends the writes that a controller sent for a service, in the same order.

It watches nothing and decides nothing, so that no controller that needs the same writes can be faster.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import msgspec

from benchmarks.audit_log import WRITES, Call
from kube.client import Obj
from kube.errors import ApiError
from kube.transport import Request, Transport

METHODS: Final = {"create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}
_VERSION: Final = b"@version@"


@dataclass(frozen=True)
class RecordedWrite:
    """One write with all that is known before its service exists; the uid is still that of the recorded service."""

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes
    content_type: str
    target: str
    """The object that is written."""


def writes_by_service(calls: Iterable[Call], names: Sequence[str]) -> dict[str, list[Call]]:
    """Return the writes for each service, in order; names have one length and begin the names of all that is theirs."""
    writes: dict[str, list[Call]] = {name: [] for name in names}
    length = len(names[0])
    for call in calls:
        name = call.object_ref.name[:length]
        if call.verb in WRITES and call.succeeded and name in writes:
            writes[name].append(call)
    return writes


def record_write(call: Call, old: str, new: str) -> RecordedWrite:
    """Return a recorded call, moved from the namespace `old` to `new`."""
    url, body = urlsplit(call.request_uri), call.request_object
    if isinstance(body, dict) and "resourceVersion" in body.get("metadata", {}):
        body = {**body, "metadata": {**body["metadata"], "resourceVersion": _VERSION.decode()}}
    text = msgspec.json.encode(body).decode()
    for sign in ('"namespace":"{}"', "{}.svc"):
        text = text.replace(sign.format(old), sign.format(new))
    if call.verb != "patch":
        content_type = "application/json"
    else:
        content_type = f"application/{'apply-patch+yaml' if 'fieldManager=' in url.query else 'json-patch+json'}"
    return RecordedWrite(
        METHODS[call.verb],
        url.path.replace(f"/namespaces/{old}/", f"/namespaces/{new}/"),
        dict(parse_qsl(url.query)),
        text.encode(),
        content_type,
        f"{call.object_ref.resource}/{call.object_ref.name}",
    )


class BareLoop:
    """A queue of created services, and workers that send the recorded writes of one after the other.

    Args:
        transport: the API server, as the user whose writes were recorded.
        recorded: the writes by service.
        uids: the uid that each service had when they were recorded.
    """

    def __init__(
        self, transport: Transport, recorded: Mapping[str, Sequence[RecordedWrite]], uids: Mapping[str, str]
    ) -> None:
        self._transport = transport
        self._recorded = recorded
        self._uids = uids
        self._created: asyncio.Queue[Obj] = asyncio.Queue()

    def add(self, service: Obj) -> None:
        """Send the writes of a service that was created now."""
        self._created.put_nowait(service)

    async def work(self) -> None:
        """Send the writes of services for ever: run it as often as there shall be workers."""
        while True:
            service = await self._created.get()
            await self._send_all(service["metadata"])
            self._created.task_done()

    async def join(self) -> None:
        """Wait until the writes of all services were answered."""
        await self._created.join()

    async def _send_all(self, metadata: Obj) -> None:
        name = metadata["name"]
        versions = {f"inferenceservices/{name}": metadata["resourceVersion"]}
        for write in self._recorded[name]:
            body = write.body.replace(self._uids[name].encode(), metadata["uid"].encode())
            body = body.replace(_VERSION, versions.get(write.target, "").encode())
            request = Request(write.method, write.path, write.query, body, write.content_type)
            response = await self._transport.request(request)
            if not 200 <= response.status < 300:  # noqa: PLR2004 - success
                message = response.body[:500].decode()
                raise ApiError(f"{request.method} {request.path}", status=response.status, message=message)
            versions[write.target] = msgspec.json.decode(response.body)["metadata"].get("resourceVersion", "")
