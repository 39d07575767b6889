"""Models of several files: inspected and fetched by Jobs, and served by pods and hosts."""

import pytest

from kube.resources import PVCS
from tests.cluster.main_job.cluster import PATHS, Cluster
from tests.support.file_server import COMMIT
from tests.support.tiny_models import tiny_mlx, tiny_split


@pytest.mark.usefixtures("host")
async def test_split_model_of_a_pattern_is_served_on_both_paths(cluster: Cluster) -> None:
    parts = tiny_split.write(cluster.files.root / "acme" / "split" / "F32")
    weights = cluster.model("split", source="hf://acme/split", files=["F32/*.gguf"])
    services = [cluster.service(f"by-{path}", PATHS[path], modelRef="split") for path in PATHS]
    await cluster.apply(weights, *services)
    await cluster.ready("by-pod", "by-host")
    for service in ("by-pod", "by-host"):
        assert (await cluster.ask(service)).text.startswith("Hello from a tiny model")

    model = await cluster.wait_for_model("split", "Cached", "Fetched")
    assert (model.status.format, model.status.revision, model.status.file) == ("gguf", COMMIT, parts[0].name)
    assert model.status.size_bytes == sum(path.stat().st_size for path in parts)
    assert model.status.cached is not None
    assert model.status.cached.path.endswith(f"/{parts[0].name}")
    assert (await cluster.process("by-host")).spec.artifact.files == ["F32/*.gguf"]


async def serve_folder(cluster: Cluster, name: str, written_for: str) -> None:
    """Apply a Model of a folder at the hub, and a service of it in pods."""
    folder = cluster.files.root / "acme" / name
    tiny_mlx.write(folder, written_for=written_for)
    (folder / "pytorch_model.bin").write_bytes(b"another copy")
    service = cluster.service(name, "cpu", modelRef=name, extraArgs=[])
    await cluster.apply(cluster.model(name, source=f"hf://acme/{name}"), service)


async def test_folder_of_safetensors_is_fetched_for_pods(cluster: Cluster) -> None:
    await serve_folder(cluster, "tensors", "pt")
    model = await cluster.wait_for_model("tensors", "Cached", "Fetched")
    assert (model.status.format, model.status.file, model.status.phase) == ("safetensors", "", "Ready")
    assert model.status.total_parameters is not None
    assert model.status.cached is not None
    assert "/" not in model.status.cached.path
    assert not cluster.files.seen(".bin")


async def test_folder_of_mlx_is_not_fetched_for_pods(cluster: Cluster) -> None:
    await serve_folder(cluster, "mlx", "mlx")
    model = await cluster.wait_for_model("mlx", "Cached", "NoConsumers")
    assert model.status.format == "mlx"
    await cluster.wait_for_phase("mlx", "Failed", "InvalidSpec")
    assert await cluster.names(PVCS) == []
