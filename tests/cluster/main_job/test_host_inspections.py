"""Models that only hosts serve, with a controller that has no image for Jobs: from applied files to tokens."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from controller.reconcile.conditions import find
from crds.meta import HOSTS_NAMESPACE
from crds.model import Model
from kube.client import Client
from kube.resources import JOBS, METAL_HOSTS, METAL_PROCESSES, MODELS, PODS, PVCS, ROLES
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster
from tests.cluster.shared_controller import SharedController
from tests.controlplane.members import MetalHost
from tests.controlplane.network import ADDRESS
from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.fake_metal_agent import FakeMetalAgent
from tests.support.file_server import COMMIT, FileServer
from tests.support.registry_artifacts import build_artifact, push
from tests.support.servers.programs import find_free_port
from tests.support.servers.registry import serve_registry

METAL: dict[str, Any] = {"hardware": {"accelerator": "metal"}}


@pytest_asyncio.fixture
async def controller(shared_controller: SharedController) -> Process:
    """The controller, without an image for Jobs."""
    return await shared_controller.lend("--image=")


@pytest.fixture
def registry_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A port at which agents take a registry without TLS."""
    port = find_free_port(ADDRESS)
    monkeypatch.setenv("POMONA_PLAIN_HTTP_REGISTRIES", f"{ADDRESS}:{port}")
    return port


