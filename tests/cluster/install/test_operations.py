"""The commands of docs/operations.md work word for word."""

import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from crds.meta import API_VERSION
from kube.client import Client
from kube.resources import (
    DEPLOYMENTS,
    GATEWAY_KEYS,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    MODEL_ROUTES,
    MODELS,
    NAMESPACES,
    SECRETS,
)
from tests.cluster.main_job.cluster import Cluster
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks
from tests.support.eventually import eventually
from tests.support.shell import Shell

pytestmark = pytest.mark.long

DOCUMENT = (CHECKOUT / "docs" / "operations.md").read_text()
HOST = "office-7"


def blocks_by_heading(text: str) -> dict[str, list[str]]:
    """Return the commands of each section."""
    blocks: defaultdict[str, list[str]] = defaultdict(list)
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, content = section.partition("\n")
        blocks[heading] = list_blocks(content)
    return blocks


COMMANDS = blocks_by_heading(DOCUMENT)


async def controller_exists(client: Client) -> bool:
    listed = await client.list(DEPLOYMENTS, CONTROLLER_NAMESPACE)
    return CONTROLLER_ACCOUNT in {item["metadata"]["name"] for item in listed.items}


async def node_cache_size(client: Client) -> str:
    """Return the value of the option of the controller that the example states."""
    deployment = await client.get(DEPLOYMENTS, CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE)
    options = dict(
        argument.partition("=")[::2] for argument in deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    )
    return str(options["--node-cache-size"])


async def back_up_and_restore(shell: Shell, cluster: Cluster) -> None:
    """Make objects, back them up, delete and restore them."""
    client, namespace = cluster.client, cluster.namespace
    secret = {"metadata": {"name": "hub"}, "type": "inference.pomona.dev/source", "stringData": {"token": "hf_1"}}
    await cluster.apply({"apiVersion": "v1", "kind": "Secret", **secret})
    await client.create(METAL_HOSTS, {"metadata": {"name": HOST}, "spec": {"namespaces": [namespace]}})
    await cluster.apply(
        cluster.model(source="file:///tiny.gguf", memoryBytes=1 << 30),
        cluster.model("gated", sourceSecretRef={"name": "hub"}),
        cluster.service("chat", "metal", priority="high"),
    )
    await client.create(
        GATEWAY_KEYS, {"metadata": {"name": "app", "namespace": namespace}, "spec": {"services": ["chat"]}}
    )
    route = {"services": [{"name": "chat", "weight": 3}]}
    await client.create(MODEL_ROUTES, {"metadata": {"name": "best", "namespace": namespace}, "spec": route})
    token = await eventually(lambda: cluster.token("chat"))
    key = (await eventually(lambda: client.get(SECRETS, "app-key", namespace)))["data"]
    (backup,) = COMMANDS["Back up"]
    await shell.run(backup)
    assert (shell.folder / "tokens.yaml").stat().st_mode & 0o777 == 0o600
    (kept,) = yaml.safe_load_all((shell.folder / "hosts.yaml").read_text())
    assert kept.pop("spec")["namespaces"] == [namespace]
    assert kept == {"apiVersion": API_VERSION, "kind": "MetalHost", "metadata": {"name": HOST}}

    await cluster.kubectl(
        "delete", "isvc/chat", "gk/app", "mr/best", "mdl/tiny", "mdl/gated", "secret/hub", f"mh/{HOST}"
    )
    await eventually(lambda: is_gone(cluster))
    (restore,) = COMMANDS["Restore"]
    await shell.run(restore)
    assert await cluster.token("chat") == token
    assert (await client.get(SECRETS, "app-key", namespace))["data"] == key
    assert (await client.get(GATEWAY_KEYS, "app", namespace))["spec"]["services"] == ["chat"]
    assert (await client.get(MODEL_ROUTES, "best", namespace))["spec"] == route
    service = await client.get(INFERENCE_SERVICES, "chat", namespace)
    model = await client.get(MODELS, "tiny", namespace)
    assert (service["spec"]["priority"], model["spec"]["memoryBytes"]) == ("high", 1 << 30)
    assert (await client.get(SECRETS, "hub", namespace))["type"] == "inference.pomona.dev/source"
    assert (await client.get(METAL_HOSTS, HOST))["spec"]["namespaces"] == [namespace]
    assert (await client.get(MODELS, "gated", namespace))["spec"]["sourceSecretRef"] == {"name": "hub"}
    await client.delete(METAL_HOSTS, HOST)


async def is_gone(cluster: Cluster) -> bool:
    return not {"chat-token", "app-key"} & set(await cluster.names(SECRETS))


@pytest.mark.usefixtures("node", "uninstalled")
async def test_commands_of_the_document_work_one_after_the_other(
    plane: ControlPlane, cluster: Cluster, tmp_path: Path
) -> None:
    shell, client = Shell(plane, tmp_path), cluster.client
    (example,) = list_blocks(DOCUMENT.partition("## Values")[2].partition("## ")[0], "yaml")
    # The kubelet of the tests has the image of this name.
    values = example.replace("registry.example/pomona", "ghcr.io/pomona-dev/pomona")
    (tmp_path / "values.yaml").write_text(values)
    (install,) = COMMANDS["Install with Helm"]
    said = await shell.run(install)
    assert "STATUS: deployed" in said
    assert "kubectl rollout status deployment pomona-controller" in said
    assert await node_cache_size(client) == "500Gi"
    (tmp_path / "values.yaml").write_text(values.replace("500Gi", "600Gi"))
    (upgrade,) = COMMANDS["Upgrade"]
    await shell.run(upgrade)
    assert await node_cache_size(client) == "600Gi"
    (metrics,) = COMMANDS["Metrics"]

    async def is_scraped() -> bool:
        # The first pod may be one that the upgrade has just ended.
        return "pomona_build_info" in await shell.run(metrics)

    await eventually(is_scraped)
    (rollback,) = COMMANDS["Roll back"]
    await shell.run(rollback)
    assert await node_cache_size(client) == "500Gi"
    await back_up_and_restore(shell, cluster)
    controllers = (
        "logs",
        "--namespace=pomona-system",
        "--selector=app.kubernetes.io/component=controller",
        "--tail=-1",
    )
    said = await plane.kubectl(*controllers)
    assert "store_complete" in said
    assert "kopf_ended" not in said, "its watches end, and only lists bring what changes"
    uninstall, purge, without_helm = COMMANDS["Uninstall"]
    await shell.run(uninstall)
    assert not await controller_exists(client)

    # Other tests need what the last commands delete: they are only checked.
    checked = "\n".join(f"{line} --dry-run=server" for line in purge.splitlines() if line.startswith("kubectl delete"))
    assert len(re.findall(r"server dry run", await shell.run(checked))) >= 4 + 5 + 2

    # What Helm left has its own values, such as ports.
    (by_kubectl,) = (command.replace("-k", "--force-conflicts -k") for command in COMMANDS["Install without Helm"])
    await shell.run(by_kubectl)
    (move,) = COMMANDS["Move to Helm"]
    await shell.run(move)
    await shell.run(uninstall)
    await shell.run(by_kubectl)
    await shell.run(without_helm)
    assert not await controller_exists(client)
    assert await client.get(NAMESPACES, "pomona-metal-hosts")
