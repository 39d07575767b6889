"""A user of the queue: services that want GPUs, and what is seen of their pods."""

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from crds.meta import LABEL_SERVICE
from kube.client import Client, Obj
from kube.resources import INFERENCE_SERVICES, METAL_PROCESSES, MODELS, PODS
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually

GIB = 2**30
MIN_RUN_SECONDS = 1.0
"""Option --min-run of the controller."""
RUN_SECONDS = 60.0
"""Limit for a pod to be admitted and bound on a busy machine. No claim about speed."""


class QueueUser:
    """One namespace."""

    def __init__(self, plane: ControlPlane, client: Client, namespace: str, controller: Process) -> None:
        self.plane, self.client, self.namespace, self.controller = plane, client, namespace, controller

    async def make_model(self) -> None:
        """Make a Model that each pod pulls by itself, so that nothing but the queue holds up a pod."""
        spec = {"source": "ollama://tiny:1b", "memoryBytes": GIB}
        await self.client.create(MODELS, {"metadata": self._name("tiny"), "spec": spec})

    async def serve(self, name: str, gpus: int = 1, priority: str = "normal", **spec: Any) -> None:
        """Make a service."""
        hardware = {"accelerator": "nvidia", "count": gpus}
        wanted = {"modelRef": "tiny", "hardware": hardware, "priority": priority, **spec}
        await self.client.create(INFERENCE_SERVICES, {"metadata": self._name(name), "spec": wanted})

    async def serve_on_hosts(self, name: str, priority: str = "normal") -> None:
        """Make a service for hosts, of one GiB."""
        spec = {"source": "file:///models/tiny.gguf", "memoryBytes": GIB}
        await self.client.create(MODELS, {"metadata": self._name(name), "spec": spec})
        wanted = {"modelRef": name, "hardware": {"accelerator": "metal"}, "priority": priority}
        await self.client.create(INFERENCE_SERVICES, {"metadata": self._name(name), "spec": wanted})

    async def hosts(self, service: str) -> list[str]:
        """Return the hosts of the processes of a service that are not being deleted; one that waits has no name."""
        processes = (await self.client.list(METAL_PROCESSES, self.namespace)).items
        return sorted(
            process["spec"].get("hostName", "")
            for process in processes
            if process["spec"].get("serviceName") == service and "deletionTimestamp" not in process["metadata"]
        )

    async def delete(self, name: str) -> None:
        """Delete a service."""
        await self.client.delete(INFERENCE_SERVICES, name, self.namespace)

    async def edit(self, name: str, **spec: Any) -> None:
        """Edit the spec of a service."""
        await self.client.patch_merge(INFERENCE_SERVICES, name, self.namespace, {"spec": spec}, field_manager="user")

    async def pods(self, service: str) -> list[Obj]:
        """Return the pods of a service that are not being deleted."""
        listed = await self.client.list(PODS, self.namespace, label_selector=f"{LABEL_SERVICE}={service}")
        return [pod for pod in listed.items if "deletionTimestamp" not in pod["metadata"]]

    async def nodes(self, service: str) -> list[str]:
        """Return the nodes of the pods of a service; a pod that waits has the empty name."""
        return sorted(pod["spec"].get("nodeName", "") for pod in await self.pods(service))

    async def wait_until_on(self, service: str, *nodes: str, limit_seconds: float = RUN_SECONDS) -> None:
        """Wait until the pods of a service are on these nodes; the empty name is for one that waits."""

        async def reached() -> bool:
            placed = await self.nodes(service)
            assert placed == sorted(nodes), f"{service} is on {placed}, not on {nodes}"
            return True

        await eventually(reached, limit_seconds)

    async def wait_until_waiting(self, services: Sequence[str], count: int) -> None:
        """Wait until so many of these services have a pod that waits, and the others one on a node."""

        async def reached() -> bool:
            nodes = {service: await self.nodes(service) for service in services}
            assert all(len(node) == 1 for node in nodes.values()), nodes
            assert sum(node == [""] for node in nodes.values()) == count, nodes
            return True

        await eventually(reached, RUN_SECONDS)

    async def wait_until_bound(self, pod: str) -> None:
        """Wait until a pod has a node."""

        async def bound() -> bool:
            return "nodeName" in (await self.client.get(PODS, pod, self.namespace))["spec"]

        await eventually(bound, RUN_SECONDS)

    async def wait_until_run(self, *services: str) -> None:
        """Wait until each of these services has pods, all on nodes."""

        async def placed() -> bool:
            for service in services:
                nodes = await self.nodes(service)
                assert nodes, f"{service} has no pod"
                assert all(nodes), f"{service} waits"
            return True

        await eventually(placed, RUN_SECONDS)

    async def wait_until_evictable(self, *services: str) -> None:
        """Wait until the pods of these services have run for the time in which none is evicted."""

        async def is_old() -> bool:
            for service in services:
                for pod in await self.pods(service):
                    since = next(
                        condition for condition in pod["status"]["conditions"] if condition["type"] == "PodScheduled"
                    )
                    age = datetime.now(UTC) - datetime.fromisoformat(since["lastTransitionTime"])
                    assert age.total_seconds() > MIN_RUN_SECONDS, f"{service} is young"
            return True

        await eventually(is_old, RUN_SECONDS)

    async def wait_for_a_later_second(self) -> None:
        """Wait until what is made next is later than what is there: of one second, chance orders what is alike."""
        second = int(time.time())
        await eventually(lambda: time.time() >= second + 1)

    async def wait_until_queued(self, *services: str) -> None:
        """Wait until each of these services has a pod in the queue."""

        async def gated() -> bool:
            for service in services:
                pods = await self.pods(service)
                assert pods, f"{service} has no pod yet"
                assert all(pod["spec"].get("schedulingGates") for pod in pods), f"{service} has a pod without a gate"
            return True

        await eventually(gated, RUN_SECONDS)

    async def gates(self, service: str) -> list[Obj]:
        """Return the scheduling gates of all pods of a service."""
        return [gate for pod in await self.pods(service) for gate in pod["spec"].get("schedulingGates", ())]

    async def wait_until_made(self, *services: str) -> None:
        """Wait until each of these services has a pod."""

        async def is_made() -> bool:
            for service in services:
                assert await self.pods(service), f"{service} has no pod yet"
            return True

        await eventually(is_made, RUN_SECONDS)

    async def wait_until_unschedulable(self, *services: str) -> None:
        """Wait until the scheduler has found no node for the pods of these services."""

        async def is_refused() -> bool:
            for service in services:
                (pod,) = await self.pods(service)
                conditions = pod.get("status", {}).get("conditions", ())
                assert any(condition.get("reason") == "Unschedulable" for condition in conditions), (
                    f"{service} is not refused"
                )
            return True

        await eventually(is_refused, RUN_SECONDS)

    async def wait_for_status(self, service: str, **queue: Any) -> Obj:
        """Wait until status.queue of a service has these values; return it."""

        async def reached() -> Obj:
            status = (await self.client.get(INFERENCE_SERVICES, service, self.namespace)).get("status", {})
            found: Obj = status.get("queue", {})
            assert {name: found.get(name) for name in queue} == queue, status
            return found

        state = await eventually(reached, RUN_SECONDS)
        assert state is not None
        return state

    async def wait_for_places(self, *services: str) -> None:
        """Wait until these services, and no others, have places in this order."""
        for number, service in enumerate(services, 1):
            await self.wait_for_status(service, place=f"{number}/{len(services)}")

    async def uids(self, service: str) -> set[str]:
        """Return the uids of the pods of a service."""
        return {pod["metadata"]["uid"] for pod in await self.pods(service)}

    async def delete_services(self) -> None:
        """Delete all services, and wait until no pod is left."""
        for item in (await self.client.list(INFERENCE_SERVICES, self.namespace)).items:
            await self.client.delete(INFERENCE_SERVICES, item["metadata"]["name"], self.namespace)

        async def gone() -> bool:
            return not (await self.client.list(PODS, self.namespace)).items

        await eventually(gone, RUN_SECONDS)

    async def kill_controller(self) -> None:
        """Kill the controller, and start it again."""
        await self.controller.kill()
        self.controller.start()
        await asyncio.sleep(0)

    def _name(self, name: str) -> Obj:
        return {"name": name, "namespace": self.namespace}
