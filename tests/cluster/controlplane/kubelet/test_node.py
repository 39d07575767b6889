"""Promises of the documentation about nodes: registration, heartbeat, and a kubelet's death and return."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest_asyncio

from kube.client import Client
from kube.resources import PODS
from tests.cluster.controlplane.kubelet.conftest import Pods, conditions
from tests.cluster.nodes import joined
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually

MORTAL, PRETENDING = "cpu-3", "gpu-4"
SERVER = {
    "command": ["sh", "-c", "cd /tmp && exec python -m http.server 8080"],
    "readinessProbe": {"httpGet": {"port": 8080, "path": "/"}, "periodSeconds": 1},
}


@pytest_asyncio.fixture
async def mortal(plane: ControlPlane, tmp_path: Path, watched: list[Process]) -> AsyncIterator[Process]:
    """The kubelet of a separate node, which a test may kill."""
    async with joined(plane, MORTAL, tmp_path, watched, arguments=("--backoff-base=0.5",)) as kubelet:
        yield kubelet


async def answers(address: str) -> bool:
    timeout = aiohttp.ClientTimeout(1)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"http://{address}:8080/") as response,
        ):
            return response.ok
    except (aiohttp.ClientError, TimeoutError):
        return False


async def test_containers_outlive_the_kubelet_and_are_replaced_by_the_next(
    client: Client, namespace: str, mortal: Process
) -> None:
    pods = Pods(client, namespace, MORTAL)
    name = await pods.run("", main=SERVER, restartPolicy="Always")
    before = await pods.until(name, lambda status: status["containerStatuses"][0]["ready"])
    await mortal.kill()
    await eventually(lambda: answers(before["podIP"]))
    mortal.start()
    after = await pods.until(
        name,
        lambda status: status["containerStatuses"][0]["restartCount"] == 1 and status["containerStatuses"][0]["ready"],
    )
    assert after["containerStatuses"][0]["lastState"]["terminated"]["reason"] == "ContainerStatusUnknown"
    await eventually(lambda: answers(after["podIP"]))
    assert after["startTime"] == before["startTime"]


async def test_a_deletion_during_the_kubelets_absence_is_finished_on_its_return(
    client: Client, namespace: str, mortal: Process
) -> None:
    pods = Pods(client, namespace, MORTAL)
    name = await pods.run("", main=SERVER)
    address = (await pods.until(name, lambda status: status["containerStatuses"][0]["ready"]))["podIP"]
    await mortal.kill()
    await client.delete(PODS, name, namespace)
    await eventually(lambda: answers(address))
    mortal.start()
    await eventually(lambda: pods.is_gone(name))
    assert not await answers(address)


async def test_an_api_outage_stops_nothing_and_changes_are_reported_afterwards(
    client: Client, pods: Pods, plane: ControlPlane, tmp_path: Path
) -> None:
    volumes = [{"name": "flags", "hostPath": {"path": str(tmp_path)}}]
    waiting = {"volumeMounts": [{"name": "flags", "mountPath": "/flags"}]}
    server = await pods.run("", main=SERVER)
    job = await pods.run(
        "until [ -e /flags/end ]; do sleep 0.1; done; touch /flags/ended", main=waiting, volumes=volumes
    )
    address = (await pods.until(server, lambda status: status["containerStatuses"][0]["ready"]))["podIP"]
    await pods.until(job, lambda status: status["phase"] == "Running")
    await plane.stop_apiserver()
    try:
        (tmp_path / "end").touch()
        await eventually((tmp_path / "ended").exists)
        await eventually(lambda: answers(address))
    finally:
        await plane.start_apiserver()
    await pods.until(job, lambda status: status["phase"] == "Succeeded")
    assert (await pods.main(server))["restartCount"] == 0
    await client.delete(PODS, server, pods.namespace)
    await eventually(lambda: pods.is_gone(server))


async def test_a_forced_deletion_kills_the_containers(pods: Pods, plane: ControlPlane) -> None:
    name = await pods.run("", main=SERVER, terminationGracePeriodSeconds=600)
    address = (await pods.until(name, lambda status: status["containerStatuses"][0]["ready"]))["podIP"]
    await plane.kubectl("delete", "pod", name, f"--namespace={pods.namespace}", "--force", "--grace-period=0")
    assert await pods.is_gone(name)

    async def silent() -> bool:
        return not await answers(address)

    await eventually(silent)


async def test_report_only_kubelet_reports_pods_as_running(
    client: Client, namespace: str, plane: ControlPlane, tmp_path: Path, watched: list[Process]
) -> None:
    devices = {"nvidia.com/gpu": "8"}
    async with joined(plane, PRETENDING, tmp_path, watched, resources=devices, arguments=("--report-only",)):
        pods = Pods(client, namespace, PRETENDING)
        limits = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
        name = await pods.run("exit 1", main={"image": "docker.io/vllm/vllm-openai", **limits})
        status = await pods.until(name, lambda status: conditions(status).get("Ready") == "True")
        assert (status["phase"], status["podIP"].startswith("10.77.")) == ("Running", True)
        await client.delete(PODS, name, namespace)
        await eventually(lambda: pods.is_gone(name))
