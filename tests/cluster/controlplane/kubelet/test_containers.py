"""Promises of the documentation about a container's view: variables, files, network, and nothing of the host."""

import base64
import os
import secrets
from pathlib import Path
from typing import Any

from kube.client import Client, Obj
from kube.resources import PVCS, SECRETS
from tests.cluster.controlplane.kubelet.conftest import Pods
from tests.controlplane.kubelet.api import CONFIG_MAPS
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.eventually import eventually

MESSAGE = "/dev/termination-log"


async def make(client: Client, pods: Pods, **data: str) -> str:
    """Create a ConfigMap and a Secret of one name with the same data; return the name."""
    name = f"source-{secrets.token_hex(3)}"
    metadata = {"name": name, "namespace": pods.namespace}
    await client.create(CONFIG_MAPS, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    await client.create(SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data})
    return name


def mounted(source: Obj, path: str = "/volume", **more: Any) -> dict[str, Any]:
    """Return the fields of a pod that mounts one volume."""
    mount = {"name": "volume", "mountPath": path, **more}
    return {"volumes": [{"name": "volume", **source}], "main": {"volumeMounts": [mount]}}


async def test_variables_of_every_origin(pods: Pods, client: Client) -> None:
    name = await make(client, pods, key="value")
    origins = {
        "POD": {"fieldRef": {"fieldPath": "metadata.name"}},
        "IP": {"fieldRef": {"fieldPath": "status.podIP"}},
        "HOST": {"fieldRef": {"fieldPath": "status.hostIP"}},
        "NODE": {"fieldRef": {"fieldPath": "spec.nodeName"}},
        "CPU": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}},
        "SECRET": {"secretKeyRef": {"name": name, "key": "key"}},
        "CONFIG": {"configMapKeyRef": {"name": name, "key": "key"}},
    }
    variables = [{"name": key, "valueFrom": origin} for key, origin in origins.items()]
    main = {
        "env": [*variables, {"name": "JOINED", "value": "$(CONFIG)-$(SECRET)-$$(CONFIG)"}],
        "resources": {"limits": {"cpu": "250m"}},
        "args": ["$(POD)"],
        "command": ["sh", "-c", f"echo $0 $IP $HOST $NODE $CPU $JOINED $HOSTNAME $KUBERNETES_SERVICE_HOST > {MESSAGE}"],
    }
    pod = await pods.run("", main=main)
    terminated = await pods.ended(pod)
    status = await pods.status(pod)
    expected = [pod, status["podIP"], status["hostIP"], pods.node, "250", "value-value-$(CONFIG)", pod, "10.0.0.1"]
    assert terminated["message"].split() == expected


async def test_a_container_waits_for_a_missing_secret(pods: Pods, client: Client) -> None:
    variable = {"name": "X", "valueFrom": {"secretKeyRef": {"name": "later", "key": "key"}}}
    pod = await pods.run(f"echo $X > {MESSAGE}", main={"env": [variable]})

    def refused(status: Obj) -> bool:
        return bool(status["containerStatuses"][0]["state"]["waiting"]["reason"] == "CreateContainerConfigError")

    status = await pods.until(pod, refused)
    assert "later" in status["containerStatuses"][0]["state"]["waiting"]["message"]
    metadata = {"name": "later", "namespace": pods.namespace}
    data = {"key": base64.b64encode(b"here").decode()}
    await client.create(SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    assert (await pods.ended(pod))["message"] == "here\n"


async def test_secrets_and_config_maps_are_files(pods: Pods, client: Client) -> None:
    name = await make(client, pods, one="1", two="2")
    script = f"cd /volume && cat one two > {MESSAGE} && ! echo x > one"
    read_only: dict[str, Any] = {"readOnly": True}
    assert await pods.output(script, **mounted({"secret": {"secretName": name}}, **read_only)) == "12"
    assert await pods.output(script, **mounted({"configMap": {"name": name}}, **read_only)) == "12"


async def test_a_pod_waits_for_a_missing_config_map(pods: Pods, client: Client) -> None:
    pod = await pods.run(f"cat /volume/key > {MESSAGE}", **mounted({"configMap": {"name": "later"}}))

    def told(status: Obj) -> bool:
        return "later" in status["containerStatuses"][0]["state"]["waiting"].get("message", "")

    status = await pods.until(pod, told)
    assert status["containerStatuses"][0]["state"]["waiting"]["reason"] == "ContainerCreating"
    metadata = {"name": "later", "namespace": pods.namespace}
    await client.create(
        CONFIG_MAPS, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"key": "here"}}
    )
    assert (await pods.ended(pod))["message"] == "here"


