"""The control plane, its network and its node behave like real ones, as far as other tests rely on them."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kube import credentials
from kube.client import Client, connect
from kube.errors import Forbidden, Unreachable
from kube.resources import ENDPOINT_SLICES, NODES, PODS, PVCS, SECRETS, SERVICES
from tests.controlplane.network import ADDRESS, Network
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.controlplane.process import Process
from tests.support.eventually import eventually

Obj = dict[str, Any]


async def test_pomonas_kinds_are_served_and_explained(plane: ControlPlane) -> None:
    kinds = (await plane.kubectl("api-resources", "--categories=pomona", "--output=name")).split()

    assert sorted(kind.partition(".")[0] for kind in kinds) == [
        "acceleratorpools",
        "inferenceservices",
        "metalhosts",
        "metalprocesses",
        "models",
        "nodefitnesses",
    ]
    assert "modelRef" in await plane.kubectl("explain", "isvc.spec")


async def test_failure_of_kubectl_has_its_message(plane: ControlPlane) -> None:
    with pytest.raises(PlaneError, match=r'kubectl get no-such-kind: .*"no-such-kind"'):
        await plane.kubectl("get", "no-such-kind")


async def test_a_service_account_has_no_rights_by_default(plane: ControlPlane, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    await plane.request("POST", path, {"metadata": {"name": "somebody"}})
    kubeconfig = await plane.service_account_kubeconfig(namespace, "somebody")

    async with connect(credentials.load(kubeconfig)) as somebody:
        with pytest.raises(Forbidden, match=f"system:serviceaccount:{namespace}:somebody"):
            await somebody.list(SECRETS, namespace)


async def test_a_kubelet_may_not_touch_another_node(plane: ControlPlane, node: Process) -> None:
    assert node.running
    async with connect(credentials.load(plane.kubeconfig("system:node:cpu-2"))) as other:
        with pytest.raises(Forbidden, match="cpu-1"):
            await other.delete(NODES, "cpu-1")


async def test_an_outage_keeps_address_and_data(plane: ControlPlane, client: Client, namespace: str) -> None:
    await client.create(SECRETS, {"metadata": {"name": "kept", "namespace": namespace}})

    await plane.stop_apiserver()
    with pytest.raises(Unreachable):
        await client.get(SECRETS, "kept", namespace)
    await plane.start_apiserver()

    assert await client.get(SECRETS, "kept", namespace)


async def test_a_claim_without_class_is_bound(client: Client, namespace: str) -> None:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    await client.create(PVCS, {"metadata": {"name": "cache", "namespace": namespace}, "spec": claim})

    async def bound() -> bool:
        return bool((await client.get(PVCS, "cache", namespace))["status"]["phase"] == "Bound")

    await eventually(bound)


async def test_a_pod_answers_behind_its_service(client: Client, node: Process, namespace: str) -> None:
    assert node.running
    await client.create(PODS, web_pod(namespace))
    port = {"name": "http", "port": 8080, "targetPort": "http"}
    service = {
        "metadata": {"name": "web", "namespace": namespace},
        "spec": {"selector": {"app": "web"}, "ports": [port]},
    }
    await client.create(SERVICES, service)

    async def ready_addresses() -> list[str]:
        slices = (await client.list(ENDPOINT_SLICES, namespace)).items
        endpoints = [endpoint for each in slices for endpoint in each["endpoints"] or []]
        return [endpoint["addresses"][0] for endpoint in endpoints if endpoint["conditions"]["ready"]]

    (address,) = await eventually(ready_addresses)
    await eventually(lambda: answers(f"http://{address}:8080/", "Directory listing"))


async def test_a_host_is_silent_while_its_link_is_cut(network: Network, plane: ControlPlane, tmp_path: Path) -> None:
    del plane
    host = await network.add_host("silent")
    web = Process(
        "web",
        [*host.exec, sys.executable, "-m", "http.server", "--bind", host.address, "8000"],
        tmp_path / "web.log",
    )
    web.start()
    url = f"http://{host.address}:8000/"
    await eventually(lambda: answers(url))
    try:
        await host.cut()
        with pytest.raises(TimeoutError):
            await get(url)
        await host.restore()
        await eventually(lambda: answers(url))
    finally:
        await host.close()
    assert await web.wait() == -9


async def test_a_host_reaches_the_api_server(network: Network, plane: ControlPlane) -> None:
    del plane
    host = await network.add_host("visitor")
    script = f"import socket; socket.create_connection(('{ADDRESS}', 443), timeout=5)"
    try:
        process = await asyncio.create_subprocess_exec(*host.exec, sys.executable, "-c", script)
        assert await process.wait() == 0
    finally:
        await host.close()


def web_pod(namespace: str) -> Obj:
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1}
    container = {
        "name": "web",
        "image": "pomona-test",
        "command": ["python", "-m", "http.server", "8080"],
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": probe,
    }
    metadata = {"name": "web", "namespace": namespace, "labels": {"app": "web"}}
    return {"metadata": metadata, "spec": {"containers": [container]}}


async def get(url: str) -> str:
    timeout = aiohttp.ClientTimeout(total=1)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
        return await response.text()


async def answers(url: str, text: str = "") -> bool:
    try:
        return text in await get(url)
    except (aiohttp.ClientError, TimeoutError):
        return False
