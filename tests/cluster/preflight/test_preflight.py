"""Preflight on a real API server, with the chart's webhook, rights and policies and the controller's own identity."""

import contextlib
import io
import ssl
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from controller.preflight.preflight_webhook import PATH, PATH_FILE
from crds.meta import CONTROLLER_NAMESPACE
from kube.client import Client, Obj
from kube.errors import Invalid
from kube.resources import INFERENCE_SERVICES, MODELS, SECRETS
from tests.controlplane import members
from tests.controlplane.helm import CHART, run_helm
from tests.controlplane.network import ip
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.support.open_ports import check_attacked_ports, find_ports
from tests.support.simulated_nodes import SimulatedNodes

ADDRESS, PORT = "10.0.250.250", 9443
"""The Service's address is this machine's, as there is no kube-proxy; the API server itself has port 443."""
OPTION = f"--preflight-bind-address={ADDRESS}:{PORT}"
L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"}
TEMPLATE = "--show-only=templates/preflight.yaml"
NAME, DNS_NAME = "pomona-preflight", "pomona-preflight.pomona-system.svc"


class Release:
    """The chart's objects of preflight; the folder has what the pod's volume would have."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane = plane
        self.manifest = folder / "preflight.yaml"
        self.volume = folder / "volume"
        self.volume.mkdir()
        self.secret: dict[str, str] = {}

    async def install(self) -> None:
        """Install or upgrade without the present Secret, so that certificate and path are new."""
        rendered = await run_helm("template", "pomona", str(CHART), "--set=preflight.enabled=true", TEMPLATE)
        objects = {document["kind"]: document for document in yaml.safe_load_all(rendered)}
        objects["Service"]["spec"] = {"clusterIP": ADDRESS, "ports": [{"name": "preflight", "port": PORT}]}
        objects["ValidatingWebhookConfiguration"]["webhooks"][0]["clientConfig"]["service"]["port"] = PORT
        self.manifest.write_text(yaml.safe_dump_all(objects.values()))
        await self.plane.apply(self.manifest)
        self.secret = {name: b64decode(data).decode() for name, data in objects["Secret"]["data"].items()}
        for name, text in self.secret.items():
            (self.volume / name).write_text(text)


@pytest_asyncio.fixture
async def release(plane: ControlPlane, tmp_path: Path) -> AsyncIterator[Release]:
    """Preflight, as the chart installs it."""
    release = Release(plane, tmp_path)
    await release.install()
    yield release
    await plane.kubectl("delete", "--ignore-not-found", "-f", str(release.manifest))


@pytest_asyncio.fixture
async def webhook(
    plane: ControlPlane, client: Client, release: Release, tmp_path: Path, watched: list[Process]
) -> AsyncIterator[Process]:
    """The controller with its webhook, in a cluster with one small device."""
    process = await members.controller(plane, tmp_path, OPTION, f"--preflight-certificate={release.volume}")
    watched.append(process)
    async with contextlib.AsyncExitStack() as stack:
        await ip(f"address add {ADDRESS}/32 dev lo")
        stack.push_async_callback(ip, f"address del {ADDRESS}/32 dev lo")
        nodes = await stack.enter_async_context(SimulatedNodes(plane, client).running())
        await nodes.add("preflight-1", 1, **L4)
        process.start()
        yield process
        if process.running:
            await process.stop()
    watched.remove(process)
    await members.delete_leadership(plane)


async def make_model(client: Client, namespace: str, name: str, gib: int) -> None:
    """Create a Model that each pod pulls by itself, so that nothing is inspected."""
    spec = {"source": f"ollama://{name}:1b", "memoryBytes": gib * GIB}
    await client.create(MODELS, {"metadata": {"name": name, "namespace": namespace}, "spec": spec})


async def create(client: Client, namespace: str, name: str, model: str, **spec: Any) -> Obj:
    body = {"modelRef": model, "hardware": {"accelerator": "nvidia"}, **spec}
    return await client.create(INFERENCE_SERVICES, {"metadata": {"name": name, "namespace": namespace}, "spec": body})


async def edit(client: Client, namespace: str, name: str, **spec: Any) -> Obj:
    return await client.patch_merge(INFERENCE_SERVICES, name, namespace, {"spec": spec}, field_manager="user")


async def find_refusal(client: Client, namespace: str) -> str:
    """Return the message with which the large service is refused; empty if it is not."""
    try:
        await create(client, namespace, "large", "huge")
    except Invalid as error:
        return str(error)
    await client.delete(INFERENCE_SERVICES, "large", namespace)
    return ""


async def ask_directly(release: Release, body: bytes, kind: str) -> int:
    """Return the status with which the webhook answers a request of somebody who knows its path."""
    trust = ssl.create_default_context(cadata=release.secret["tls.crt"])
    url = f"https://{ADDRESS}:{PORT}{PATH}{release.secret[PATH_FILE]}"
    async with (
        aiohttp.ClientSession(headers={"Content-Type": kind}) as session,
        session.post(url, data=io.BytesIO(body), ssl=trust, server_hostname=DNS_NAME) as response,
    ):
        return response.status


async def test_service_that_fits_nowhere_is_refused_and_a_dead_webhook_blocks_nothing(
    client: Client, namespace: str, release: Release, webhook: Process
) -> None:
    await make_model(client, namespace, "huge", 60)
    await make_model(client, namespace, "small", 1)
    refusal = await eventually(lambda: find_refusal(client, namespace))
    for words in (f"{namespace}/large", "Model huge", "60.4 GiB", "22.5 GiB", "spec.suspend"):
        assert words in refusal

    await create(client, namespace, "chat", "small")
    with pytest.raises(Invalid, match="Model huge"):
        await edit(client, namespace, "chat", modelRef="huge")
    await create(client, namespace, "unread", "absent")
    await create(client, namespace, "later", "huge", suspend=True)
    for change in ({"priority": "high"}, {"replicas": 2}, {"suspend": False}, {"suspend": True}):
        await edit(client, namespace, "later", **change)
    await client.delete(INFERENCE_SERVICES, "later", namespace)

    for body, kind, status in (
        (b"\x00\xff garbage", "application/json", 400),
        (b"model=huge", "application/x-www-form-urlencoded", 400),
        (b"[" * 1_000_000, "text/plain", 400),
        (b" " * (9 << 20), "application/json", 413),
    ):
        assert await ask_directly(release, body, kind) == status
    assert await find_refusal(client, namespace), "it still answers"

    first = release.secret
    await release.install()
    assert release.secret["tls.key"] != first["tls.key"]
    assert "Model huge" in await eventually(lambda: find_refusal(client, namespace)), "new ones are served at once"

    await webhook.kill()
    assert await find_refusal(client, namespace) == "", "a dead webhook blocks nothing"
    webhook.start()
    assert "Model huge" in await eventually(lambda: find_refusal(client, namespace))
    log = webhook.log.read_text()
    assert not [name for secret in (first, release.secret) for name in (PATH_FILE, "tls.key") if secret[name] in log]
    assert "PRIVATE KEY" not in log


async def test_upgrade_keeps_the_certificate_and_makes_one_that_is_gone(
    plane: ControlPlane, client: Client, release: Release
) -> None:
    async def upgrade() -> dict[str, str]:
        """Return the data of the Secret that an upgrade would apply."""
        options = ("--set=preflight.enabled=true", TEMPLATE, "--dry-run=server", "--take-ownership")
        rendered = await run_helm("template", "pomona", str(CHART), *options, plane=plane)
        secret: Obj = next(document for document in yaml.safe_load_all(rendered) if document["kind"] == "Secret")
        return {name: b64decode(data).decode() for name, data in secret["data"].items()}

    assert await upgrade() == release.secret
    await client.delete(SECRETS, NAME, CONTROLLER_NAMESPACE)
    assert (await upgrade())["tls.key"] != release.secret["tls.key"]


async def test_strangers_neither_end_the_controller_nor_keep_reviews_out(
    client: Client, namespace: str, webhook: Process
) -> None:
    await eventually(lambda: PORT in {port.port for port in find_ports([webhook.pid])})
    ports = [port._replace(is_tls=port.port == PORT) for port in find_ports([webhook.pid])]
    assert len(ports) == 3
    await check_attacked_ports(ports)
    await make_model(client, namespace, "large", 4000)

    async def is_refused() -> bool:
        with contextlib.suppress(Invalid):
            await create(client, namespace, "large", "large")
            await client.delete(INFERENCE_SERVICES, "large", namespace)
            return False
        return True

    await eventually(is_refused)
