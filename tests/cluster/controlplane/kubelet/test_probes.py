"""Promises of the documentation about the effects of probes on a pod and on its Service."""

from pathlib import Path
from typing import Any

from kube.client import Client
from kube.resources import ENDPOINT_SLICES, SERVICES
from tests.cluster.controlplane.kubelet.conftest import Pods
from tests.support.eventually import eventually

# A busy machine may take longer than a second, the default, for a command.
FLAG = {
    "exec": {"command": ["test", "-e", "/flags/healthy"]},
    "periodSeconds": 1,
    "failureThreshold": 1,
    "timeoutSeconds": 60,
}
MOUNT = {"volumeMounts": [{"name": "flags", "mountPath": "/flags"}]}


def flags(folder: Path) -> dict[str, Any]:
    return {"volumes": [{"name": "flags", "hostPath": {"path": str(folder)}}]}


async def test_readiness_adds_the_address_to_the_service_and_removes_it(
    pods: Pods, client: Client, tmp_path: Path
) -> None:
    metadata = {"name": "web", "namespace": pods.namespace}
    spec = {"selector": {"app": "web"}, "ports": [{"name": "http", "port": 80, "targetPort": 8080}]}
    await client.create(SERVICES, {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    name = await pods.run(
        "sleep 1000", labels={"app": "web"}, main={"readinessProbe": FLAG, **MOUNT}, **flags(tmp_path)
    )
    status = await pods.until(name, lambda status: status["phase"] == "Running")

    async def endpoint() -> tuple[list[str], bool]:
        slices = await client.list(ENDPOINT_SLICES, pods.namespace, label_selector="kubernetes.io/service-name=web")
        found = slices.items[0]["endpoints"][0]
        return found["addresses"], found["conditions"]["ready"]

    async def told(ready: bool) -> bool:
        return await endpoint() == ([status["podIP"]], ready)

    await eventually(lambda: told(False))
    (tmp_path / "healthy").touch()
    await eventually(lambda: told(True))
    (tmp_path / "healthy").unlink()
    await eventually(lambda: told(False))
    assert (await pods.main(name))["restartCount"] == 0


async def test_a_failing_liveness_probe_restarts_the_container(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "healthy").touch()
    name = await pods.run(
        "sleep 1000", main={"livenessProbe": FLAG, **MOUNT}, restartPolicy="Always", **flags(tmp_path)
    )
    await pods.until(name, lambda status: status["containerStatuses"][0]["started"])
    assert (await pods.main(name))["restartCount"] == 0
    (tmp_path / "healthy").unlink()
    status = await pods.until(name, lambda status: status["containerStatuses"][0]["restartCount"] >= 1)
    assert status["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 137
