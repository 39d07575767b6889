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


async def test_liveness_and_readiness_wait_for_the_startup_probe(pods: Pods, tmp_path: Path) -> None:
    startup = {"exec": {"command": ["test", "-e", "/flags/started"]}, "periodSeconds": 1, "failureThreshold": 60}
    main = {"startupProbe": startup, "readinessProbe": FLAG, "livenessProbe": FLAG, **MOUNT}
    name = await pods.run("sleep 1000", main=main, restartPolicy="Always", **flags(tmp_path))
    await pods.until(name, lambda status: status["phase"] == "Running")
    found = await pods.main(name)
    assert (found["started"], found["ready"], found["restartCount"]) == (False, False, 0)
    (tmp_path / "healthy").touch()
    (tmp_path / "started").touch()
    status = await pods.until(name, lambda status: status["containerStatuses"][0]["ready"])
    assert status["containerStatuses"][0]["started"] is True
    assert status["containerStatuses"][0]["restartCount"] == 0


async def test_a_failing_startup_probe_restarts_the_container(pods: Pods, tmp_path: Path) -> None:
    name = await pods.run("sleep 1000", main={"startupProbe": FLAG, **MOUNT}, restartPolicy="Always", **flags(tmp_path))
    await pods.until(name, lambda status: status["containerStatuses"][0]["restartCount"] >= 1)


async def test_http_and_tcp_probes_reach_the_pods_own_address(pods: Pods) -> None:
    main = {
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "http", "containerPort": 8080}],
        "livenessProbe": {"tcpSocket": {"port": 8080}, "initialDelaySeconds": 5},
        "readinessProbe": {"httpGet": {"port": "http", "path": "/"}, "periodSeconds": 1},
    }
    script = "cd /tmp && exec python -m http.server --bind $POD_IP 8080"
    one, two = [await pods.run(script, main=main) for _ in range(2)]  # the same port twice on one node
    for name in (one, two):
        await pods.until(name, lambda status: status["containerStatuses"][0]["ready"])
    assert (await pods.status(one))["podIP"] != (await pods.status(two))["podIP"]
