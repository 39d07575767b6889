"""Models on a real control plane: the controller as its own ServiceAccount, real Jobs, real sources."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from controller.models import source_secret
from controller.reconcile.conditions import find
from crds.meta import GROUP, LABEL_MANAGED_BY, MANAGED_BY, Condition
from crds.model import Model
from kube.client import Client, Obj
from kube.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    JOBS,
    MODELS,
    PVCS,
    SECRETS,
    STORAGE_CLASSES,
    Resource,
)
from tests.controlplane.network import ADDRESS
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.tiny_models import tiny_gguf

pytestmark = pytest.mark.usefixtures("node", "controller")


@pytest_asyncio.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    """A file server with tiny.gguf and other.gguf, where pods reach it."""
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "tiny.gguf")
    tiny_gguf.write(root / "other.gguf", n_embd=32, name="other")
    async with FileServer(root, address=ADDRESS) as server:
        yield server


class ModelNamespace:
    """One namespace, as a user handles it."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    async def make(self, resource: Resource, name: str, **body: Any) -> Obj:
        return await self.client.create(resource, {"metadata": {"name": name, "namespace": self.namespace}, **body})

    async def make_model(self, source: str, **spec: Any) -> None:
        await self.make(MODELS, "tiny", spec={"source": source, **spec})

    async def make_consumer(self) -> None:
        await self.make(INFERENCE_SERVICES, "chat", spec={"modelRef": "tiny", "replicas": 0})

    async def edit(self, resource: Resource, name: str, path: str, value: object) -> None:
        await self.client.patch_json(resource, name, self.namespace, [{"op": "add", "path": path, "value": value}])

    async def model(self) -> Model:
        return msgspec.convert(await self.client.get(MODELS, "tiny", self.namespace), Model)

    async def phase(self, phase: str) -> Model:
        """Wait until the model is in this phase, decided for its present spec."""

        async def reached() -> Model:
            model = await self.model()
            assert model.status.observed_generation == model.metadata.generation
            assert model.status.phase == phase, model.status
            return model

        return await eventually(reached)

    async def cached(self) -> Model:
        async def reached() -> Model:
            model = await self.model()
            assert condition(model, "Cached").status == "True", model.status
            return model

        return await eventually(reached)

    async def jobs(self) -> list[str]:
        return [job["metadata"]["name"] for job in (await self.client.list(JOBS, self.namespace)).items]


@pytest.fixture
def cluster(client: Client, namespace: str) -> ModelNamespace:
    return ModelNamespace(client, namespace)


def condition(model: Model, kind: str) -> Condition:
    reported = find(model.status.conditions, kind)
    assert reported is not None, model.status
    return reported


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def test_a_model_is_inspected_and_fetched_only_when_pods_need_it(
    cluster: ModelNamespace, files: FileServer
) -> None:
    weights = files.root / "tiny.gguf"
    await cluster.make_model(f"{files.url}/tiny.gguf", sha256=sha256(weights))
    model = await cluster.phase("Ready")
    assert condition(model, "Ready").reason == "Inspected"
    assert condition(model, "Cached").reason == "NoConsumers"
    assert model.status.gguf is not None
    assert model.status.gguf.architecture == "llama"
    assert model.status.size_bytes == weights.stat().st_size
    assert (await cluster.client.list(PVCS, cluster.namespace)).items == []

    await cluster.make_consumer()
    model = await cluster.cached()
    assert model.status.phase == "Ready"
    assert await fetched(cluster, model) == weights.read_bytes()


async def fetched(cluster: ModelNamespace, model: Model) -> bytes:
    """Return the content of the file at the path that the condition names, from the volume."""
    claim = await cluster.client.get(PVCS, "tiny-cache", cluster.namespace)
    volume = await cluster.client.get(VOLUMES, claim["spec"]["volumeName"])
    path = condition(model, "Cached").message.partition(",")[0].rpartition("/models/")[2]
    return (Path(volume["spec"]["hostPath"]["path"]) / path).read_bytes()


VOLUMES = Resource("", "v1", "persistentvolumes", "PersistentVolume", namespaced=False)


