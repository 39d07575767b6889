"""Promises of the documentation about a pod's life: order, restarts, phases, termination."""

import re
import time
from typing import Any

import pytest

from kube.client import Client
from kube.resources import JOBS, PODS
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


async def test_a_failing_init_container_delays_the_others(pods: Pods) -> None:
    name = await pods.run("true", initContainers=[init("one", "exit 4")], restartPolicy="Always", **SHARED)
    status = await pods.until(name, lambda status: status["initContainerStatuses"][0]["restartCount"] > 0)
    assert status["phase"] == "Pending"
    assert status["containerStatuses"][0]["state"]["waiting"]["reason"] == "PodInitializing"
    assert conditions(status)["Initialized"] == "False"


async def test_a_failed_init_container_fails_a_pod_that_never_restarts(pods: Pods) -> None:
    name = await pods.run("true", initContainers=[init("one", "exit 4")], **SHARED)
    status = await pods.until(name, lambda status: status["phase"] == "Failed")
    assert status["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 4


async def test_a_pod_succeeds_when_its_container_does(pods: Pods) -> None:
    name = await pods.run("exit 0")
    terminated = await pods.ended(name)
    status = await pods.status(name)
    assert (status["phase"], terminated["exitCode"], terminated["reason"]) == ("Succeeded", 0, "Completed")
    assert conditions(status)["Ready"] == "False"
    assert conditions(status)["Initialized"] == "True"


async def test_a_pod_that_never_restarts_fails_with_its_container(pods: Pods) -> None:
    name = await pods.run("exit 3")
    terminated = await pods.ended(name)
    assert (await pods.status(name))["phase"] == "Failed"
    assert (terminated["exitCode"], terminated["reason"]) == (3, "Error")


async def test_on_failure_restarts_until_success_and_keeps_an_empty_dir(pods: Pods) -> None:
    script = "echo x >> /shared/runs; [ $(wc -l < /shared/runs) = 3 ]"
    name = await pods.run(script, main=MOUNT, restartPolicy="OnFailure", **SHARED)
    assert (await pods.ended(name))["exitCode"] == 0
    found = await pods.main(name)
    assert (found["restartCount"], found["lastState"]["terminated"]["exitCode"]) == (2, 1)


async def test_always_restarts_a_container_that_succeeded(pods: Pods) -> None:
    name = await pods.run("exit 0", restartPolicy="Always")
    status = await pods.until(name, lambda status: status["containerStatuses"][0]["restartCount"] >= 2)
    assert status["phase"] == "Running"


async def test_a_crashing_container_waits_longer_and_longer(pods: Pods) -> None:
    # Any pause but the first: a busy machine may report none of 2 s.
    grown = re.compile(r"back-off (2|4|8|16|32)s")
    name = await pods.run("exit 9", restartPolicy="Always")
    status = await pods.until(name, lambda status: grown.search(str(status["containerStatuses"])))
    found = status["containerStatuses"][0]
    assert found["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert found["lastState"]["terminated"]["exitCode"] == 9
    assert (found["ready"], status["phase"]) == (False, "Running")


async def test_a_command_that_does_not_exist_is_a_start_error(pods: Pods) -> None:
    terminated = await pods.ended(await pods.run("", main={"command": ["no-such-program"]}))
    assert (terminated["reason"], terminated["exitCode"]) == ("StartError", 128)
    assert "no-such-program" in terminated["message"]


async def test_pull_of_an_unknown_image_backs_off(pods: Pods) -> None:
    name = await pods.run("true", main={"image": "docker.io/library/unknown:1"})
    waits = {"ErrImagePull", "ImagePullBackOff"}
    status = await pods.until(
        name, lambda status: status["containerStatuses"][0]["state"]["waiting"]["reason"] == "ImagePullBackOff"
    )
    assert status["containerStatuses"][0]["state"]["waiting"]["reason"] in waits
    assert status["phase"] == "Pending"


async def test_pod_with_an_unsupported_field_fails_and_the_field_is_named(pods: Pods) -> None:
    name = await pods.run("true", hostNetwork=True)
    status = await pods.until(name, lambda status: status["phase"] == "Failed")
    assert (status["reason"], "hostNetwork" in status["message"]) == ("UnsupportedPod", True)


async def test_a_pod_ends_at_its_deadline(pods: Pods) -> None:
    name = await pods.run("sleep 1000", activeDeadlineSeconds=1)
    status = await pods.until(name, lambda status: status["phase"] == "Failed")
    assert status["reason"] == "DeadlineExceeded"


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


async def test_a_second_deletion_may_shorten_the_grace(pods: Pods, client: Client, plane: ControlPlane) -> None:
    name = await pods.run("sleep 1000", terminationGracePeriodSeconds=600)
    await pods.until(name, lambda status: status["phase"] == "Running")
    await client.delete(PODS, name, pods.namespace)
    pod = await client.get(PODS, name, pods.namespace)
    assert pod["metadata"]["deletionGracePeriodSeconds"] == 600
    await plane.kubectl("delete", "pod", name, f"--namespace={pods.namespace}", "--grace-period=1", "--wait=false")
    await eventually(lambda: pods.is_gone(name))


@pytest.mark.parametrize("policy", ["File", "FallbackToLogsOnError"])
async def test_the_termination_message_comes_from_the_file_or_the_log(pods: Pods, policy: str) -> None:
    main = {"terminationMessagePolicy": policy, "terminationMessagePath": "/var/run/why"}
    own = await pods.ended(await pods.run("echo logged; echo own > /var/run/why; exit 1", main=main))
    assert own["message"] == "own\n"
    silent = await pods.ended(await pods.run("echo logged; exit 1", main=main))
    assert silent.get("message") == (None if policy == "File" else "logged\n")


async def test_a_pod_waits_for_its_readiness_gate(pods: Pods, client: Client) -> None:
    gate = "example.com/checked"
    name = await pods.run("sleep 1000", readinessGates=[{"conditionType": gate}])
    status = await pods.until(name, lambda status: conditions(status)["ContainersReady"] == "True")
    assert conditions(status)["Ready"] == "False"
    opened = {"op": "add", "path": "/status/conditions/-", "value": {"type": gate, "status": "True"}}
    await client.patch_json(PODS, name, pods.namespace, [opened], subresource="status")
    status = await pods.until(name, lambda status: conditions(status)["Ready"] == "True")
    assert conditions(status)[gate] == "True", "the kubelet leaves conditions of others alone"


async def test_a_job_completes(pods: Pods, client: Client) -> None:
    template = {
        "nodeSelector": {"kubernetes.io/hostname": pods.node},
        "restartPolicy": "Never",
        "containers": [{"name": "main", "image": "pomona-test", "command": ["true"]}],
    }
    metadata = {"name": "job", "namespace": pods.namespace}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": {"spec": template}}}
    await client.create(JOBS, job)

    async def complete() -> bool:
        found = await client.get(JOBS, "job", pods.namespace)
        return conditions(found["status"])["Complete"] == "True"

    await eventually(complete)


async def test_readiness_removed_by_another_client_is_reported_again(pods: Pods, plane: ControlPlane) -> None:
    name = await pods.run("exec sleep 60")
    await pods.until(name, lambda status: conditions(status)["Ready"] == "True")
    # The node controller does the same when a node was silent.
    lost = [{"type": "Ready", "status": "False"}]
    path = PODS.path(pods.namespace, name, "status")
    await plane.request("PATCH", path, {"status": {"conditions": lost}})
    await pods.until(name, lambda status: conditions(status)["Ready"] == "True")