async def test_the_projected_token_is_valid_at_the_in_cluster_address(pods: Pods) -> None:
    script = f"""
        cd /var/run/secrets/kubernetes.io/serviceaccount
        review='{{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}}'
        curl --silent --fail --cacert ca.crt --header "Authorization: Bearer $(cat token)" --json "$review" \
            https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT/apis/authentication.k8s.io/v1/selfsubjectreviews \
            | grep -o 'system:serviceaccount:[^"]*' > {MESSAGE}
        cat namespace >> {MESSAGE}
    """
    output = await pods.output(script)
    assert output == f"system:serviceaccount:{pods.namespace}:default\n{pods.namespace}"


async def test_a_claims_folder_outlives_its_pods(pods: Pods, client: Client) -> None:
    metadata = {"name": "data", "namespace": pods.namespace}
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
    await client.create(PVCS, claim)
    source = {"persistentVolumeClaim": {"claimName": "data"}}
    await pods.output("echo kept > /models/file", **mounted(source, "/models"))
    assert await pods.output(f"cat /models/file > {MESSAGE}", **mounted(source, "/models")) == "kept\n"
    refused = await pods.output(f"! touch /models/x 2> {MESSAGE}", **mounted(source, "/models", readOnly=True))
    assert "Read-only file system" in refused


async def test_sub_path_of_a_volume_is_mounted(pods: Pods, client: Client) -> None:
    name = await make(client, pods, one="1", two="2")
    part = mounted({"configMap": {"name": name}}, "/etc/pomona/deep/two.txt", subPath="two")
    assert await pods.output(f"cat /etc/pomona/deep/two.txt > {MESSAGE}; ls /etc/hosts", **part) == "2"
    assert "pomona" not in os.listdir("/etc"), "nothing is made on the host for a mount point"  # noqa: PTH208 - not blocking


async def test_a_container_cannot_write_to_the_host(pods: Pods) -> None:
    script = f"touch /usr/x /etc/x 2> {MESSAGE}; touch /tmp/{pods.namespace} /root/x && ls /tmp >> {MESSAGE}"
    output = await pods.output(script)
    assert output.count("Read-only file system") == 2
    # A checkout below /tmp is there too.
    assert pods.namespace in output.splitlines()[2:]
    assert not (Path("/tmp") / pods.namespace).exists()


async def test_a_read_only_root_is_read_only(pods: Pods) -> None:
    main = {
        "securityContext": {"readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    }
    script = f"! touch /x && ! touch /tmp/x && touch /scratch/x && ls /scratch > {MESSAGE}"
    assert await pods.output(script, main=main, volumes=[{"name": "scratch", "emptyDir": {}}]) == "x\n"


async def test_a_volume_above_the_image_does_not_hide_it_in_any_run(pods: Pods) -> None:
    above = CHECKOUT.parent
    main = {"volumeMounts": [{"name": "scratch", "mountPath": str(above)}]}
    script = f"head -n 1 {CHECKOUT}/README.md > {MESSAGE}; echo >> {above}/runs; [ $(wc -l < {above}/runs) = 2 ]"
    volumes = [{"name": "scratch", "emptyDir": {}}]
    assert await pods.output(script, main=main, volumes=volumes, restartPolicy="OnFailure") == "# Pomona\n"


async def test_a_pod_has_its_own_network_processes_and_host_name(pods: Pods) -> None:
    pod = await pods.run(f"echo $(hostname) $$$$ $(getent hosts $(hostname)) > {MESSAGE}; ls /sys > /dev/null")
    name, pid, address, _ = (await pods.ended(pod))["message"].split()
    assert (name, pid, address) == (pod, "1", (await pods.status(pod))["podIP"])


async def test_logs_of_this_run_and_of_the_previous_one_are_served(pods: Pods, plane: ControlPlane) -> None:
    script = (
        "echo run $(wc -l < /volume/runs); echo >> /volume/runs; [ $(wc -l < /volume/runs) = 2 ] || exit 1; sleep 1000"
    )
    pod = await pods.run("touch /volume/runs; " + script, restartPolicy="OnFailure", **mounted({"emptyDir": {}}))
    await pods.until(pod, lambda status: status["containerStatuses"][0]["restartCount"] == 1)
    place = f"--namespace={pods.namespace}"

    async def logged() -> bool:
        return await plane.kubectl("logs", place, pod) == "run 1\n"

    await eventually(logged)
    assert await plane.kubectl("logs", place, pod, "--previous") == "run 0\n"


async def test_following_a_log_ends_with_the_container(pods: Pods, plane: ControlPlane) -> None:
    pod = await pods.run("echo one; sleep 0.5; echo two; echo three")
    await pods.until(pod, lambda status: status["phase"] != "Pending")
    place = f"--namespace={pods.namespace}"
    assert await plane.kubectl("logs", place, pod, "--follow") == "one\ntwo\nthree\n"
    assert await plane.kubectl("logs", place, pod, "--tail=2") == "two\nthree\n"