async def test_secret_that_its_owner_did_not_give_to_sources_is_never_sent(
    cluster: ModelNamespace, files: FileServer
) -> None:
    files.token = "open-sesame"
    await cluster.make(SECRETS, "hub", stringData={"token": "open-sesame"})
    await cluster.make_model(f"{files.url}/tiny.gguf", sourceSecretRef={"name": "hub"})

    async def told() -> bool:
        return condition(await cluster.model(), source_secret.ACCEPTED).reason == "SecretNotMarked"

    await eventually(told)
    message = condition(await cluster.model(), "Ready").message
    assert (files.requests, await cluster.jobs()) == ([], [])

    way_out = message[message.index("kubectl ") :].split()
    assert way_out[3:] == ["label", "secret", "hub", "inference.pomona.dev/source=true"]
    await cluster.edit(SECRETS, "hub", "/metadata/labels", {source_secret.LABEL: "true"})
    await cluster.phase("Ready")
    assert condition(await cluster.model(), source_secret.ACCEPTED).status == "True"


async def test_volume_that_cannot_grow_is_replaced_and_stays_while_it_is_mounted(
    cluster: ModelNamespace, files: FileServer
) -> None:
    name = f"{cluster.namespace}-fixed"
    body = {"provisioner": "kubernetes.io/host-path", "allowVolumeExpansion": False}
    await cluster.client.create(STORAGE_CLASSES, {"metadata": {"name": name}, **body})
    await cluster.make_model(f"{files.url}/tiny.gguf", cache={"storageClassName": name, "size": "1Gi"})
    await cluster.make_consumer()
    await cluster.cached()
    labels = {LABEL_MANAGED_BY: MANAGED_BY, "app": "serves"}
    volumes = [{"name": "models", "persistentVolumeClaim": {"claimName": "tiny-cache"}}]
    pod = {"containers": [{"name": "main", "image": "pomona-test"}], "volumes": volumes}
    template = {"metadata": {"labels": {"app": "serves"}}, "spec": pod}
    spec = {"replicas": 0, "selector": {"matchLabels": {"app": "serves"}}, "template": template}
    metadata = {"name": "serves", "namespace": cluster.namespace, "labels": labels}
    await cluster.client.create(DEPLOYMENTS, {"metadata": metadata, "spec": spec})
    await cluster.edit(MODELS, "tiny", "/spec/cache/size", "2Gi")

    async def replaced() -> str:
        model = await cluster.phase("Ready")
        assert model.status.cached is not None
        assert model.status.cached.name.startswith("tiny-cache-"), model.status
        assert condition(model, "VolumeChanging").reason == "VolumeReplaced"
        return model.status.cached.name

    name = await eventually(replaced)
    claims = {item["metadata"]["name"] for item in (await cluster.client.list(PVCS, cluster.namespace)).items}
    assert claims == {"tiny-cache", name}

    await cluster.client.delete(DEPLOYMENTS, "serves", cluster.namespace)

    async def released() -> bool:
        claims = (await cluster.client.list(PVCS, cluster.namespace)).items
        assert [claim["metadata"]["name"] for claim in claims] == [name]
        return find((await cluster.model()).status.conditions, "VolumeChanging") is None

    await eventually(released)


async def test_discovery_labels_follow_the_spec_and_leave_those_of_users_alone(
    cluster: ModelNamespace, files: FileServer
) -> None:
    users = {"team": "red", f"{GROUP}/domain-law": "ours"}
    spec = {"source": f"{files.url}/tiny.gguf", "domains": ["code", "law"], "capabilities": ["chat"], "thinking": True}
    metadata = {"name": "tiny", "namespace": cluster.namespace, "labels": users}
    await cluster.client.create(MODELS, {"metadata": metadata, "spec": spec})

    async def labels(*absent: str, **values: str) -> bool:
        present = (await cluster.client.get(MODELS, "tiny", cluster.namespace))["metadata"]["labels"]
        assert users.items() <= present.items(), present
        assert not {f"{GROUP}/{name}" for name in absent} & present.keys(), present
        wanted = {f"{GROUP}/{name.replace('_', '-')}": value for name, value in values.items()}
        return all(present.get(name) == value for name, value in wanted.items())

    await cluster.phase("Ready")
    await eventually(
        lambda: labels(domain_code="true", capability_chat="true", vram_tier_8_g="true", model_type="DenseThinking")
    )
    generation = (await cluster.model()).metadata.generation
    await cluster.edit(MODELS, "tiny", "/spec/domains", ["math"])
    await eventually(lambda: labels("domain-code", domain_math="true"))
    assert (await cluster.model()).metadata.generation == generation + 1, "labels are no news to the Model"

    patch = [{"op": "remove", "path": "/spec/capabilities"}]
    await cluster.client.patch_json(MODELS, "tiny", cluster.namespace, patch)
    await eventually(lambda: labels("capability-chat", domain_math="true"))


