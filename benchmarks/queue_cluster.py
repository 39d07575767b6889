"""A cluster for benchmarks of the queue: full nodes that run nothing, pods that are not ours, and waiting services.

The API server, the scheduler and the controller manager are real. The pods of services stay as the scheduler left them,
since no kubelet runs; the nodes stay ready because the controller manager is told to wait long for their heartbeats.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Final

from msgspec.structs import replace

from benchmarks.measured_cluster import MeasuredCluster, measured_cluster
from controller.placement.effects import find_gate
from crds.meta import LABEL_SERVICE, without_defaults
from crds.nodefitness import NodeDevice, NodeFitnessStatus
from kube.client import Client, Obj
from kube.resources import INFERENCE_SERVICES, MODELS, NODES, PODS
from kube.store import Store
from kube.time import rfc3339
from kube.watch import Selection, reflect
from tests.controlplane.plane import ControlPlane
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.simulated_nodes import GPU

CLIENTS: Final = 16
LIMIT_SECONDS: Final = 1800.0
FOREIGN: Final = "foreign"
"""Namespace of the pods that are not ours."""
_UNHURRIED: Final = ("--kube-api-qps=1000", "--kube-api-burst=2000", "--node-monitor-grace-period=24h")
"""Options of the controller manager: with its default of 20 calls a second it would make the pods for minutes."""
_GIB: Final = 2**30


@contextlib.asynccontextmanager
async def queue_cluster(*namespaces: str) -> AsyncIterator[tuple[MeasuredCluster, Store]]:
    """Start a control plane with namespaces, and yield it with a store that follows services and their pods."""
    async with measured_cluster(*_UNHURRIED) as cluster:
        for name in (FOREIGN, *namespaces):
            await cluster.make_namespace(name)
        for name in namespaces:
            metadata = {"name": "tiny", "namespace": name}
            # Each pod pulls it by itself, so that nothing but the queue holds up a pod.
            spec = {"source": "ollama://tiny:1b", "memoryBytes": _GIB}
            await cluster.client.create(MODELS, {"metadata": metadata, "spec": spec})
        store = Store()
        async with running(
            reflect(cluster.client, store, Selection(INFERENCE_SERVICES)),
            reflect(cluster.client, store, Selection(PODS, label_selector=LABEL_SERVICE)),
        ):
            yield cluster, store


async def work_in_parallel(make: Callable[[int], Awaitable[object]], count: int) -> None:
    """Call `make` with each number below `count`, several at once."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await make(number)

    await asyncio.gather(*(work() for _ in range(CLIENTS)))


def describe_node(name: str, devices: int) -> Obj:
    """Return a node that is ready."""
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
    amounts = {"cpu": "192", "memory": "2Ti", "ephemeral-storage": "1Ti", "pods": "250", GPU: str(devices)}
    status = {"allocatable": amounts, "capacity": amounts, "conditions": [describe_heartbeat()]}
    return {"metadata": {"name": name, "labels": labels}, "status": status}


def describe_heartbeat() -> Obj:
    """Return the condition Ready of a node, as of now."""
    now = rfc3339(datetime.now(UTC))
    return {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": "2026-01-01T00:00:00Z"}


def describe_hardware(devices: int, number: int) -> Obj:
    """Return the status that a node agent writes with its heartbeat; its values of the moment change with `number`."""
    device = NodeDevice(
        id="GPU",
        product="NVIDIA H100 80GB HBM3",
        architecture="sm_90",
        memory_bytes=80 * _GIB,
        free_bytes=number * 7 % 80 * _GIB,
        utilization_percent=number * 30 % 100,
        temperature_celsius=30 + number * 5 % 50,
    )
    status = NodeFitnessStatus(
        observed_at=rfc3339(datetime.now(UTC)),
        vendor="nvidia",
        device_class="nvidia-h100-80gb-hbm3x1",
        source="nvidia-smi",
        devices=[replace(device, id=f"GPU-{index}") for index in range(devices)],
        memory_bytes=2048 * _GIB,
        available_bytes=number * 11 % 2048 * _GIB,
    )
    return without_defaults(status)


def describe_foreign_pod(name: str, node: str, **requests: str) -> Obj:
    """Return a pod of others, which is on a node already."""
    container = {"name": "application", "image": "application:1", "resources": {"requests": requests}}
    if GPU in requests:
        container["resources"] = {"requests": requests, "limits": {GPU: requests[GPU]}}
    spec = {"nodeName": node, "containers": [container], "automountServiceAccountToken": False}
    return {"metadata": {"name": name, "namespace": FOREIGN}, "spec": spec}


async def make_nodes(client: Client, devices: Iterable[int]) -> list[str]:
    """Make the nodes `node-0`, `node-1` and so on, and wait until they take pods; return their names."""
    wanted = [*devices]
    await work_in_parallel(
        lambda number: client.create(NODES, describe_node(f"node-{number}", wanted[number])), len(wanted)
    )

    async def accept_pods() -> bool:
        nodes = (await client.list(NODES)).items
        assert not any(node["spec"].get("taints") for node in nodes)  # noqa: S101 - `eventually` shows it
        return True

    await eventually(accept_pods, LIMIT_SECONDS)
    return [f"node-{number}" for number in range(len(wanted))]


async def end_foreign_pod(plane: ControlPlane, name: str) -> None:
    """Delete a pod of others at once: its node has no kubelet to end it."""
    await plane.request("DELETE", PODS.path(FOREIGN, name), {"gracePeriodSeconds": 0})


async def serve(client: Client, namespace: str, name: str, gpus: int, priority: str = "normal") -> None:
    """Make a service that waits for GPUs."""
    hardware = {"accelerator": "nvidia", "count": gpus}
    spec = {"modelRef": "tiny", "hardware": hardware, "priority": priority}
    await client.create(INFERENCE_SERVICES, {"metadata": {"name": name, "namespace": namespace}, "spec": spec})


async def wait_until_queued(store: Store, namespace: str, count: int) -> None:
    """Wait until so many pods of a namespace wait in the queue, and their services say so."""

    def queued() -> bool:
        gated = sum(find_gate(pod) is not None for pod in store.list(PODS, namespace))
        services = store.list(INFERENCE_SERVICES, namespace)
        told = sum((service.get("status") or {}).get("phase") == "WaitingForGPU" for service in services)
        assert (gated, told) == (count, count), f"{gated} pods are in the queue, and {told} services say so"  # noqa: S101
        return True

    await eventually(queued, LIMIT_SECONDS)
