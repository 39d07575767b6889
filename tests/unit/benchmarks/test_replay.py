"""The writes that a benchmark's bare loop repeats are those of the log, for the new service."""

import asyncio
from typing import Any

import msgspec

from benchmarks.audit_log import Call
from benchmarks.replay import BareLoop, record_write, writes_by_service
from kube.transport import Request, Response

CREATED = {"metadata": {"name": "s1", "uid": "new-uid", "resourceVersion": "90"}}


def call(verb: str, resource: str, name: str, body: Any, *, code: int = 200, subresource: str = "") -> Call:
    """Return a call as the API server logs it."""
    path = f"/apis/group/v1/namespaces/storm/{resource}/{name}" + (f"/{subresource}" if subresource else "")
    event = {
        "verb": verb,
        "requestURI": f"{path}?fieldManager=m&force=true" if verb == "patch" else path,
        "user": {"username": "controller"},
        "requestReceivedTimestamp": "2026-11-22T08:00:00.000001Z",
        "stageTimestamp": "2026-11-22T08:00:00.100001Z",
        "objectRef": {"resource": resource, "namespace": "storm", "name": name, "subresource": subresource},
        "responseStatus": {"code": code},
        "requestObject": body,
    }
    return msgspec.convert(event, Call)


class AnsweringTransport:
    """An API server that answers every write with the next resourceVersion."""

    def __init__(self) -> None:
        self.sent: list[Request] = []

    async def request(self, request: Request) -> Response:
        self.sent.append(request)
        return Response(200, msgspec.json.encode({"metadata": {"resourceVersion": str(90 + len(self.sent))}}))


def test_only_successful_writes_of_the_services_are_recorded() -> None:
    calls = [
        call("create", "secrets", "s1-token", {}, code=409),
        call("create", "secrets", "s1-token", {}),
        call("get", "secrets", "s1-token", None),
        call("patch", "deployments", "s1", {}),
        call("patch", "deployments", "other", {}),
    ]
    writes = writes_by_service(calls, ["s1", "s2"])
    assert [write.resource for write in writes["s1"]] == ["secrets", "deployments"]
    assert writes["s2"] == []


async def test_repeated_write_names_the_new_service() -> None:
    owned = {"metadata": {"namespace": "storm", "name": "s1", "ownerReferences": [{"uid": "old-uid"}]}}
    status = {
        "metadata": {"namespace": "storm", "name": "s1", "resourceVersion": "7"},
        "status": {"url": "s1.storm.svc"},
    }
    calls = [
        call("patch", "deployments", "s1", owned),
        call("patch", "inferenceservices", "s1", status, subresource="status"),
        call("patch", "inferenceservices", "s1", status, subresource="status"),
    ]
    transport = AnsweringTransport()
    recorded = {"s1": [record_write(write, "storm", "floor") for write in calls]}
    loop = BareLoop(transport, recorded, {"s1": "old-uid"})  # type: ignore[arg-type]  # it only sends requests
    worker = asyncio.create_task(loop.work())
    loop.add(CREATED)
    await loop.join()
    worker.cancel()
    first, second, third = (msgspec.json.decode(request.body or b"") for request in transport.sent)
    assert transport.sent[0].path == "/apis/group/v1/namespaces/floor/deployments/s1"
    assert transport.sent[0].query == {"fieldManager": "m", "force": "true"}
    assert first["metadata"] == {"namespace": "floor", "name": "s1", "ownerReferences": [{"uid": "new-uid"}]}
    assert second["status"] == {"url": "s1.floor.svc"}
    assert [body["metadata"]["resourceVersion"] for body in (second, third)] == ["90", "92"]
