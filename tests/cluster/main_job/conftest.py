"""Fixtures of all tests of the main job: one node, the controller, a file server, and a namespace.

Nothing is scripted: controller, agents, kubelet and engines are the real processes, under their own identities.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kube.client import Client
from tests.cluster.conftest import HUB_PORT, StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster
from tests.controlplane.members import MetalHost
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.file_server import FileServer
from tests.support.tiny_models import tiny_gguf


@pytest_asyncio.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    """A file server and hub that pods and hosts can reach.

    It has tiny.gguf, other.gguf with another answer, loop.gguf, hostile.gguf.
    """
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "tiny.gguf")
    tiny_gguf.write(root / "other.gguf", text="Another model speaks now.")
    tiny_gguf.write(root / "loop.gguf", loop=True, n_ctx=65536)
    # The header claims 2**62 metadata entries, and the file ends there.
    (root / "hostile.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\0" * 8 + (2**62).to_bytes(8, "little"))
    async with FileServer(root, address=ADDRESS, port=HUB_PORT) as server:
        yield server


@pytest.fixture(autouse=True)
def cluster_members(node: Process, files: FileServer, controller: Process) -> None:
    """A node, the file server and the controller, for every test here; a test adds hosts."""
    del node, files, controller  # requested only to be started, `files` first: it may set the environment


@pytest.fixture
def cluster(plane: ControlPlane, client: Client, namespace: str, files: FileServer, tmp_path: Path) -> Cluster:
    """A namespace, and files for Models."""
    return Cluster(plane, client, namespace, files, tmp_path)


@pytest_asyncio.fixture
async def host(metal_host: StartMetalHost) -> MetalHost:
    """The host `studio-1`, with memory for many replicas."""
    return await metal_host("studio-1", f"--memory-budget={64 * GIB}")
