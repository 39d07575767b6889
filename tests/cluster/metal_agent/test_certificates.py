"""Hosts that serve with a certificate: Ready and requested by https if the controller trusts the authority."""

import aiohttp
import msgspec
import pytest

from controller.reconcile.conditions import find
from crds.inferenceservice import InferenceServiceStatus
from kube.client import Client
from kube.resources import INFERENCE_SERVICES, MODELS
from tests.cluster.conftest import StartMetalHost
from tests.controlplane.members import controller as make_controller
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.certificates import CA, HOST
from tests.support.eventually import eventually
from tests.support.tiny_models import tiny_gguf

TLS = ("--tls-certificate", HOST.certificate, "--tls-key", HOST.key)


async def test_controller_probes_https_once_it_has_the_hosts_ca(
    plane: ControlPlane, client: Client, namespace: str, controller: Process, metal_host: StartMetalHost
) -> None:
    host = await metal_host("studio-1", *TLS)
    tiny_gguf.write(host.file_root / "tiny.gguf")
    place = {"namespace": namespace}
    source = {"source": f"file://{host.file_root}/tiny.gguf", "memoryBytes": 2**30}
    await client.create(MODELS, {"metadata": {"name": "tiny", **place}, "spec": source})
    spec = {"modelRef": "tiny", "contextLength": 512, "hardware": {"accelerator": "metal"}}
    await client.create(INFERENCE_SERVICES, {"metadata": {"name": "chat", **place}, "spec": spec})

    async def told(reason: str) -> tuple[InferenceServiceStatus, str]:
        service = await client.get(INFERENCE_SERVICES, "chat", namespace)
        status = msgspec.convert(service.get("status", {}), InferenceServiceStatus)
        ready = find(status.conditions, "Ready")
        assert ready is not None
        assert ready.reason == reason, ready
        return status, ready.message

    _, message = await eventually(lambda: told("Untrusted"))
    assert message.startswith(f"the certificate of host studio-1 is not trusted: https://{host.address}:18")
    assert "unable to get local issuer certificate" in message
    assert "--hosts-ca" in message
    await controller.stop()

    trusting = await make_controller(plane, host.state_folder, f"--hosts-ca={CA}")
    trusting.start()
    try:
        status, _ = await eventually(lambda: told("Serving"))
    finally:
        await trusting.stop()
    assert status.phase == "Ready"
    assert status.endpoint == f"https://chat.{namespace}.svc:8080/v1"
    port = message.partition(f"{host.address}:")[2].partition(":")[0]
    async with aiohttp.ClientSession() as anybody:
        with pytest.raises(aiohttp.ClientError):
            await anybody.get(f"http://{host.address}:{port}/health")
