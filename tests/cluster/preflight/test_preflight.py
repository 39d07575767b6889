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

from controller.preflight.certificate_keeper import DATA_KEY, DNS_NAME, NAME
from crds.meta import CONTROLLER_NAMESPACE
from kube import credentials
from kube.client import Client, Obj, connect
from kube.errors import Forbidden, Invalid
from kube.resources import INFERENCE_SERVICES, MODELS, SECRETS, WEBHOOK_CONFIGURATIONS
from tests.controlplane import members
from tests.controlplane.helm import CHART, run_helm
from tests.controlplane.members import CONTROLLER_ACCOUNT, INSTALLED
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
POLICY = "controller-policy.yaml"


@pytest_asyncio.fixture
async def installed(plane: ControlPlane, tmp_path: Path) -> AsyncIterator[None]:
    """The chart's objects of preflight, and its policy for the controller."""
    shown = [f"--show-only=templates/{name}" for name in ("preflight.yaml", POLICY)]
    objects = list(
        yaml.safe_load_all(await run_helm("template", "pomona", str(CHART), "--set=preflight.enabled=true", *shown))
    )
    for each in objects:
        if each["kind"] == "Service":
            each["spec"] = {"clusterIP": ADDRESS, "ports": [{"name": "preflight", "port": PORT}]}
        if each["kind"] == "ValidatingWebhookConfiguration":
            each["webhooks"][0]["clientConfig"]["service"]["port"] = PORT
    manifest, own = tmp_path / "preflight.yaml", tmp_path / "own.yaml"
    manifest.write_text(yaml.safe_dump_all(objects))
    own.write_text(yaml.safe_dump_all([each for each in objects if each["metadata"]["name"] == NAME]))
    await plane.apply(manifest)
    yield
    await plane.kubectl("delete", "--ignore-not-found", "-f", str(own))
    await plane.apply(INSTALLED / POLICY)


@pytest_asyncio.fixture
async def webhook(
    plane: ControlPlane, client: Client, installed: None, tmp_path: Path, watched: list[Process]
) -> AsyncIterator[Process]:
    """The controller with its webhook, in a cluster with one small device."""
    del installed
    process = await members.controller(plane, tmp_path, OPTION)
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


async def read_certificate(client: Client) -> Obj:
    secret = await client.get(SECRETS, NAME, CONTROLLER_NAMESPACE)
    found: Obj = yaml.safe_load(b64decode(secret["data"][DATA_KEY]))[0]
    return found


async def ask_directly(client: Client, body: bytes, kind: str) -> int:
    """Return the status with which the webhook answers a request of somebody who knows its path."""
    config = (await client.get(WEBHOOK_CONFIGURATIONS, NAME))["webhooks"][0]["clientConfig"]
    trust = ssl.create_default_context(cadata=b64decode(config["caBundle"]).decode())
    url = f"https://{ADDRESS}:{PORT}{config['service']['path']}"
    async with (
        aiohttp.ClientSession(headers={"Content-Type": kind}) as session,
        session.post(url, data=io.BytesIO(body), ssl=trust, server_hostname=DNS_NAME) as response,
    ):
        return response.status


async def test_service_that_fits_nowhere_is_refused_and_a_dead_webhook_blocks_nothing(
    client: Client, namespace: str, webhook: Process
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
        assert await ask_directly(client, body, kind) == status
    assert await find_refusal(client, namespace), "it still answers"

    first = await read_certificate(client)
    await webhook.kill()
    assert await find_refusal(client, namespace) == "", "a dead webhook blocks nothing"
    await client.delete(SECRETS, NAME, CONTROLLER_NAMESPACE)
    webhook.start()
    assert "Model huge" in await eventually(lambda: find_refusal(client, namespace))
    second = await read_certificate(client)
    assert second["key"] != first["key"]
    log = webhook.log.read_text()
    for secret in (first["key"], first["token"], second["key"], second["token"]):
        assert secret not in log
    assert "PRIVATE KEY" not in log


async def test_stolen_token_writes_no_other_secret_and_no_other_configuration(
    plane: ControlPlane, installed: None
) -> None:
    del installed
    kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT)
    own = {"name": NAME, "namespace": CONTROLLER_NAMESPACE}
    token = {"kubernetes.io/service-account.name": "default"}
    async with connect(credentials.load(kubeconfig)) as thief:

        async def may_write() -> Obj:
            try:
                return await thief.apply(SECRETS, {"metadata": own, "type": "Opaque"}, field_manager="thief")
            except Forbidden as error:
                raise AssertionError from error

        await eventually(may_write)
        with pytest.raises(Forbidden):
            await thief.apply(
                SECRETS, {"metadata": own | {"name": "pomona-preflight-2"}, "type": "Opaque"}, field_manager="thief"
            )
        with pytest.raises(Forbidden):
            await thief.delete(SECRETS, NAME, CONTROLLER_NAMESPACE)
        await plane.kubectl("delete", "secret", NAME, "-n", CONTROLLER_NAMESPACE)
        account = {"metadata": own | {"annotations": token}, "type": "kubernetes.io/service-account-token"}
        with pytest.raises(Forbidden):
            await thief.apply(SECRETS, account, field_manager="thief")
        with pytest.raises(Forbidden):
            await thief.apply(WEBHOOK_CONFIGURATIONS, {"metadata": {"name": "another"}}, field_manager="thief")
        with pytest.raises(Forbidden):
            await thief.delete(WEBHOOK_CONFIGURATIONS, NAME)


async def test_rights_of_preflight_alone_make_its_secret_again_and_no_other(
    plane: ControlPlane, installed: None
) -> None:
    del installed
    place = ("-n", CONTROLLER_NAMESPACE)
    await plane.kubectl("create", "serviceaccount", "keeper", *place)
    try:
        account = f"--serviceaccount={CONTROLLER_NAMESPACE}:keeper"
        await plane.kubectl("create", "rolebinding", "keeper", f"--role={NAME}", account, *place)
        kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, "keeper")
        await plane.kubectl("delete", "secret", NAME, *place)
        async with connect(credentials.load(kubeconfig)) as keeper:

            async def make_again(name: str = NAME) -> Obj:
                metadata = {"name": name, "namespace": CONTROLLER_NAMESPACE}
                try:
                    return await keeper.apply(SECRETS, {"metadata": metadata, "type": "Opaque"}, field_manager="keeper")
                except Forbidden as error:
                    raise AssertionError from error

            assert await eventually(make_again)
            with pytest.raises(AssertionError):
                await make_again("another")
    finally:
        await plane.kubectl("delete", "--ignore-not-found", "serviceaccount/keeper", "rolebinding/keeper", *place)


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
