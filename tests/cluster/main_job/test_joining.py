"""A standalone machine joins a cluster: the same files are applied there, and nothing is loaded again."""

import sys
from pathlib import Path

import psutil
import yaml

from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster
from tests.controlplane.process import Process
from tests.support.eventually import eventually


async def test_process_of_pomona_up_joins_the_cluster_without_reloading(
    cluster: Cluster, metal_host: StartMetalHost, watched: list[Process], tmp_path: Path
) -> None:
    # The budget fits one engine: a second engine of the same model could not even start.
    host = await metal_host("studio-1", f"--memory-budget={GIB}")
    await host.agent.stop()
    objects = [cluster.model(memoryBytes=GIB), cluster.service("chat", "metal")]
    manifest = tmp_path / "chat.yaml"
    manifest.write_text(yaml.safe_dump_all(objects))
    argv = [*host.host.exec, sys.executable, "-m", "cli.main", "up", str(manifest), f"--state-dir={host.state_folder}"]
    alone = Process("up", argv, tmp_path / "up.log")
    watched.append(alone)
    alone.start()

    await eventually(lambda: "chat: Ready" in alone.tail(20))
    before = await engine(cluster)

    host.agent.start()
    assert await alone.wait() == 0
    assert "handed over" in alone.tail(5)
    await eventually(lambda: has_room(cluster, GIB))
    assert await engine(cluster) == before, "it waits for the cluster to claim it"

    await cluster.apply(*objects)
    await cluster.ready("chat")
    assert await engine(cluster) == before
    process = await cluster.process("chat")
    assert (process.status.pid, process.status.restarts) == (before.pid, None)
    answer = await cluster.ask("chat")
    assert (answer.status, answer.text.startswith("Hello")) == (200, True)


async def engine(cluster: Cluster) -> psutil.Process:
    (process,) = await cluster.engines("chat")
    return process


async def has_room(cluster: Cluster, size_bytes: int) -> bool:
    """Return whether the host has `size_bytes` available, among them the memory of an engine that is not claimed."""
    return (await cluster.host("studio-1")).status.available_bytes == size_bytes
