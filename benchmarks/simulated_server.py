"""An API server in this process, for figures of the controller alone: no network, no other process, no wait.

It stores what is written, answers at once, and sends events to those who watch. Scheduler, kubelets and agents are a
few lines that report at once: pods find no node, Jobs succeed, and bound processes serve. It checks nothing, because
no figure depends on a refusal; what the controller does is proven on a real API server.
"""

import asyncio
import collections
import contextlib
import hashlib
import itertools
import sqlite3
import weakref
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

import msgspec

from benchmarks.simulated_host import host_address, host_name, report_status
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE_NAME, MANAGED_BY
from kube.client import Obj
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    PODS,
    PVCS,
    SERVICES,
    Resource,
)
from kube.transport import Request, Response, Stream
from tests.support.agent_objects import lease_of_host, slice_of_process
from tests.support.crash_world import JOB_RESULTS

CREATED: Final = "2026-11-21T12:00:00Z"
PORT: Final = 18000
"""The port of all services on hosts."""
WRITES: Final = frozenset({"POST", "PATCH", "DELETE"})
_UNSCHEDULABLE: Final = (
    "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/1 nodes are "
    "available: 1 Preemption is not helpful for scheduling."
)


class Location(NamedTuple):
    """The parts of a path of the API; an empty part is not there."""

    plural: str
    namespace: str
    name: str
    subresource: str


