"""A release on a cluster: taken over from kubectl, upgraded, rolled back, uninstalled and installed again."""

import re
import time
from functools import partial
from pathlib import Path

import pytest

from kube.client import Client
from kube.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    LEASES,
    METAL_HOSTS,
    MODELS,
    NAMESPACES,
    NODES,
    PODS,
    PVCS,
    SECRETS,
    Resource,
)
from tests.cluster.conftest import HUB_PORT
from tests.cluster.install.earlier_chart import FIELD, write_earlier_chart
from tests.cluster.main_job.cluster import READY_SECONDS, Cluster
from tests.controlplane.helm import CHART, HelmError, run_helm
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE, controller_may
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.file_server import ALLOWED_NETWORKS
from tests.support.shell import Shell
from tests.support.tiny_models import tiny_gguf
from tests.support.watched_states import watch_states

pytestmark = pytest.mark.long

SOURCES = f"--set=models.allowPrivateSources={{{','.join(map(str, ALLOWED_NETWORKS))}}}"
WAIT = ("--wait", "--timeout=5m")
HUB = f"--set=models.huggingFaceEndpoint=http://{ADDRESS}:{HUB_PORT}"
RELEASE = ("pomona", str(CHART), *WAIT, SOURCES, HUB)
DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferenceservices.inference.pomona.dev"
CONTROLLER_PODS = "app.kubernetes.io/component=controller"


async def has_new_field(plane: ControlPlane) -> bool:
    (version,) = (await plane.request("GET", DEFINITION))["spec"]["versions"]
    return FIELD in version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]


async def controller_images(client: Client) -> set[str]:
    listed = await client.list(PODS, CONTROLLER_NAMESPACE, label_selector=CONTROLLER_PODS)
    return {
        item["spec"]["containers"][0]["image"] for item in listed.items if "deletionTimestamp" not in item["metadata"]
    }


async def no_controller_left(client: Client) -> bool:
    """Return whether the garbage collector, for which Helm does not wait, has deleted the controller's pods."""
    return not await controller_images(client)


async def serving_pod(cluster: Cluster) -> tuple[str, int]:
    """Return uid and restarts of the only pod of the service `chat`; AssertionError while there are several."""
    listed = await cluster.client.list(PODS, cluster.namespace, label_selector="inference.pomona.dev/service=chat")
    assert len(listed.items) == 1
    (pod,) = listed.items
    return pod["metadata"]["uid"], sum(status["restartCount"] for status in pod["status"]["containerStatuses"])


async def replaced_pod(cluster: Cluster, before: tuple[str, int]) -> tuple[str, int]:
    """Return the only pod of `chat` once it is another one: a version with another template replaces each pod once."""
    after = await serving_pod(cluster)
    assert after != before
    return after


async def leader(client: Client) -> str:
    """Return the name of the pod that leads; AssertionError if it does not run."""
    lease = await client.get(LEASES, CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE)
    holder: str = lease["spec"].get("holderIdentity") or ""
    pods = await client.list(PODS, CONTROLLER_NAMESPACE, label_selector=CONTROLLER_PODS)
    names: list[str] = [item["metadata"]["name"] for item in pods.items if "deletionTimestamp" not in item["metadata"]]
    holders = [name for name in names if holder.startswith(f"{name}-")]
    assert holders, holder
    return holders[0]


async def observe_available(client: Client, seen: list[int]) -> None:
    """Record how many replicas of the controller are available, in each state of its Deployment."""
    async for deployments in watch_states(client, DEPLOYMENTS, CONTROLLER_NAMESPACE, label_selector=CONTROLLER_PODS):
        seen.extend(deployment["status"].get("availableReplicas", 0) for deployment in deployments)


async def controller_may_not(
    plane: ControlPlane, verb: str, resource: Resource, namespace: str = "", subresource: str = ""
) -> bool:
    """Return whether the API server refuses this to the controller; it learns that a binding is gone a bit later."""
    return not await controller_may(plane, verb, resource, namespace, subresource)


