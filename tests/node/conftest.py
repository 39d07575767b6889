"""Two nodes with a real kubelet, the controller as a pod on them, and a file server: `make test-node`.

One control plane and both nodes serve all tests. Logs stay in build/nodes/ while a run lasts; a failed test prints the
ends of those that matter.
"""

from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest
import pytest_asyncio

from crds.meta import HOSTS_NAMESPACE
from kube import credentials
from kube.client import Client, Obj, connect
from kube.resources import LEASES, METAL_HOSTS, NODES
from tests.cluster.main_job.cluster import Cluster
from tests.controlplane import binaries, members, sandbox
from tests.controlplane.helm import CHART, run_helm
from tests.controlplane.members import MetalHost
from tests.controlplane.network import ADDRESS, Network
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.node import preparation
from tests.node.__main__ import NODES as FOLDER
from tests.node.preparation import POMONA
from tests.node.real_node import RealNode
from tests.support.eventually import eventually
from tests.support.file_server import ALLOWED_NETWORKS, FileServer
from tests.support.namespaces import open_namespace
from tests.support.tiny_models import tiny_gguf

START_SECONDS = 180.0
"""Limit for a node or the controller on it to become ready. No claim about speed."""
SHARED = "shared"
"""StorageClass of volumes that each node can mount, and that are made by hand."""
ENDLESS_TOKENS = 1 << 17
"""Length of an answer of loop.gguf, which no test waits for."""
TAIL_LINES = 25
PROCESSES = pytest.StashKey[list[Process]]()


def pytest_configure() -> None:
    """Refuse to start outside of the sandbox of root."""
    if not sandbox.inside():
        raise pytest.UsageError("tests/node needs the sandbox of root: run `make test-node`, with ARGS=... for pytest")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the ends of the logs below a failed test."""
    report = yield
    if report.failed:
        for process in item.config.stash.get(PROCESSES, []):
            report.sections.append((f"log of {process.name}", process.tail(TAIL_LINES)))
        for log in sorted(FOLDER.rglob("logs/**/*.log")):
            report.sections.append((str(log), "\n".join(log.read_text().splitlines()[-TAIL_LINES:])))
    return report


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def network() -> Network:
    network = Network()
    await network.start()
    # `ip netns add` mounts its folder anew the first time; mounts of containerd from before could not be removed.
    await network.add_host("first")
    return network


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plane(network: Network) -> AsyncIterator[ControlPlane]:
    """A control plane; Pomona is installed on it once there are nodes."""
    del network
    plane = ControlPlane(binaries.ensure_binaries(), FOLDER / "plane")
    try:
        await plane.start()
        yield plane
    finally:
        await plane.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nodes(request: pytest.FixtureRequest, plane: ControlPlane) -> AsyncIterator[dict[str, RealNode]]:
    """Two nodes, ready."""
    kubelet, archives = preparation.ensure_kubelet(), preparation.ensure_images()
    nodes = {name: RealNode(plane, name, FOLDER, kubelet) for name in ("cpu-1", "cpu-2")}
    watched = request.config.stash.setdefault(PROCESSES, [])

    async def ready(name: str) -> bool:
        node = await plane.request("GET", NODES.path(None, name))
        conditions = {condition["type"]: condition["status"] for condition in node["status"]["conditions"]}
        return conditions["Ready"] == "True" and "taints" not in node["spec"]

    try:
        for node in nodes.values():
            watched += [node.containerd, node.kubelet]
            await node.start(archives)
        for name in nodes:
            await eventually(lambda name=name: ready(name), START_SECONDS)  # type: ignore[misc]
        yield nodes
    finally:
        for node in nodes.values():
            await node.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session", autouse=True)
async def pomona(plane: ControlPlane, nodes: dict[str, RealNode]) -> None:
    """Pomona, installed by its chart, with both replicas of its controller ready on the nodes."""
    del nodes
    repository, _, tag = POMONA.rpartition(":")
    networks = ",".join(map(str, ALLOWED_NETWORKS))
    image = (f"--set=image.repository={repository}", f"--set-string=image.tag={tag}")
    sources = f"--set=models.allowPrivateSources={{{networks}}}"
    await run_helm("install", "pomona", str(CHART), "--create-namespace", "--wait", *image, sources, plane=plane)
    await members.wait_for_kinds(plane)
    await plane.collect_new_kinds()


@pytest_asyncio.fixture(scope="session", loop_scope="session", autouse=True)
async def volumes(plane: ControlPlane) -> None:
    """Volumes as those of a file server that lets each user write, and that each node mounts."""
    storage_class = {"metadata": {"name": SHARED}, "provisioner": "kubernetes.io/no-provisioner"}
    await plane.request("POST", "/apis/storage.k8s.io/v1/storageclasses", storage_class)
    for number in range(8):
        folder = FOLDER / "volumes" / str(number)
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        spec: Obj = {
            "capacity": {"storage": "1Ti"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "storageClassName": SHARED,
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(folder)},
        }
        volume = {"metadata": {"name": f"{SHARED}-{number}"}, "spec": spec}
        await plane.request("POST", "/api/v1/persistentvolumes", volume)


@pytest_asyncio.fixture
async def client(plane: ControlPlane) -> AsyncIterator[Client]:
    async with connect(credentials.load(plane.kubeconfig())) as client:
        yield client


@pytest_asyncio.fixture
async def namespace(plane: ControlPlane) -> AsyncIterator[str]:
    async with open_namespace(plane) as name:
        yield name


@pytest_asyncio.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "tiny.gguf")
    tiny_gguf.write(root / "loop.gguf", loop=True, n_ctx=ENDLESS_TOKENS)
    async with FileServer(root, address=ADDRESS) as server:
        yield server


@pytest.fixture
def cluster(plane: ControlPlane, client: Client, namespace: str, files: FileServer, tmp_path: Path) -> Cluster:
    """A namespace of a cluster with Pomona, and files for Models."""
    return Cluster(plane, client, namespace, files, tmp_path)


@pytest_asyncio.fixture
async def host(plane: ControlPlane, network: Network, tmp_path: Path) -> AsyncIterator[MetalHost]:
    """A host outside of the nodes, with its agent."""
    host = await members.metal_host(plane, network, "studio-1", tmp_path, f"--memory-budget={64 << 30}")
    host.agent.start()
    yield host
    await host.agent.stop()
    await host.host.close()
    # The host of the next test has the same name, and would wait until this Lease has expired.
    for kind, place in ((METAL_HOSTS, None), (LEASES, HOSTS_NAMESPACE)):
        await plane.request("DELETE", kind.path(place, host.name), accept={404})
