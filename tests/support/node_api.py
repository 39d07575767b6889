"""An API server with one Node and its NodeFitness, as far as a node agent asks for them.

The real server is in tests/cluster/node_agent; this one lets hours pass, refuses, and counts the writes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from kube.client import Client, Obj
from kube.errors import Unreachable
from kube.resources import NODE_FITNESSES, NODES
from kube.transport import Request, Response, Stream
from node_agent.node_labels import FIELD_MANAGER

NAME = "gpu-1"


class NodeApi:
    """The server, as a transport.

    Attributes:
        labels: the labels of the Node.
        owners: the manager of each label.
        fitness: the NodeFitness; None: there is none.
        writes: kind and virtual time of each write that arrived.
        refusals: HTTP status with which writes of a kind are refused.
        is_cut: no request is answered.
    """

    def __init__(self) -> None:
        self.labels: dict[str, str] = {}
        self.owners: dict[str, str] = {}
        self.fitness: Obj | None = None
        self.writes: list[tuple[str, float]] = []
        self.refusals: dict[str, int] = {}
        self.is_cut = False
        self._version = 1
        self._changed = asyncio.Event()

    @property
    def client(self) -> Client:
        return Client(self)

    @property
    def status(self) -> dict[str, Any]:
        assert self.fitness
        found: dict[str, Any] = self.fitness.get("status", {})
        return found

    @property
    def condition(self) -> dict[str, Any]:
        (found,) = self.status["conditions"]
        assert isinstance(found, dict)
        return found

    def count(self, kind: str) -> int:
        return sum(write == kind for write, _ in self.writes)

    def set_label(self, name: str, value: str | None, owner: str = "kubectl-label") -> None:
        """Write a label of the Node as somebody else; None removes it."""
        self.owners.pop(name, None)
        self.labels.pop(name, None)
        if value is not None:
            self.labels[name], self.owners[name] = value, owner
        self._note_change()

    def _note_change(self) -> None:
        self._version += 1
        self._changed.set()

    def _node(self) -> Obj:
        entries: list[Obj] = [
            {
                "manager": manager,
                "operation": "Apply" if manager == FIELD_MANAGER else "Update",
                "fieldsV1": {
                    "f:metadata": {"f:labels": {f"f:{name}": {} for name, by in self.owners.items() if by == manager}}
                },
            }
            for manager in sorted(set(self.owners.values()))
        ]
        metadata = {"name": NAME, "uid": "node-uid", "resourceVersion": str(self._version)}
        return {
            "metadata": {**metadata, "labels": dict(self.labels), "managedFields": entries},
            "status": {"images": [{"names": ["x"]}]},
        }

    async def request(self, request: Request) -> Response:
        if self.is_cut:
            raise Unreachable("cut")
        kind = "nodes" if request.path.startswith(NODES.path()) else "nodefitnesses"
        if request.method != "GET":
            self.writes.append((kind, asyncio.get_running_loop().time()))
            if refused := self.refusals.get(kind):
                return _answer({"message": "no rights", "reason": "Forbidden"}, refused)
        if kind == "nodes":
            return self._answer_node(request)
        return self._answer_fitness(request)

    def _answer_node(self, request: Request) -> Response:
        if request.method == "GET":
            assert request.query["fieldSelector"] == f"metadata.name={NAME}"
            return _answer({"metadata": {"resourceVersion": str(self._version)}, "items": [self._node()]})
        assert request.query == {"fieldManager": FIELD_MANAGER, "force": "false"}
        wanted: dict[str, str] = msgspec.json.decode(request.body or b"")["metadata"]["labels"]
        taken = [
            name
            for name, value in wanted.items()
            if self.owners.get(name, FIELD_MANAGER) != FIELD_MANAGER and self.labels[name] != value
        ]
        if taken:
            return _answer({"message": f"conflict: {taken}", "reason": "Conflict"}, 409)
        for name in [name for name, by in self.owners.items() if by == FIELD_MANAGER and name not in wanted]:
            self.set_label(name, None)
        for name, value in wanted.items():
            self.set_label(name, value, FIELD_MANAGER)
        return _answer(self._node())

    def _answer_fitness(self, request: Request) -> Response:
        self._version += 1
        version = {"resourceVersion": str(self._version), "uid": "fitness-uid"}
        if request.method == "POST":
            assert self.fitness is None
            self.fitness = msgspec.json.decode(request.body or b"")
        if self.fitness is None:
            return _answer({"message": "not found", "reason": "NotFound"}, 404)
        if request.method == "PATCH":
            assert request.path == NODE_FITNESSES.path(None, NAME, "status")
            self.fitness["status"] = msgspec.json.decode(request.body or b"")["status"]
        if request.method != "GET":
            self.fitness["metadata"] |= version
        return _answer(self.fitness)

    @contextlib.asynccontextmanager
    async def stream(self, request: Request, *, idle_seconds: float) -> AsyncIterator[Stream]:
        del request, idle_seconds
        if self.is_cut:
            raise Unreachable("cut")
        yield Stream(200, self._events(), None)

    async def _events(self) -> AsyncIterator[bytes]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield msgspec.json.encode({"type": "MODIFIED", "object": self._node()}) + b"\n"

    async def reconnect(self) -> None:
        pass

    async def close(self) -> None:
        pass


def _answer(body: Any, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(body), None)
