"""Services beside copies of weights on nodes, with the real scheduler: where replicas run, and how they change."""

import asyncio
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from crds.inferenceservice import InferenceService
from crds.meta import LABEL_COPY, LABEL_SERVICE
from kube.client import Client, Obj
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    JOBS,
    MODELS,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    PVCS,
    SERVICES,
    Resource,
)
from tests.cluster.controller.test_node_copies import (
    FIRST,
    SECOND,
    CopyNamespace,
    controller,
    files,
    kubelets,
)
from tests.cluster.main_job.cluster import ready_urls, slices_of
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT, Process
from tests.support.background import running
from tests.support.documents import list_blocks
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.local_volumes import local_storage
from tests.support.watched_states import watch_states

__all__ = ["controller", "files", "kubelets"]

DOCUMENT = CHECKOUT / "docs" / "pods.md"
pytestmark = pytest.mark.usefixtures("kubelets", "controller")


@pytest_asyncio.fixture
async def cluster(client: Client, namespace: str, files: FileServer, tmp_path: Path) -> AsyncIterator[CopyNamespace]:
    async with local_storage(client, namespace, tmp_path / "volumes") as storage_class:
        yield CopyNamespace(client, namespace, files, storage_class)


async def read_service(cluster: CopyNamespace) -> InferenceService:
    service = await cluster.client.get(INFERENCE_SERVICES, "of-one", cluster.namespace)
    return msgspec.convert(service, InferenceService)


async def becomes_ready(cluster: CopyNamespace) -> InferenceService:
    """Wait until all replicas serve the latest spec."""

    async def is_ready() -> InferenceService:
        service = await read_service(cluster)
        state = service.status.observed_generation, service.status.phase
        assert state == (service.metadata.generation, "Ready"), [
            condition.message for condition in service.status.conditions
        ]
        return service

    return await eventually(is_ready, 120)


async def edit(cluster: CopyNamespace, **spec: Any) -> None:
    operations = [{"op": "add", "path": f"/spec/{field}", "value": value} for field, value in spec.items()]
    await cluster.client.patch_json(INFERENCE_SERVICES, "of-one", cluster.namespace, operations)


async def list_pods(cluster: CopyNamespace) -> list[Obj]:
    """Return the pods of the service that are not being deleted."""
    listed = await cluster.client.list(PODS, cluster.namespace, label_selector=f"{LABEL_SERVICE}=of-one")
    return [item for item in listed.items if "deletionTimestamp" not in item["metadata"]]


async def serves_on(cluster: CopyNamespace, *nodes: str) -> dict[str, Obj]:
    """Wait until exactly these nodes have one replica each, and return the Deployments by their node."""

    async def there() -> dict[str, Obj]:
        deployments = (await cluster.client.list(DEPLOYMENTS, cluster.namespace)).items
        pinned = {_node_of(deployment): deployment for deployment in deployments}
        assert {node: deployment["spec"]["replicas"] for node, deployment in pinned.items()} == dict.fromkeys(
            nodes, 1
        ), pinned
        assert len(deployments) == len(nodes)
        return pinned

    async def placed() -> bool:
        return sorted(pod["spec"].get("nodeName", "") for pod in await list_pods(cluster)) == sorted(nodes)

    await becomes_ready(cluster)
    by_node = await eventually(there)
    await eventually(placed)
    return by_node


