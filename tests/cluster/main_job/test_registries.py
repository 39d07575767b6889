"""Weights in a registry: fetched by a Job or a host with their own logins, or mounted as an image by nodes."""

import base64
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from controller.reconcile.conditions import find
from crds.meta import GROUP
from kube.client import Obj
from kube.resources import DEPLOYMENTS, JOBS, MODELS, PODS, PVCS
from tests.cluster.main_job.cluster import PATHS, READY_SECONDS, Cluster, condition
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.registry_artifacts import Artifact, build_artifact, push
from tests.support.servers.registry import BASIC, serve_private_registry

REPOSITORY = "acme/tiny"
KEEPS_IMAGE_VOLUMES = (1, 35)
"""The version of Kubernetes from which the feature gate ImageVolume is on unless it is switched off."""
LOCKS_IMAGE_VOLUMES = (1, 36)
"""The version from which it cannot be switched off."""


@pytest_asyncio.fixture
async def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The URL of a private registry, without TLS as the operator allows it."""
    async with serve_private_registry(tmp_path / "registry", address=ADDRESS) as url:
        monkeypatch.setenv("POMONA_PLAIN_HTTP_REGISTRIES", url.removeprefix("http://"))
        yield url


@pytest.fixture
def files(registry: str, files: FileServer) -> FileServer:
    """The file server, after the registry: controller and agents start with its name in their environment."""
    del registry
    return files


@pytest.fixture
def artifact(files: FileServer) -> Artifact:
    return build_artifact({"tiny.gguf": (files.root / "tiny.gguf").read_bytes()})


def _model(registry: str, name: str, secret: str, **spec: object) -> Obj:
    source = f"oci://{registry.removeprefix('http://')}/{REPOSITORY}:v1"
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "Model",
        "metadata": {"name": name},
        "spec": {"source": source, "files": ["*.gguf"], "sourceSecretRef": {"name": secret}, **spec},
    }


def _secret(name: str, kind: str, labels: Mapping[str, str], **data: str) -> Obj:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": labels},
        "type": kind,
        "stringData": data,
    }


def _docker_config(registry: str) -> Obj:
    entry = {"auth": base64.b64encode(b"user:pass").decode()}
    config = json.dumps({"auths": {registry.removeprefix("http://"): entry}})
    kind = "kubernetes.io/dockerconfigjson"
    return _secret("pull", kind, {f"{GROUP}/source": "true"}, **{".dockerconfigjson": config})


@pytest.mark.usefixtures("host")
async def test_artifact_of_a_private_registry_is_served_on_both_paths(
    cluster: Cluster, registry: str, artifact: Artifact
) -> None:
    await push(registry, REPOSITORY, "v1", artifact, authorization=BASIC)
    await cluster.apply(
        _docker_config(registry),
        _secret("token", f"{GROUP}/source", {}, token="user:pass"),
        _model(registry, "for-pods", "pull"),
        _model(registry, "for-hosts", "token"),
        cluster.service("by-pod", PATHS["pod"], modelRef="for-pods"),
        cluster.service("by-host", PATHS["host"], modelRef="for-hosts"),
    )
    await cluster.ready("by-pod", "by-host")
    for service in ("by-pod", "by-host"):
        assert (await cluster.ask(service)).text.startswith("Hello from a tiny model")
    model = await cluster.client.get(MODELS, "for-pods", cluster.namespace)
    assert (model["status"]["revision"], model["status"]["file"]) == (artifact.digest, "tiny.gguf")


@pytest_asyncio.fixture
async def version(plane: ControlPlane) -> tuple[int, int]:
    """The version of the API server, major and minor."""
    answer = await plane.request("GET", "/version")
    return int(answer["major"]), int(answer["minor"])


async def _restart_with_gate(plane: ControlPlane, *, image_volumes: bool) -> AsyncIterator[None]:
    """Restart the API server with image volumes or without, for the time of a test."""
    option = f"--feature-gates=ImageVolume={str(image_volumes).lower()}"
    await plane.stop_apiserver()
    plane.apiserver.argv.append(option)
    try:
        await plane.start_apiserver()
        yield
    finally:
        await plane.stop_apiserver()
        plane.apiserver.argv.remove(option)
        await plane.start_apiserver()


@pytest_asyncio.fixture
async def image_volumes(plane: ControlPlane, version: tuple[int, int]) -> AsyncIterator[None]:
    """An API server that keeps image volumes."""
    if version >= KEEPS_IMAGE_VOLUMES:
        yield
        return
    async for _ in _restart_with_gate(plane, image_volumes=True):
        yield


@pytest_asyncio.fixture
async def no_image_volumes(plane: ControlPlane, version: tuple[int, int]) -> AsyncIterator[None]:
    """An API server that drops image volumes."""
    if version >= LOCKS_IMAGE_VOLUMES:
        pytest.skip(f"every API server of {version[0]}.{version[1]} keeps image volumes")
    if version < KEEPS_IMAGE_VOLUMES:
        yield
        return
    async for _ in _restart_with_gate(plane, image_volumes=False):
        yield


@pytest.mark.usefixtures("image_volumes")
async def test_pod_with_an_image_of_weights_is_accepted(cluster: Cluster, registry: str, artifact: Artifact) -> None:
    await cluster.kubectl("label", "namespace", cluster.namespace, "pod-security.kubernetes.io/enforce=restricted")
    await push(registry, REPOSITORY, "v1", artifact, authorization=BASIC)
    model = _model(registry, "tiny", "pull", cache={"medium": "Image"})
    await cluster.apply(_docker_config(registry), model, cluster.service("chat", PATHS["pod"]))

    async def find_pod() -> Obj:
        deployment = await cluster.client.get(DEPLOYMENTS, "chat", cluster.namespace)
        # The process kubelet mounts no images: it refuses each pod, and the next one is created.
        pod = (await cluster.client.list(PODS, cluster.namespace, label_selector=f"{GROUP}/service=chat")).items[0]
        assert pod["spec"]["volumes"][0] == deployment["spec"]["template"]["spec"]["volumes"][0]
        return pod

    pod = await eventually(find_pod, READY_SECONDS)
    image = f"{registry.removeprefix('http://')}/{REPOSITORY}@{artifact.digest}"
    assert pod["spec"]["volumes"][0] == {"name": "models", "image": {"reference": image, "pullPolicy": "IfNotPresent"}}
    assert "/models/tiny.gguf" in pod["spec"]["initContainers"][0]["args"]
    assert await cluster.names(PVCS) == []
    assert [name.split("-")[1] for name in await cluster.names(JOBS)] == ["inspect"]


@pytest.mark.usefixtures("no_image_volumes")
async def test_api_server_without_image_volumes_is_told_and_a_model_on_a_volume_is_the_way_out(
    cluster: Cluster, plane: ControlPlane, registry: str, artifact: Artifact
) -> None:
    await push(registry, REPOSITORY, "v1", artifact, authorization=BASIC)
    model = _model(registry, "tiny", "pull", cache={"medium": "Image"})
    await cluster.apply(_docker_config(registry), model, cluster.service("chat", PATHS["pod"]))

    service = await cluster.wait_for_phase("chat", "Failed", "FieldsDropped")
    told = condition(service).message
    version = (await plane.request("GET", "/version"))["gitVersion"]
    for words in (
        f"the API server {version} has dropped spec.template.spec.",
        "spec.template.spec.volumes[models].image of Deployment chat",
        "spec.cache.medium Image needs image volumes",
        "make a Model with spec.cache.medium Volume",
    ):
        assert words in told

    await cluster.apply(_model(registry, "on-a-volume", "pull"))
    await cluster.edit("chat", modelRef="on-a-volume")
    await cluster.ready("chat")
    assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
    assert find((await cluster.get("chat")).status.conditions, "Reconciled") is None
