"""Promises of the documentation about a pod's life: order, restarts, phases, termination."""

import re
import time
from typing import Any

from kube.client import Client
from kube.resources import PODS
from tests.cluster.controlplane.kubelet.conftest import Pods, conditions
from tests.controlplane.plane import ControlPlane
from tests.support.eventually import eventually

SHARED: dict[str, Any] = {"volumes": [{"name": "shared", "emptyDir": {}}]}
MOUNT = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
HOLD = "example.com/hold"
READY = {"readinessProbe": {"exec": {"command": ["test", "-e", "/ready"]}, "periodSeconds": 1}}
"""The file of a container that has set its trap."""


def init(name: str, script: str) -> dict[str, Any]:
    return {"name": name, "image": "pomona-test", "command": ["sh", "-c", script], **MOUNT}


async def test_init_containers_run_one_after_another_before_the_others(pods: Pods) -> None:
    steps = [init("one", "sleep 0.2; echo one >> /shared/order"), init("two", "echo two >> /shared/order")]
    output = await pods.output("cat /shared/order > /dev/termination-log", main=MOUNT, initContainers=steps, **SHARED)
    assert output == "one\ntwo\n"


async def test_a_crashing_container_waits_longer_and_longer(pods: Pods) -> None:
    # Any pause but the first: a busy machine may report none of 2 s.
    grown = re.compile(r"back-off (2|4|8|16|32)s")
    name = await pods.run("exit 9", restartPolicy="Always")
    status = await pods.until(name, lambda status: grown.search(str(status["containerStatuses"])))
    found = status["containerStatuses"][0]
    assert found["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert found["lastState"]["terminated"]["exitCode"] == 9
    assert (found["ready"], status["phase"]) == (False, "Running")


async def deleted_while_held(pods: Pods, name: str, client: Client) -> dict[str, Any]:
    """Delete a running pod whose object is kept by a finalizer, and return the last status of the kubelet."""
    await client.patch_json(
        PODS, name, pods.namespace, [{"op": "add", "path": "/metadata/finalizers", "value": [HOLD]}]
    )
    await client.delete(PODS, name, pods.namespace)
    status = await pods.until(name, lambda status: status["phase"] in {"Succeeded", "Failed"})
    await client.patch_json(PODS, name, pods.namespace, [{"op": "remove", "path": "/metadata/finalizers"}])
    await eventually(lambda: pods.is_gone(name))
    return status


async def test_a_deleted_pod_gets_sigterm_and_its_last_status_is_reported(pods: Pods, client: Client) -> None:
    script = "trap 'echo bye > /dev/termination-log; exit 0' TERM; touch /ready; while :; do sleep 0.1; done"
    name = await pods.run(script, main=READY, restartPolicy="Always", terminationGracePeriodSeconds=30)
    await pods.until(name, lambda status: status["containerStatuses"][0]["ready"])
    status = await deleted_while_held(pods, name, client)
    terminated = status["containerStatuses"][0]["state"]["terminated"]
    assert (status["phase"], terminated["exitCode"], terminated["message"]) == ("Succeeded", 0, "bye\n")


async def test_container_that_ignores_sigterm_is_killed_after_its_grace_period(pods: Pods, client: Client) -> None:
    name = await pods.run("sleep 1000", terminationGracePeriodSeconds=1)
    await pods.until(name, lambda status: status["phase"] == "Running")
    status = await deleted_while_held(pods, name, client)
    assert status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137
    assert status["phase"] == "Failed"


async def test_container_gets_sigterm_after_its_pre_stop_hook(pods: Pods, client: Client) -> None:
    script = "trap 'date +%s%N > /dev/termination-log; exit 0' TERM; touch /ready; while :; do sleep 0.1; done"
    main = {"lifecycle": {"preStop": {"sleep": {"seconds": 2}}}, **READY}
    name = await pods.run(script, main=main, restartPolicy="Always", terminationGracePeriodSeconds=30)
    await pods.until(name, lambda status: status["containerStatuses"][0]["ready"])
    began = time.time_ns()
    status = await deleted_while_held(pods, name, client)
    assert int(status["containerStatuses"][0]["state"]["terminated"]["message"]) - began >= 2e9


async def test_readiness_removed_by_another_client_is_reported_again(pods: Pods, plane: ControlPlane) -> None:
    name = await pods.run("exec sleep 60")
    await pods.until(name, lambda status: conditions(status)["Ready"] == "True")
    # The node controller does the same when a node was silent.
    lost = [{"type": "Ready", "status": "False"}]
    path = PODS.path(pods.namespace, name, "status")
    await plane.request("PATCH", path, {"status": {"conditions": lost}})
    await pods.until(name, lambda status: conditions(status)["Ready"] == "True")
