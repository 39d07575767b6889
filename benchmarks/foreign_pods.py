"""Memory and CPU of following 100,000 pods that are not ours, from the bytes that the API server sends.

The floor of the memory is a dict from uid to node, that of the CPU is to decode the JSON of an event. What lacks here
is TLS and HTTP. PODS=10000 makes a small one.
"""

import asyncio
import contextlib
import os
import resource
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import msgspec
import psutil

from benchmarks.report import Figure, print_figures
from controller.placement.cell_registry import CellRegistry
from controller.placement.foreign_pods import ForeignPods
from controller.placement.nodes import declare_nodes
from devices.vendors import VENDORS
from kube.client import PAGE, Client, Obj, WatchEvent
from kube.resources import NODES
from kube.store import Store
from kube.transport import Request, Response, Stream

PODS: Final = int(os.environ.get("PODS", "100000"))
NODE_COUNT: Final = 1000
EVENTS: Final = 10_000
KIB: Final = 2**10
MIB: Final = 2**20
MOST_BYTES_PER_POD: Final = 600
MOST_EVENT_MICROSECONDS: Final = 300


def describe_pod(number: int, phase: str = "Running") -> bytes:
    """Return a pod as the API server sends it: a Deployment's, with a sidecar and what its writers own."""
    text = TEMPLATE.replace(b"@uid@", str(uuid.UUID(int=number)).encode())
    text = text.replace(b"@node@", f"node-{number % NODE_COUNT}".encode()).replace(b"@number@", str(number).encode())
    cpu = f"{(number % 40) * 50 + 50}m".encode()
    return text.replace(b"@cpu@", cpu).replace(b"@phase@", phase.encode())


def _build_template() -> bytes:
    fields: Obj = {f"f:field-{number}": {"f:value": {}, ".": {}} for number in range(60)}
    environment = [{"name": f"SETTING_{number}", "value": f"value-{number}"} for number in range(20)]
    container: Obj = {
        "name": "application",
        "image": "registry.example/team/application:1.2.3",
        "env": environment,
        "resources": {"requests": {"cpu": "@cpu@", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
        "volumeMounts": [{"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}],
    }
    state = {"running": {"startedAt": "2026-11-21T11:00:00Z"}}
    metadata: Obj = {
        "name": "application-5d4b9-@number@",
        "namespace": "team",
        "uid": "@uid@",
        "resourceVersion": "@number@",
        "labels": {"app": "application", "pod-template-hash": "5d4b9"},
        "annotations": {"checksum/configuration": "a" * 64},
        "managedFields": [{"manager": name, "fieldsV1": fields} for name in ("controller-manager", "kubelet")],
    }
    spec: Obj = {
        "nodeName": "@node@",
        "containers": [container, {**container, "name": "sidecar"}],
        "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}] * 2,
    }
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    status: Obj = {
        "phase": "@phase@",
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": "2026-11-21T11:00:00Z"} for kind in kinds
        ],
        "containerStatuses": [{"name": name, "state": state, "ready": True} for name in ("application", "sidecar")],
    }
    return msgspec.json.encode({"metadata": metadata, "spec": spec, "status": status})


TEMPLATE: Final = _build_template()


class PodServer:
    """A transport whose server has the pods, and sends the events that the benchmark gives it."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes] = asyncio.Queue()

    async def request(self, request: Request) -> Response:
        """Return a page of the list."""
        start = int(request.query.get("continue", "0"))
        end = min(start + PAGE, PODS)
        more = str(end) if end < PODS else ""
        items = b",".join(map(describe_pod, range(start, end)))
        head = b'{"metadata":{"resourceVersion":"1","continue":"' + more.encode() + b'"},"items":['
        return Response(200, head + items + b"]}")

    @contextlib.asynccontextmanager
    async def stream(self, _request: Request, *, idle_seconds: float) -> AsyncIterator[Stream]:  # noqa: ARG002 - a Transport
        """Open a watch."""
        yield Stream(200, self._send_events(), None)

    async def _send_events(self) -> AsyncIterator[bytes]:
        while True:
            yield await self.events.get()
            self.events.task_done()

    async def reconnect(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


def list_events() -> Iterator[bytes]:
    """Yield a report of a kubelet for most pods; of the others, each ends and another one starts."""
    for number in range(EVENTS):
        if number % 10:
            yield b'{"type":"MODIFIED","object":' + describe_pod(number) + b"}\n"
        else:
            yield b'{"type":"DELETED","object":' + describe_pod(number, "Succeeded") + b"}\n"
            yield b'{"type":"ADDED","object":' + describe_pod(PODS + number) + b"}\n"


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return psutil.Process().memory_info().rss


def measure_floor_bytes() -> float:
    """Return the memory of a dict from uid to node, for each pod."""
    before = resident_bytes()
    nodes: dict[str, Any] = {str(uuid.UUID(int=number)): None for number in range(PODS)}
    return (resident_bytes() - before) / len(nodes)


def fill_registry(foreign: ForeignPods) -> CellRegistry:
    """Return a registry with a cell for every node."""
    store = Store()
    declare_nodes(store, VENDORS)
    registry = CellRegistry(store, VENDORS, lambda _host: True, foreign)
    allocatable = {"nvidia.com/gpu": "8", "cpu": "192", "memory": "2Ti", "pods": "250"}
    for number in range(NODE_COUNT):
        metadata = {"name": f"node-{number}", "uid": f"node-{number}", "resourceVersion": "1"}
        store.put(NODES, {"metadata": metadata, "status": {"allocatable": allocatable}})
    registry.list_cells()
    return registry


async def run() -> None:
    """List, send events, and print the figures."""
    floor_bytes = measure_floor_bytes()
    server, foreign = PodServer(), ForeignPods()
    registry = fill_registry(foreign)
    before = resident_bytes()
    made = time.process_time()
    for start in range(0, PODS, PAGE):
        b",".join(map(describe_pod, range(start, min(start + PAGE, PODS))))
    making_seconds = time.process_time() - made
    started = time.process_time()
    task = asyncio.create_task(foreign.follow(Client(server)))
    await foreign.synced.wait()
    listing_seconds = time.process_time() - started - making_seconds
    after = resident_bytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
    events = list(list_events())
    started = time.process_time()
    for event in events:
        msgspec.json.decode(event, type=WatchEvent)
    decoding_seconds = time.process_time() - started
    for event in events:
        server.events.put_nowait(event)
    started = time.process_time()
    await server.events.join()
    event_seconds = time.process_time() - started
    started = time.process_time()
    registry.list_cells()
    building_seconds = time.process_time() - started
    task.cancel()
    print_figures(
        f"{PODS} foreign pods of {len(TEMPLATE) / KIB:.1f} KiB on {NODE_COUNT} nodes",
        [
            Figure("memory for each pod", (after - before) / PODS, floor_bytes, MOST_BYTES_PER_POD, "B"),
            Figure("memory in all", (after - before) / MIB, floor_bytes * PODS / MIB, None, "MiB"),
            Figure("most memory during the list", (peak - before) / MIB, None, None, "MiB"),
            Figure("CPU of the list, for each pod", 1e6 * listing_seconds / PODS, None, None, "us"),
            Figure(
                "CPU of an event",
                1e6 * event_seconds / len(events),
                1e6 * decoding_seconds / len(events),
                MOST_EVENT_MICROSECONDS,
                "us",
            ),
            Figure("CPU to build all cells anew", 1e6 * building_seconds / NODE_COUNT, None, None, "us per cell"),
        ],
    )


if __name__ == "__main__":
    asyncio.run(run())