async def test_changed_file_is_fetched_beside_the_earlier_one(cluster: ModelNamespace, files: FileServer) -> None:
    await cluster.make_model(f"{files.url}/tiny.gguf", refreshPolicy="OnChange")
    await cluster.make_consumer()
    first = await cluster.cached()
    assert first.status.cached is not None
    tiny_gguf.write(files.root / "tiny.gguf", n_embd=32, name="newer")
    earlier = [{"op": "replace", "path": "/status/lastChecked", "value": "2026-01-01T00:00:00Z"}]
    await cluster.client.patch_json(MODELS, "tiny", cluster.namespace, earlier, subresource="status")
    await cluster.edit(MODELS, "tiny", "/metadata/annotations", {"look": "now"})

    async def refreshed() -> Model:
        model = await cluster.model()
        assert model.status.revision != first.status.revision
        assert model.status.cached is not None
        assert model.status.cached.name.startswith("tiny-cache-"), model.status
        return model

    model = await eventually(refreshed)
    assert condition(model, "Cached").status == "True"
    assert model.status.gguf is not None
    assert model.status.gguf.embedding_size == 32
    assert model.status.last_checked >= first.status.last_checked


QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")


async def limit(cluster: ModelNamespace, **hard: str) -> None:
    """Make a quota of the namespace, and wait until the API server holds it."""
    names = {name.replace("_", "."): quantity for name, quantity in hard.items()}
    await cluster.make(QUOTAS, "q", spec={"hard": names})

    async def held() -> bool:
        quota = await cluster.client.get(QUOTAS, "q", cluster.namespace)
        return bool(quota.get("status", {}).get("hard") == names)

    await eventually(held)


async def test_quota_that_refuses_the_pod_of_a_job_is_told_in_its_own_words(
    cluster: ModelNamespace, files: FileServer
) -> None:
    await limit(cluster, requests_memory="100Mi")
    await cluster.make_model(f"{files.url}/tiny.gguf")

    async def told() -> str:
        model = await cluster.model()
        assert condition(model, "Ready").reason == "FailedCreate", model.status
        return condition(model, "Ready").message

    assert "exceeded quota: q, requested: requests.memory=128Mi" in await eventually(told)
    await cluster.edit(QUOTAS, "q", "/spec/hard", {"requests.memory": "1Gi"})
    await cluster.phase("Ready")


async def test_quota_that_refuses_the_volume_is_the_reason_of_the_weights(
    cluster: ModelNamespace, files: FileServer
) -> None:
    await limit(cluster, persistentvolumeclaims="0")
    await cluster.make_model(f"{files.url}/tiny.gguf")
    await cluster.make_consumer()
    model = await cluster.phase("Failed")
    cached = condition(model, "Cached")
    assert (condition(model, "Ready").status, cached.reason) == ("True", "Forbidden")
    assert "exceeded quota: q" in cached.message

    async def told() -> bool:
        service = await cluster.client.get(INFERENCE_SERVICES, "chat", cluster.namespace)
        met = [condition for condition in service["status"]["conditions"] if condition["type"] == "ModelReady"]
        return "exceeded quota: q" in met[0]["message"]

    await eventually(told)
    await cluster.client.delete(QUOTAS, "q", cluster.namespace)
    await cluster.cached()


async def test_volume_of_a_deleted_model_stays_for_the_service_that_reads_it(
    cluster: ModelNamespace, files: FileServer
) -> None:
    await cluster.make_model(f"{files.url}/tiny.gguf")
    await cluster.make(INFERENCE_SERVICES, "chat", spec={"modelRef": "tiny"})
    await cluster.cached()

    async def owners() -> list[str]:
        claim = await cluster.client.get(PVCS, "tiny-cache", cluster.namespace)
        assert "deletionTimestamp" not in claim["metadata"]
        return [owner["kind"] for owner in claim["metadata"]["ownerReferences"]]

    async def is_shared() -> bool:
        return await owners() == ["Model", "InferenceService"]

    async def is_left() -> bool:
        return await owners() == ["InferenceService"]

    await eventually(is_shared)
    await cluster.client.delete(MODELS, "tiny", cluster.namespace)
    await eventually(is_left)
    await cluster.make_model(f"{files.url}/tiny.gguf")
    model = await cluster.cached()
    assert model.status.cached is not None
    assert model.status.cached.name != "tiny-cache"
    assert await owners() == ["InferenceService"]
    await cluster.client.delete(INFERENCE_SERVICES, "chat", cluster.namespace)

    async def is_deleted() -> bool:
        claims = await cluster.client.list(PVCS, cluster.namespace)
        return "tiny-cache" not in {claim["metadata"]["name"] for claim in claims.items}

    await eventually(is_deleted)