@pytest.fixture
def files(registry_port: int, files: FileServer) -> FileServer:
    """The file server, after the port: controller and agents start with it in their environment."""
    del registry_port
    return files


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Contexts that end with the test."""
    async with AsyncExitStack() as stack:
        yield stack


async def wait_for_reason(cluster: Cluster, reason: str, kind: str = "Ready") -> Model:
    async def reached() -> Model:
        found = msgspec.convert(await cluster.client.get(MODELS, "tiny", cluster.namespace), Model)
        condition = find(found.status.conditions, kind)
        assert condition is not None
        assert condition.reason == reason, condition
        return found

    return await eventually(reached)


def message_of(model: Model) -> str:
    return next(each.message for each in model.status.conditions if each.type == "Ready")


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("source", ["", "hf://org/repo/tiny.gguf", "hf://org/repo"], ids=["http", "hub", "repository"])
async def test_public_model_is_served_without_a_job_and_an_image(cluster: Cluster, source: str) -> None:
    folder = cluster.files.root / "org" / "repo"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes((cluster.files.root / "tiny.gguf").read_bytes())
    spec = METAL | ({"source": source} if source else {})
    spec |= {"files": ["*.gguf"]} if source == "hf://org/repo" else {}
    model = cluster.model(**spec)
    await cluster.apply(model, cluster.service("chat", "metal"))
    await cluster.ready("chat")
    assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")

    found = await wait_for_reason(cluster, "Inspected")
    assert (found.status.inspected_by, found.status.phase, found.status.format) == ("studio-1", "Ready", "gguf")
    assert found.status.gguf is not None
    assert found.status.gguf.architecture == "llama"
    assert found.status.layout is not None, "memory is computed from the header"
    assert found.status.revision == (COMMIT if source else found.status.revision) != ""
    process = await cluster.process("chat")
    assert process.spec.artifact.revision == found.status.revision
    assert [each.metadata.name for each in await cluster.processes()] == [process.metadata.name]
    for resource in (JOBS, PODS, PVCS):
        assert await cluster.names(resource) == []


@pytest.mark.usefixtures("host")
async def test_artifact_of_a_public_registry_is_served_without_a_job_and_an_image(
    cluster: Cluster, registry_port: int, tmp_path: Path, stack: AsyncExitStack
) -> None:
    url = await stack.enter_async_context(serve_registry(tmp_path / "registry", address=ADDRESS, port=registry_port))
    artifact = build_artifact({"tiny.gguf": (cluster.files.root / "tiny.gguf").read_bytes()})
    digest = await push(url, "acme/tiny", "v1", artifact)
    source = f"oci://{ADDRESS}:{registry_port}/acme/tiny:v1"
    await cluster.apply(cluster.model(source=source, files=["*.gguf"], **METAL), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
    found = await wait_for_reason(cluster, "Inspected")
    assert (found.status.inspected_by, found.status.revision) == ("studio-1", digest)
    assert await cluster.names(JOBS) == []


@pytest.mark.usefixtures("host")
async def test_source_that_is_absent_is_shown_and_found_once_it_is_there(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(file="late.gguf", **METAL))
    found = await wait_for_reason(cluster, "SourceNotFound")
    assert found.status.phase == "Failed"
    assert message_of(found).startswith("host studio-1: ")
    assert message_of(found).endswith("; edit the Model; it is retried automatically")
    # At once as a whole: a host that asks now would find half of a file that is being written.
    (cluster.files.root / "late.gguf").hardlink_to(cluster.files.root / "tiny.gguf")
    await wait_for_reason(cluster, "Inspected")


@pytest.mark.usefixtures("host")
async def test_hostile_header_is_refused(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(file="hostile.gguf", **METAL))
    assert "hostile.gguf" in message_of(await wait_for_reason(cluster, "HeaderInvalid"))


async def test_model_waits_for_a_host_that_its_namespace_is_given(
    cluster: Cluster, client: Client, metal_host: StartMetalHost
) -> None:
    await cluster.apply(cluster.model(**METAL))
    waiting = await wait_for_reason(cluster, "NoImage")
    assert f"no live host that serves namespace {cluster.namespace} can inspect the source" in message_of(waiting)
    await client.create(METAL_HOSTS, {"metadata": {"name": "studio-1"}, "spec": {"namespaces": ["another-tenant"]}})
    await metal_host("studio-1")
    await eventually(lambda: is_live(client, "studio-1"))
    assert (await wait_for_reason(cluster, "NoImage")).status.inspected_by == ""
    assert await cluster.names(METAL_PROCESSES) == []
    given = {"op": "replace", "path": "/spec/namespaces", "value": [cluster.namespace]}
    await client.patch_json(METAL_HOSTS, "studio-1", None, [given])
    assert (await wait_for_reason(cluster, "Inspected")).status.inspected_by == "studio-1"


async def is_live(client: Client, name: str) -> bool:
    status = (await client.get(METAL_HOSTS, name))["status"]
    return any((each["type"], each["status"]) == ("Ready", "True") for each in status["conditions"])


async def test_host_that_dies_with_an_inspection_is_replaced(
    cluster: Cluster, client: Client, metal_host: StartMetalHost, stack: AsyncExitStack
) -> None:
    dying = FakeMetalAgent(client, "mute-1", 64 * GIB, lease_seconds=4, inspects={})
    await stack.enter_async_context(dying.running())
    await eventually(lambda: is_live(client, "mute-1"))
    await cluster.apply(cluster.model(**METAL))

    async def asked() -> list[str]:
        found = await client.list(METAL_PROCESSES, cluster.namespace)
        return [each["spec"]["hostName"] for each in found.items]

    async def is_asked() -> bool:
        return await asked() == ["mute-1"]

    await eventually(is_asked)
    role = await client.get(ROLES, "grants:mute-1", HOSTS_NAMESPACE)
    assert cluster.namespace not in str(role), "an inspection grants nothing"
    await metal_host("studio-1")
    dying.silent = True
    assert (await wait_for_reason(cluster, "Inspected")).status.inspected_by == "studio-1"
    dying.silent, dying.inspects = False, {"file": "thief.gguf", "sizeBytes": 1, "format": "gguf"}
    await eventually(lambda: is_live(client, "mute-1"))

    async def is_over() -> bool:
        return await asked() == []

    await eventually(is_over)
    assert (await wait_for_reason(cluster, "Inspected")).status.file == "tiny.gguf"


async def test_report_that_contradicts_the_model_is_refused(
    cluster: Cluster, client: Client, metal_host: StartMetalHost, stack: AsyncExitStack
) -> None:
    report = {"file": "tiny.gguf", "sizeBytes": 5, "format": "gguf", "sha256": "cd" * 32}
    lying = FakeMetalAgent(client, "liar-1", 64 * GIB, inspects=report)
    await stack.enter_async_context(lying.running())
    await eventually(lambda: is_live(client, "liar-1"))
    await cluster.apply(cluster.model(sha256="ab" * 32, **METAL))
    refused = await wait_for_reason(cluster, "ReportRefused")
    assert "host liar-1 sent a report that cannot be used: sha256 cdcd" in message_of(refused)
    await metal_host("studio-1")
    found = await wait_for_reason(cluster, "Inspected")
    assert (found.status.inspected_by, found.status.sha256) == ("studio-1", "ab" * 32)


async def test_inspection_goes_on_after_the_agent_is_killed(cluster: Cluster, host: MetalHost) -> None:
    cluster.files.latency_seconds = 600.0
    await cluster.apply(cluster.model(**METAL))

    async def reading() -> bool:
        return [each.status.phase for each in await cluster.processes()] == ["Fetching"]

    await eventually(reading)
    await host.agent.kill()
    cluster.files.latency_seconds = 0.0
    host.agent.start()
    assert (await wait_for_reason(cluster, "Inspected")).status.inspected_by == "studio-1"


@pytest.mark.usefixtures("host")
async def test_pods_get_nothing_by_the_report_of_a_host(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(**METAL), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    await cluster.apply(cluster.service("in-pods", "cpu"))
    held = await wait_for_reason(cluster, "NoImage", "Cached")
    assert held.status.inspected_by == "studio-1"
    ready = find(held.status.conditions, "Ready")
    assert ready is not None
    assert ready.status == "True"
    assert await cluster.names(PVCS) == await cluster.names(PODS) == []
    assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