def _node_of(deployment: Obj) -> str:
    affinity = deployment["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    node: str = term["matchFields"][0]["values"][0]
    return node


@asynccontextmanager
async def never_without_a_ready_pod(cluster: CopyNamespace) -> AsyncIterator[None]:
    """Watch the pods: one that is not being deleted is ready in each state."""
    started = asyncio.Event()

    async def look() -> None:
        selected = f"{LABEL_SERVICE}=of-one"
        async for pods in watch_states(cluster.client, PODS, cluster.namespace, label_selector=selected):
            assert any(
                (condition["type"], condition["status"]) == ("Ready", "True")
                for pod in pods
                if "deletionTimestamp" not in pod["metadata"]
                for condition in pod["status"].get("conditions", ())
            ), [(pod["metadata"]["name"], pod["status"].get("conditions")) for pod in pods]
            started.set()

    async with running(look()):
        await started.wait()
        yield


async def run_documented(plane: ControlPlane, namespace: str) -> str:
    """Run the commands of docs/pods.md; return what they say."""
    section = DOCUMENT.read_text().partition("## A Deployment for each node")[2].partition("\n## ")[0]
    (block,) = list_blocks(section, "sh")
    commands = [shlex.split(line.replace("=chat", "=of-one"))[1:] for line in block.splitlines()]
    return "".join([await plane.kubectl(*command, "--namespace", namespace) for command in commands])


async def test_replicas_run_beside_copies_and_are_replaced_one_after_the_other(
    cluster: CopyNamespace, plane: ControlPlane
) -> None:
    await cluster.make_model()
    await cluster.make_service(replicas=1)
    await becomes_ready(cluster)
    await cluster.scale(2)
    async with never_without_a_ready_pod(cluster):
        before = await serves_on(cluster, FIRST, SECOND)
        copies = await cluster.copies_on(FIRST, SECOND)
        said = await run_documented(plane, cluster.namespace)
        for copy in copies:
            assert before[copy.node]["metadata"]["labels"][LABEL_COPY] == copy.name
            assert (copy.name in said, copy.node in said) == (True, True)
        await edit(cluster, contextLength=1024, parallel=1)
        after = await serves_on(cluster, FIRST, SECOND)
    for node, deployment in after.items():
        assert deployment["metadata"]["uid"] == before[node]["metadata"]["uid"]
        assert "1024" in deployment["spec"]["template"]["spec"]["initContainers"][0]["args"]


async def test_replica_that_its_node_refuses_runs_on_another_one(cluster: CopyNamespace) -> None:
    await cluster.make_model()
    await cluster.make_service(replicas=1)
    service = await becomes_ready(cluster)
    (node,) = service.status.nodes
    (other,) = {FIRST, SECOND} - {node}
    # A pod that fills the node could lose it to the next replica, whose priority is higher.
    await cluster.client.patch_json(NODES, node, None, [{"op": "add", "path": "/spec/unschedulable", "value": True}])
    (pod,) = await list_pods(cluster)
    await cluster.client.delete(PODS, pod["metadata"]["name"], cluster.namespace)
    await serves_on(cluster, other)


async def test_earlier_weights_serve_on_full_nodes_until_later_ones_do(cluster: CopyNamespace) -> None:
    await cluster.make_model()
    await cluster.make_service(replicas=2)
    await serves_on(cluster, FIRST, SECOND)
    earlier = {copy.name for copy in await cluster.copies_on(FIRST, SECOND)}
    async with never_without_a_ready_pod(cluster):
        source = (await cluster.model()).spec.source.replace("one.gguf", "two.gguf")
        operation = {"op": "replace", "path": "/spec/source", "value": source}
        await cluster.client.patch_json(MODELS, "one", cluster.namespace, [operation])

        async def moved() -> bool:
            deployments = (await cluster.client.list(DEPLOYMENTS, cluster.namespace)).items
            claims = {deployment["metadata"]["labels"][LABEL_COPY] for deployment in deployments}
            assert len(claims) == 2
            return not claims & earlier

        await eventually(moved, 120)
        await serves_on(cluster, FIRST, SECOND)


async def test_replica_leaves_a_node_that_is_gone(
    cluster: CopyNamespace, kubelets: dict[str, Process], plane: ControlPlane
) -> None:
    await cluster.make_model()
    await cluster.make_service(replicas=1)
    service = await becomes_ready(cluster)
    (node,) = service.status.nodes
    (other,) = {FIRST, SECOND} - {node}
    await kubelets[node].kill()
    await plane.request("DELETE", NODES.path(None, node))
    await serves_on(cluster, other)


async def read_versions(cluster: CopyNamespace) -> dict[str, str]:
    """Return the resourceVersion of each object that Pomona writes for the Model and its service."""
    kinds = (MODELS, INFERENCE_SERVICES, DEPLOYMENTS, SERVICES, POD_DISRUPTION_BUDGETS, JOBS, PVCS)
    return {
        f"{resource} {item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for resource in kinds
        for item in (await cluster.client.list(resource, cluster.namespace)).items
        if item["metadata"]["name"] != "later"
    }


async def is_refused(cluster: CopyNamespace, name: str, resource: Resource, phase: str) -> None:
    """Wait until the controller has decided about an object that cannot work."""

    async def decided() -> bool:
        current = await cluster.client.get(resource, name, cluster.namespace)
        return bool(current.get("status", {}).get("phase") == phase)

    await eventually(decided)


async def test_nothing_is_written_beside_copies_at_rest_even_by_a_controller_that_starts(
    cluster: CopyNamespace, controller: Process
) -> None:
    await cluster.make_model()
    await cluster.make_service(replicas=2)
    await serves_on(cluster, FIRST, SECOND)

    async def is_at_rest() -> dict[str, str]:
        jobs = (await cluster.client.list(JOBS, cluster.namespace)).items
        assert len(jobs) == 3
        assert all(job["status"].get("completionTime") for job in jobs)
        for item in (await cluster.client.list(DEPLOYMENTS, cluster.namespace)).items:
            assert item["status"].get("observedGeneration") == item["metadata"]["generation"]
            assert item["status"].get("readyReplicas") == item["status"].get("updatedReplicas") == 1
        slices = await cluster.client.list(ENDPOINT_SLICES, cluster.namespace, label_selector=slices_of("of-one"))
        assert len(ready_urls(slices.items)) == 2
        status = (await cluster.client.get(INFERENCE_SERVICES, "of-one", cluster.namespace))["status"]
        message = next(condition["message"] for condition in status["conditions"] if condition["type"] == "Ready")
        # Until a change is probed, the message begins with "still serving" or goes on with what is missing.
        assert status["readyReplicas"] == 2
        assert re.fullmatch(r"http://\S+ generated a token", message), message
        return await read_versions(cluster)

    before = await eventually(is_at_rest)
    await controller.stop()
    controller.start()
    # The queue is first in, first out: when these are decided, the existing ones are, too.
    await cluster.make(MODELS, "later", spec={"source": "hf://broken"})
    await cluster.make(INFERENCE_SERVICES, "later", spec={"modelRef": "absent", "hardware": {"accelerator": "cpu"}})
    await is_refused(cluster, "later", MODELS, "Failed")
    await is_refused(cluster, "later", INFERENCE_SERVICES, "Pending")
    assert await read_versions(cluster) == before