def parse_path(path: str) -> Location:
    """Return the parts of the path of a collection or an object."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:  # noqa: PLR2004 - else a namespace itself
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = (*rest, "", "")[:3]
    return Location(plural, namespace, name, subresource)


class ObjectFile:
    """All objects in a file, so that they take no memory of the process whose memory is measured."""

    def __init__(self) -> None:
        # SQLite makes a file of its own for a database without a name. Whichever thread collects garbage closes it.
        self._rows = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self._rows.close)
        self._rows.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -2000;")
        key = "PRIMARY KEY (plural, namespace, name)"
        self._rows.execute(f"CREATE TABLE objects (plural, namespace, name, body, {key})")

    def get(self, plural: str, namespace: str, name: str) -> Obj | None:
        """Return an object, or None."""
        where = (plural, namespace, name)
        cursor = self._rows.execute("SELECT body FROM objects WHERE plural = ? AND namespace = ? AND name = ?", where)
        row = cursor.fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    def list(self, plural: str, begin: int = 0, limit: int = -1) -> list[Obj]:
        """Return some objects of a kind, in the order of their names."""
        page = "SELECT body FROM objects WHERE plural = ? ORDER BY namespace, name LIMIT ? OFFSET ?"
        return [msgspec.json.decode(body) for (body,) in self._rows.execute(page, (plural, limit, begin))]

    def put(self, plural: str, obj: Obj) -> None:
        """Put an object in place of its earlier version."""
        metadata = obj["metadata"]
        row = (plural, metadata.get("namespace", ""), metadata["name"], msgspec.json.encode(obj))
        self._rows.execute("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)", row)

    def remove(self, plural: str, namespace: str, name: str) -> None:
        """Remove an object, if it is there."""
        where = (plural, namespace, name)
        self._rows.execute("DELETE FROM objects WHERE plural = ? AND namespace = ? AND name = ?", where)


class SimulatedServer:
    """The API server, as a transport of the client."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        """Requests so far, by verb and kind."""
        self._objects = ObjectFile()
        self._versions = itertools.count(1)
        self._watches: collections.defaultdict[str, list[asyncio.Queue[bytes]]] = collections.defaultdict(list)

    @property
    def writes(self) -> int:
        """Requests so far that write anything."""
        return sum(count for call, count in self.calls.items() if call.split()[0] in WRITES)

    def put(self, resource: Resource, obj: Obj) -> None:
        """Create or replace an object, and send the event to those who watch."""
        typed = {"apiVersion": resource.api_version, "kind": resource.kind, **obj}
        self._store(resource.plural, typed)

    def list_objects(self, resource: Resource) -> list[Obj]:
        """Return all objects of a resource."""
        return self._objects.list(resource.plural)

    def report_host(self, name: str, free_bytes: int) -> None:
        """Report another amount of free memory of a host, as its agent does again and again."""
        host = self._host(name)
        self._store(METAL_HOSTS.plural, {**host, "status": {**host["status"], "availableBytes": free_bytes}})

    async def request(self, request: Request) -> Response:
        """Answer a request."""
        await asyncio.sleep(0)
        at = parse_path(request.path)
        self.calls[f"{request.method} {at.plural}{'/' if at.subresource else ''}{at.subresource}"] += 1
        body: Any = msgspec.json.decode(request.body or b"{}")
        if request.method == "GET" and not at.name:
            return Response(200, self._list(at, request))
        name = at.name or body["metadata"]["name"]
        stored = self._objects.get(at.plural, at.namespace, name)
        if request.method == "GET":
            return Response(404, b"{}") if stored is None else Response(200, msgspec.json.encode(stored))
        if request.method == "DELETE":
            if stored is not None:
                self._delete(at.plural, stored)
            return Response(200, b"{}")
        if isinstance(body, list):
            made = _patched(stored or {}, body)
        else:
            made = _applied(stored, body, request.query.get("fieldManager"), at)
        return Response(200, msgspec.json.encode(self._store(at.plural, made)))

    def _list(self, at: Location, request: Request) -> bytes:
        begin, limit = int(request.query.get("continue", 0)), int(request.query.get("limit", -1))
        if at.plural == "leases":
            items, limit = [lease_of_host(host["metadata"]["name"]) for host in self.list_objects(METAL_HOSTS)], -1
        else:
            items = [] if "fieldSelector" in request.query else self._objects.list(at.plural, begin, limit)
        more = {"continue": str(begin + limit)} if len(items) == limit else {}
        metadata = {"resourceVersion": str(next(self._versions)), **more}
        return msgspec.json.encode({"metadata": metadata, "items": items})

    def _host(self, name: str) -> Obj:
        host = self._objects.get(METAL_HOSTS.plural, "", name)
        if host is None:
            raise KeyError(name)
        return host

    @contextlib.asynccontextmanager
    async def stream(self, request: Request, *, idle_seconds: float) -> AsyncIterator[Stream]:
        """Open a watch, which never ends; as in lists, a field selector selects nothing."""
        del idle_seconds
        events: asyncio.Queue[bytes] = asyncio.Queue()
        if "fieldSelector" not in request.query:
            self._watches[parse_path(request.path).plural].append(events)

        async def chunks() -> AsyncIterator[bytes]:
            while True:
                yield await events.get()

        yield Stream(200, chunks())

    async def reconnect(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def _store(self, plural: str, obj: Obj) -> Obj:
        metadata = obj["metadata"]
        namespace, name = metadata.get("namespace", ""), metadata["name"]
        kind = "ADDED" if self._objects.get(plural, namespace, name) is None else "MODIFIED"
        constant = {"uid": _uid(plural, namespace, name), "creationTimestamp": CREATED, "generation": 1}
        stored = {**obj, "metadata": constant | metadata | {"resourceVersion": str(next(self._versions))}}
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
            self._objects.remove(plural, namespace, name)
            self._send(plural, "DELETED", stored)
            return stored
        self._objects.put(plural, stored)
        self._send(plural, kind, stored)
        self._report(plural, kind, stored)
        return stored

    def _send(self, plural: str, kind: str, obj: Obj) -> None:
        event = msgspec.json.encode({"type": kind, "object": obj}) + b"\n"
        for events in self._watches[plural]:
            events.put_nowait(event)

    def _delete(self, plural: str, obj: Obj) -> None:
        """Delete an object, or mark it as long as it has finalizers; an agent stops the process at once."""
        marked = self._store(plural, {**obj, "metadata": {**obj["metadata"], "deletionTimestamp": CREATED}})
        if plural == METAL_PROCESSES.plural and "hostName" in obj["spec"] and marked["metadata"].get("finalizers"):
            self._stop(marked)

    def _report(self, plural: str, kind: str, obj: Obj) -> None:
        """Do at once what the cluster or an agent does after a write."""
        metadata = obj["metadata"]
        if plural == DEPLOYMENTS.plural and kind == "ADDED":
            counts = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "unavailableReplicas": 1}
            self._store(plural, {**obj, "status": counts})
            self.put(PODS, _pod(obj))
        elif plural == SERVICES.plural and kind == "ADDED":
            labels = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_SERVICE_NAME: metadata["name"]}
            made = {"name": f"{metadata['name']}-abcde", "namespace": metadata["namespace"], "labels": labels}
            self.put(ENDPOINT_SLICES, {"metadata": made, "addressType": "IPv4", "endpoints": None, "ports": None})
        elif plural == PVCS.plural and kind == "ADDED":
            self._store(plural, {**obj, "status": {"phase": "Bound"}})
        elif plural == JOBS.plural and kind == "ADDED":
            self.put(PODS, _ended_pod(obj))
        elif plural == METAL_PROCESSES.plural and "hostName" in obj["spec"] and "status" not in obj:
            self._serve(obj)

    def _serve(self, process: Obj) -> None:
        """Report a bound process as its agent does: ready, with an endpoint, and counted by its host."""
        metadata, spec = process["metadata"], process["spec"]
        self._store(METAL_PROCESSES.plural, {**process, "status": {"phase": "Ready"}})
        host = self._host(spec["hostName"])
        status = host["status"]
        held = {
            "processes": [*status["processes"], {"uid": metadata["uid"]}],
            "availableBytes": status["availableBytes"] - spec["memoryBytes"],
        }
        self._store(METAL_HOSTS.plural, {**host, "status": {**status, **held}})
        self.put(ENDPOINT_SLICES, slice_of_process(process, status["address"], PORT))

    def _stop(self, process: Obj) -> None:
        """Report a deleted process as its agent does: withdrawn, stopped, and without memory of its host."""
        metadata, spec = process["metadata"], process["spec"]
        host = self._host(spec["hostName"])
        status = host["status"]
        withdrawn = slice_of_process(process, status["address"], PORT)["metadata"]
        if endpoint_slice := self._objects.get(ENDPOINT_SLICES.plural, withdrawn["namespace"], withdrawn["name"]):
            self._delete(ENDPOINT_SLICES.plural, endpoint_slice)
        self._store(METAL_PROCESSES.plural, {**process, "status": {"phase": "Stopped"}})
        held = {
            "processes": [entry for entry in status["processes"] if entry["uid"] != metadata["uid"]],
            "availableBytes": status["availableBytes"] + spec["memoryBytes"],
        }
        self._store(METAL_HOSTS.plural, {**host, "status": {**status, **held}})


def _uid(plural: str, namespace: str, name: str) -> str:
    digest = hashlib.sha256(f"{plural}/{namespace}/{name}".encode()).hexdigest()
    return "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32]))


def _applied(stored: Obj | None, body: Obj, manager: str | None, at: Location) -> Obj:
    """Return the object with `body` laid over it, and the fields of `body` as those of the manager."""
    parts = {name: value for name, value in body.items() if name not in {"metadata", "apiVersion", "kind"}}
    old = stored or {}
    metadata = {**old.get("metadata", {}), **body["metadata"]}
    if manager:
        written = {} if at.subresource else {"metadata": _metadata_fields(body["metadata"])}
        fields = _fields({**parts, **written})
        entry = {"manager": manager, "operation": "Apply", "fieldsType": "FieldsV1", "fieldsV1": fields}
        if at.subresource:
            entry["subresource"] = at.subresource
        others = [
            other
            for other in old.get("metadata", {}).get("managedFields", ())
            if (other["manager"], other.get("subresource", "")) != (manager, at.subresource)
        ]
        metadata["managedFields"] = [*others, {**entry, "time": CREATED}]
    return {**old, **body, **{name: _merged(old.get(name), value) for name, value in parts.items()}} | {
        "metadata": metadata
    }


def _merged(old: Any, new: Any) -> Any:
    """Return a map with the fields of another laid over it; anything else is replaced."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


