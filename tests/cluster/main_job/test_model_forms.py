"""Models of several files: inspected and fetched by Jobs, and served by pods and hosts."""

import msgspec
import pytest

from controller.reconcile.conditions import find
from crds.model import Model
from kube.resources import MODELS, PVCS
from tests.cluster.main_job.cluster import PATHS, READY_SECONDS, Cluster
from tests.support.eventually import eventually
from tests.support.file_server import COMMIT
from tests.support.tiny_models import tiny_mlx, tiny_split


async def wait_for_model(cluster: Cluster, name: str, condition: str, reason: str) -> Model:
    """Wait until a condition of the Model has this reason."""

    async def reached() -> Model:
        found = msgspec.convert(await cluster.client.get(MODELS, name, cluster.namespace), Model)
        about = find(found.status.conditions, condition)
        assert about is not None, found.status
        assert about.reason == reason, found.status
        return found

    return await eventually(reached, READY_SECONDS)


@pytest.mark.usefixtures("host")
async def test_split_model_of_a_pattern_is_served_on_both_paths(cluster: Cluster) -> None:
    parts = tiny_split.write(cluster.files.root / "acme" / "split" / "F32")
    weights = cluster.model("split", source="hf://acme/split", files=["F32/*.gguf"])
    services = [cluster.service(f"by-{path}", PATHS[path], modelRef="split") for path in PATHS]
    await cluster.apply(weights, *services)
    await cluster.ready("by-pod", "by-host")
    for service in ("by-pod", "by-host"):
        assert (await cluster.ask(service)).text.startswith("Hello from a tiny model")

    found = await wait_for_model(cluster, "split", "Cached", "Fetched")
    assert (found.status.format, found.status.revision, found.status.file) == ("gguf", COMMIT, parts[0].name)
    assert found.status.size_bytes == sum(path.stat().st_size for path in parts)
    assert found.status.cached is not None
    assert found.status.cached.path.endswith(f"/{parts[0].name}")
    assert (await cluster.process("by-host")).spec.artifact.files == ["F32/*.gguf"]


async def test_folder_of_safetensors_is_fetched_for_pods_and_that_of_mlx_is_not(cluster: Cluster) -> None:
    for name, written_for in (("tensors", "pt"), ("mlx", "mlx")):
        folder = cluster.files.root / "acme" / name
        tiny_mlx.write(folder, written_for=written_for)
        (folder / "pytorch_model.bin").write_bytes(b"another copy")
        await cluster.apply(
            cluster.model(name, source=f"hf://acme/{name}"), cluster.service(name, "cpu", modelRef=name, extraArgs=[])
        )
    found = await wait_for_model(cluster, "tensors", "Cached", "Fetched")
    assert (found.status.format, found.status.file, found.status.phase) == ("safetensors", "", "Ready")
    assert found.status.total_parameters is not None
    assert found.status.cached is not None
    assert "/" not in found.status.cached.path
    assert not cluster.files.seen(".bin")

    found = await wait_for_model(cluster, "mlx", "Cached", "NoConsumers")
    assert found.status.format == "mlx"
    await cluster.wait_for_phase("mlx", "Failed", "InvalidSpec")
    assert await cluster.names(PVCS) == ["tensors-cache"]
