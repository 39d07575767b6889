"""Weights of an S3 service with a Secret, and weights that are on a claim already: from applied files to tokens."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from controller.models.source_secret import TYPE
from kube.client import Obj
from kube.resources import JOBS, PODS, PVCS, SECRETS, Resource
from tests.cluster.main_job.cluster import Cluster
from tests.controlplane.network import ADDRESS
from tests.support.eventually import eventually
from tests.support.servers.s3 import OWNER, STRANGER, S3Server, run_s3_server

VOLUMES = Resource("", "v1", "persistentvolumes", "PersistentVolume", namespaced=False)
CLAIM: Obj = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "weights"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
}


@pytest_asyncio.fixture
async def s3(tmp_path: Path, cluster: Cluster) -> AsyncIterator[S3Server]:
    """An S3 service where pods reach it, with models/llama/tiny.gguf."""
    async with run_s3_server(tmp_path / "s3", address=ADDRESS) as server:
        await server.make_bucket("models")
        await server.put("models", "llama/tiny.gguf", (cluster.files.root / "tiny.gguf").read_bytes(), with_digest=True)
        yield server


def bucket_secret(server: S3Server, keys: tuple[str, str]) -> Obj:
    data = server.environment(keys)
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bucket"}, "type": TYPE, "stringData": data}


async def test_object_of_a_bucket_is_served_with_the_keys_of_a_secret(cluster: Cluster, s3: S3Server) -> None:
    model = cluster.model(source="s3://models/llama/tiny.gguf", sourceSecretRef={"name": "bucket"})
    await cluster.apply(bucket_secret(s3, STRANGER), model, cluster.service("chat", "cpu"))
    refused = await cluster.wait_for_model("tiny", "Ready", "SourceUnauthorized")
    message = next(condition.message for condition in refused.status.conditions if condition.type == "Ready")
    assert "s3://models/llama/tiny.gguf: access denied: the keys may not read it: allow them s3:GetObject" in message

    await cluster.apply(bucket_secret(s3, OWNER))

    async def list_jobs() -> list[Obj]:
        return (await cluster.client.list(JOBS, cluster.namespace)).items

    assert OWNER[1] not in str(await eventually(list_jobs))
    # The controller may replace the failed one at this moment.
    await cluster.kubectl("delete", "jobs", "--all")
    await cluster.ready("chat")
    assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
    found = await cluster.wait_for_model("tiny", "Cached", "Fetched")
    assert found.status.sha256
    secret = await cluster.client.get(SECRETS, "bucket", cluster.namespace)
    for value in secret["data"].values():
        assert value not in str(found)


async def bind_claim(cluster: Cluster) -> Path:
    """Apply `CLAIM`, and return the folder of the volume that it is bound to."""
    await cluster.apply(CLAIM)

    async def bound() -> str:
        claim = await cluster.client.get(PVCS, "weights", cluster.namespace)
        name: str = claim["spec"]["volumeName"]
        return name

    volume = await cluster.client.get(VOLUMES, await eventually(bound))
    return Path(volume["spec"]["hostPath"]["path"])


async def test_weights_on_a_claim_are_served_from_it_without_a_fetch(cluster: Cluster) -> None:
    folder = await bind_claim(cluster) / "llama"
    folder.mkdir(parents=True)
    (folder / "tiny model.gguf").write_bytes((cluster.files.root / "tiny.gguf").read_bytes())
    source = "pvc://weights/llama/tiny%20model.gguf"
    await cluster.apply(cluster.model(source=source), cluster.service("chat", "cpu"))
    await cluster.ready("chat")
    assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
    model = await cluster.wait_for_model("tiny", "Cached", "OnVolume")
    assert model.status.gguf is not None
    assert model.status.gguf.architecture == "llama"
    assert [name.partition("-inspect-")[0] for name in await cluster.names(JOBS)] == ["tiny"]
    assert await cluster.names(PVCS) == ["weights"]


@pytest.mark.parametrize("path", ["tiny.gguf", ""])
async def test_claim_that_is_absent_is_named_until_it_is_there(cluster: Cluster, path: str) -> None:
    await cluster.apply(cluster.model(source=f"pvc://absent/{path}"))
    model = await cluster.wait_for_model("tiny", "Ready", "ClaimNotReady")
    message = next(condition.message for condition in model.status.conditions if condition.type == "Ready")
    assert message.startswith("PersistentVolumeClaim absent of spec.source cannot be mounted: ")
    assert message.endswith(f"kubectl -n {cluster.namespace} describe pvc absent")
    assert model.status.phase == "Pending"


async def test_source_does_not_reveal_the_keys_of_its_secret(cluster: Cluster, s3: S3Server) -> None:
    model = cluster.model(source="s3://models/$(AWS_SECRET_ACCESS_KEY).gguf", sourceSecretRef={"name": "bucket"})
    await cluster.apply(bucket_secret(s3, OWNER), model)
    failed = await cluster.wait_for_model("tiny", "Ready", "SourceNotFound")
    assert OWNER[1] not in str(failed)
    (pod,) = (await cluster.client.list(PODS, cluster.namespace)).items
    assert OWNER[1] not in str(pod)
