"""The density API with the chart's identity on a real API server: real tokens, reviews, pods and stale nodes."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest_asyncio
import yaml

from crds.meta import CONTROLLER_NAMESPACE, LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY
from kube.client import Client
from kube.resources import INFERENCE_SERVICES, MODELS, NODE_FITNESSES, PODS
from kube.time import rfc3339
from tests.controlplane.helm import CHART, run_helm
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.density_worlds import GIB, GPU, model
from tests.support.eventually import eventually
from tests.support.simulated_nodes import SimulatedNodes

ACCOUNT = "pomona-console"
API = "http://127.0.0.1:8090"
NODES = ("density-1", "density-2", "density-3")


@pytest_asyncio.fixture
async def api(plane: ControlPlane, client: Client, tmp_path: Path) -> AsyncIterator[Process]:
    """The API with its own ServiceAccount, ready, on three nodes with two devices each; the last one is stale."""
    rendered = await run_helm(
        "template", "pomona", str(CHART), "--set=console.enabled=true", "--show-only=templates/console.yaml"
    )
    objects = [document for document in yaml.safe_load_all(rendered) if document and document["kind"] != "Deployment"]
    manifest = tmp_path / "console.yaml"
    manifest.write_text(yaml.safe_dump_all(objects))
    await plane.apply(manifest)
    async with contextlib.AsyncExitStack() as stack:
        nodes = await stack.enter_async_context(SimulatedNodes(plane, client).running())
        for name in NODES:
            await nodes.add(name, 2)
            await report_hardware(plane, client, name, is_stale=name == NODES[-1])
            stack.push_async_callback(plane.request, "DELETE", NODE_FITNESSES.path(None, name), accept={404})
        kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, ACCOUNT)
        argv = [
            *(sys.executable, "-m", "cli.main", "console", "api", f"--kubeconfig={kubeconfig}"),
            "--metrics-address=127.0.0.1:8091",
        ]
        process = Process("density API", argv, tmp_path / "console.log")
        process.start()
        await eventually(is_ready)
        yield process
        if process.running:
            assert await process.stop() == 0
    await plane.kubectl("delete", "--ignore-not-found", "-f", str(manifest))


async def report_hardware(plane: ControlPlane, client: Client, name: str, *, is_stale: bool) -> None:
    """Report two H100, as a node agent does."""
    await client.create(NODE_FITNESSES, {"metadata": {"name": name}})
    device = {"product": "NVIDIA H100 80GB HBM3", "memoryBytes": 80 * GIB, "freeBytes": 79 * GIB}
    device["memoryBandwidthBytesPerSecond"] = 3350 * 10**9
    status = {
        "observedAt": "2026-01-01T00:00:00Z" if is_stale else rfc3339(datetime.now(UTC)),
        "vendor": "nvidia",
        "deviceClass": "nvidia-h100-80gb-hbm3x1",
        "devices": [{"id": "GPU-1", **device}, {"id": "GPU-2", **device}],
        "memoryBytes": 512 * GIB,
        "availableBytes": 400 * GIB,
    }
    await plane.request("PATCH", f"{NODE_FITNESSES.path(None, name)}/status", {"status": status})


async def is_ready() -> bool:
    async with aiohttp.ClientSession() as session, session.get("http://127.0.0.1:8091/readyz") as response:
        return response.status == 200


async def ask(path: str, token: str) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as session, session.get(f"{API}{path}", headers=headers) as response:
        return response.status, await response.json()


async def create_user(plane: ControlPlane, namespace: str, name: str) -> str:
    """Create a ServiceAccount, and return its token."""
    await plane.kubectl("create", "serviceaccount", name, "-n", namespace)
    return (await plane.kubectl("create", "token", name, "-n", namespace)).strip()


async def create_model(plane: ControlPlane, client: Client, namespace: str, name: str) -> None:
    _, built = model(name, namespace)
    await client.create(MODELS, {"metadata": {"name": name, "namespace": namespace}, "spec": built["spec"]})
    await plane.request("PATCH", f"{MODELS.path(namespace, name)}/status", {"status": built["status"]})


async def test_tokens_of_the_cluster_decide_what_is_seen(
    plane: ControlPlane, client: Client, namespace: str, api: Process
) -> None:
    await create_model(plane, client, namespace, "density-model")
    spec = {"modelRef": "density-model"}
    await client.create(INFERENCE_SERVICES, {"metadata": {"name": "chat", "namespace": namespace}, "spec": spec})
    reader, nobody = [await create_user(plane, namespace, name) for name in ("reader", "nobody")]
    bound = ("clusterrolebinding", f"density-{namespace}", "--clusterrole=pomona-density-reader")
    await plane.kubectl("create", *bound, f"--serviceaccount={namespace}:reader")
    rights = ("--verb=list", "--resource=inferenceservices.inference.pomona.dev", "-n", namespace)
    await plane.kubectl("create", "role", "see-services", *rights)
    await plane.kubectl(
        *("create", "rolebinding", "see-services", "--role=see-services", f"--serviceaccount={namespace}:reader"),
        *("-n", namespace),
    )

    try:
        assert (await ask("/api/v1/density/nodes", "no-token"))[0] == 401
        assert (await ask("/api/v1/density/nodes", nobody))[0] == 403
        assert (await ask("/api/v1/density/cost", nobody))[1]["models"] == []

        async def is_seen() -> bool:
            status, answer = await ask("/api/v1/density/cost", reader)
            return status == 200 and [model["name"] for model in answer["models"]] == ["chat"]

        await eventually(is_seen)
        _, nodes = await ask("/api/v1/density/nodes?limit=1000", reader)
        stale = {node["nodeName"]: node["stale"] for node in nodes["nodes"] if node["nodeName"] in NODES}
        assert stale == {NODES[0]: False, NODES[1]: False, NODES[2]: True}
        _, ranked = await ask("/api/v1/density/query?model=density-model", reader)
        assert [node["nodeName"] for node in ranked["rankedNodes"]] == [*NODES[:2]]
        assert NODES[2] in {node["nodeName"] for node in ranked["excludedNodes"]}

        await hold_devices(client, namespace, NODES[0])

        async def is_subtracted() -> bool:
            _, answer = await ask("/api/v1/density/query?model=density-model", reader)
            return [node["nodeName"] for node in answer["rankedNodes"]] == [NODES[1]]

        await eventually(is_subtracted)
        _, cost = await ask("/api/v1/density/cost", reader)
        assert [(model["gpu"], model["placedNode"]) for model in cost["models"]] == [(2, NODES[0])]
        await assert_commands_agree(plane)
        assert reader not in api.log.read_text()
    finally:
        await plane.kubectl("delete", "clusterrolebinding", f"density-{namespace}")


async def hold_devices(client: Client, namespace: str, node: str) -> None:
    """Bind a serving pod of the service that holds both devices of a node."""
    labels = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_SERVICE: "chat"}
    container = {"name": "engine", "image": "engine", "resources": {"limits": {GPU: "2"}}}
    spec = {"nodeName": node, "containers": [container], "terminationGracePeriodSeconds": 0}
    await client.create(PODS, {"metadata": {"name": "chat-1", "namespace": namespace, "labels": labels}, "spec": spec})


async def assert_commands_agree(plane: ControlPlane) -> None:
    """The commands read the same cluster with the rights of their user."""
    for command, expected in (
        (("fit", "density-model", "--json"), [NODES[1]]),
        (("simulate", "density-model", "-o", "json"), None),
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "cli.main", *command, f"--kubeconfig={plane.kubeconfig()}"),
            stdout=asyncio.subprocess.PIPE,
        )
        printed = json.loads((await process.communicate())[0])
        if expected is not None:
            assert [node["node"] for node in printed["ranked_nodes"]] == expected
        else:
            levels = {node["nodeName"]: node["fitLevel"] for node in printed["rankedNodes"]}
            assert {name: levels[name] for name in NODES[:2]} == {NODES[0]: "too_tight", NODES[1]: "perfect"}