async def install_for_one_namespace(plane: ControlPlane, namespace: str) -> None:
    """Install a controller of one namespace, check what its account may do, and uninstall it."""
    await run_helm("install", "pomona", str(CHART), "--set", f"scope.namespaces={{{namespace}}}", plane=plane)
    for verb, resource, subresource in (
        ("watch", INFERENCE_SERVICES, ""),
        ("create", DEPLOYMENTS, ""),
        ("get", SECRETS, ""),
        ("patch", MODELS, "status"),
    ):
        await eventually(partial(controller_may, plane, verb, resource, namespace, subresource))
        for elsewhere in ("default", ""):
            await eventually(partial(controller_may_not, plane, verb, resource, elsewhere, subresource))
    await eventually(partial(controller_may, plane, "list", NODES))
    await eventually(partial(controller_may_not, plane, "list", METAL_HOSTS))
    await run_helm("uninstall", "pomona", *WAIT, plane=plane)


@pytest.mark.usefixtures("node", "installable")
async def test_release_is_adopted_upgraded_rolled_back_and_uninstalled_while_a_model_serves(
    plane: ControlPlane, client: Client, cluster: Cluster, tmp_path: Path
) -> None:
    earlier = write_earlier_chart(tmp_path)
    with pytest.raises(HelmError, match="invalid ownership metadata"):
        await run_helm("install", "pomona", str(earlier), plane=plane)
    await run_helm(
        *("install", "pomona", str(earlier), *WAIT, SOURCES, "--take-ownership", "--force-conflicts"), plane=plane
    )
    assert await controller_images(client) == {"ghcr.io/pomona-dev/pomona:previous"}
    assert not await has_new_field(plane)
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu"))
    await cluster.ready("chat")
    before = await serving_pod(cluster)

    # The new controller leads, and replaces what the old one started, which serves until then.
    seen: list[int] = []
    async with running(observe_available(client, seen)):
        await run_helm("upgrade", *RELEASE, plane=plane)
    assert min(seen) >= 2
    await eventually(lambda: leader(client))
    assert await controller_images(client) == {"ghcr.io/pomona-dev/pomona:0.1.0"}
    assert await has_new_field(plane)
    await cluster.apply(cluster.service("second", "cpu"))
    updated = await eventually(lambda: replaced_pod(cluster, before), READY_SECONDS)
    await cluster.ready("chat", "second")

    await run_helm("rollback", "pomona", "1", *WAIT, plane=plane)
    assert await controller_images(client) == {"ghcr.io/pomona-dev/pomona:previous"}
    assert not await has_new_field(plane)
    rolled_back = await eventually(lambda: replaced_pod(cluster, updated), READY_SECONDS)
    await cluster.ready("chat")

    await run_helm("uninstall", "pomona", *WAIT, plane=plane)
    await eventually(lambda: no_controller_left(client))
    assert await cluster.services() == ["chat", "second"]
    assert await cluster.names(PVCS) != []
    assert await serving_pod(cluster) == rolled_back
    assert await cluster.answers("chat")
    # No policy is left that misses its parameter, and would refuse all EndpointSlices of the cluster.
    assert await plane.request("GET", f"/api/v1/namespaces/{CONTROLLER_NAMESPACE}/configmaps/pomona-host-ports")
    assert await plane.request("GET", NAMESPACES.path(None, "pomona-metal-hosts"))

    # What stayed is of the same release.
    await install_for_one_namespace(plane, cluster.namespace)
    started = time.monotonic()
    await run_helm("install", *RELEASE, plane=plane)
    print(f"helm install to a ready controller: {time.monotonic() - started:.1f} s")
    assert await has_new_field(plane)
    repository = cluster.files.root / "Qwen" / "Qwen3-0.6B-GGUF"
    repository.mkdir(parents=True)
    tiny_gguf.write(repository / "Qwen3-0.6B-Q8_0.gguf")
    await follow_notes(Shell(plane, tmp_path / "shell"), cluster)


async def follow_notes(shell: Shell, cluster: Cluster) -> None:
    """Run the commands of the notes, in the namespace of the test."""
    notes = await shell.run("helm get notes pomona --namespace pomona-system")
    # As they are, at the begin of a line: the end of the YAML is found nowhere else.
    commands = "\n".join(re.findall(r"^(?:kubectl|TOKEN=)(?:.+\n)+", notes, re.MULTILINE))
    commands = commands.replace("--namespace default", f"--namespace {cluster.namespace}")
    await cluster.kubectl("delete", "isvc/chat", "isvc/second", "--cascade=foreground", "--wait")
    assert "service/chat 8080 &" in commands
    assert "Hello from a tiny model" in await shell.run(f"trap 'kill $!' EXIT\n{commands}")