def _fields(value: Any) -> Obj:
    """Return the field set of a value; lists are owned as a whole."""
    return {f"f:{name}": _fields(child) for name, child in value.items()} if isinstance(value, dict) else {}


def _metadata_fields(metadata: Obj) -> Obj:
    return {name: metadata[name] for name in ("labels", "annotations", "ownerReferences") if name in metadata}


def _patched(stored: Obj, operations: list[Obj]) -> Obj:
    """Return the object after a JSON patch, of which tests are not made."""
    made: Obj = msgspec.json.decode(msgspec.json.encode(stored))
    for operation in operations:
        if operation["op"] != "test":
            *path, last = operation["path"].strip("/").split("/")
            parent = made
            for name in path:
                parent = parent.setdefault(name, {})
            parent[last] = operation["value"]
    return made


def _pod(deployment: Obj) -> Obj:
    """Return the pod of a Deployment, for which there is no node."""
    template, metadata = deployment["spec"]["template"], deployment["metadata"]
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": _UNSCHEDULABLE}
    named = {"name": f"{metadata['name']}-7958f7498d-jb9kv", "namespace": metadata["namespace"]}
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "metadata": {**template["metadata"], **named, "ownerReferences": [{**owner, "controller": True}]},
        "spec": template["spec"],
        "status": {"phase": "Pending", "conditions": [condition], "qosClass": "Burstable"},
    }


def _ended_pod(job: Obj) -> Obj:
    """Return the pod of a Job that has succeeded."""
    metadata, template = job["metadata"], job["spec"]["template"]
    container = template["spec"]["containers"][0]["name"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    named = {"name": f"{metadata['name']}-abcde", "namespace": metadata["namespace"]}
    result = msgspec.json.encode(JOB_RESULTS[container]).decode()
    ended = {"exitCode": 0, "message": result, "finishedAt": CREATED}
    return {
        "metadata": {**template["metadata"], **named, "ownerReferences": [{**owner, "controller": True}]},
        "status": {"phase": "Succeeded", "containerStatuses": [{"name": container, "state": {"terminated": ended}}]},
    }


def simulated_host(number: int, budget_bytes: int) -> Obj:
    """Return a host whose agent has reported."""
    return {
        "metadata": {"name": host_name(number)},
        "spec": {},
        "status": report_status(host_address(number), budget_bytes),
    }
