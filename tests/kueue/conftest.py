"""A control plane with the real Kueue, and the controller on it: `make test-kueue`."""

from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest
import pytest_asyncio

from kube import credentials
from kube.client import Client, connect
from tests.cluster.queue.conftest import engine
from tests.cluster.queue.queue_user import QueueUser
from tests.controlplane import binaries, members, sandbox
from tests.controlplane.kueue import APISERVER_OPTIONS, Kueue
from tests.controlplane.network import Network
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.namespaces import open_namespace
from tests.support.simulated_nodes import GPU, SimulatedNodes

__all__ = ["engine"]
"""Fixture of the tests of the controller's own queue; the port of the controller's metrics must be free for it."""
KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
TAIL_LINES = 30
PROCESSES = pytest.StashKey[list[Process]]()


def pytest_configure() -> None:
    """Refuse to start outside of the sandbox."""
    if not sandbox.inside():
        raise pytest.UsageError("tests/kueue needs the sandbox: run `make test-kueue`, with ARGS=... for pytest")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the ends of the logs below a failed test."""
    report = yield
    if report.failed:
        for process in item.config.stash.get(PROCESSES, []):
            report.sections.append((f"log of {process.name}", process.tail(TAIL_LINES)))
    return report


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kueue")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plane(folder: Path) -> AsyncIterator[ControlPlane]:
    """A control plane with Pomona's kinds and roles."""
    await Network().start()
    plane = ControlPlane(binaries.ensure_binaries(), folder / "plane", *APISERVER_OPTIONS)
    try:
        await plane.start()
        await members.install(plane)
        await plane.collect_new_kinds()
        yield plane
    finally:
        await plane.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def kueue(request: pytest.FixtureRequest, plane: ControlPlane, folder: Path) -> AsyncIterator[Kueue]:
    """Kueue, ready."""
    kueue = Kueue(plane, folder)
    request.config.stash.setdefault(PROCESSES, []).append(kueue.process)
    await kueue.install()
    async with kueue.running():
        yield kueue


@pytest_asyncio.fixture
async def client(plane: ControlPlane) -> AsyncIterator[Client]:
    """The API, as cluster administrator."""
    async with connect(credentials.load(plane.kubeconfig())) as client:
        yield client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def controller(
    request: pytest.FixtureRequest, plane: ControlPlane, kueue: Kueue, folder: Path
) -> AsyncIterator[Process]:
    """The controller, which finds Kueue when it starts."""
    del kueue
    controller = await members.controller(plane, folder, "--metrics-bind-address=0")
    request.config.stash.setdefault(PROCESSES, []).append(controller)
    controller.start()
    yield controller
    await controller.kill()


@pytest_asyncio.fixture
async def simulated(plane: ControlPlane, client: Client) -> AsyncIterator[SimulatedNodes]:
    """Nodes to which a test adds."""
    async with SimulatedNodes(plane, client).running() as nodes:
        yield nodes


@pytest_asyncio.fixture
async def user(
    plane: ControlPlane, client: Client, simulated: SimulatedNodes, controller: Process, engine: None
) -> AsyncIterator[QueueUser]:
    """A user of one namespace, whose services are gone before the nodes are."""
    del simulated, engine
    async with open_namespace(plane) as namespace:
        user = QueueUser(plane, client, namespace, controller)
        await user.make_model()
        yield user
        await user.delete_services()
        await plane.request("DELETE", f"{KUEUE}/clusterqueues/{namespace}", accept={404})


async def make_queue(plane: ControlPlane, namespace: str, devices: int) -> str:
    """Make LocalQueue `models` of a namespace and a ClusterQueue with this many GPUs; return the path of the latter."""
    # A pod that requests what its ClusterQueue has no quota for is never admitted.
    quotas = {GPU: devices, "cpu": 100, "memory": "1Ti", "ephemeral-storage": "1Ti"}
    resources = [{"name": name, "nominalQuota": quota} for name, quota in quotas.items()]
    group = {"coveredResources": [*quotas], "flavors": [{"name": "default", "resources": resources}]}
    everywhere: dict[str, object] = {}
    cluster_queue = {"namespaceSelector": everywhere, "resourceGroups": [group]}
    for kind, path, name, spec in (
        ("ResourceFlavor", "resourceflavors", "default", everywhere),
        ("ClusterQueue", "clusterqueues", namespace, cluster_queue),
        ("LocalQueue", f"namespaces/{namespace}/localqueues", "models", {"clusterQueue": namespace}),
    ):
        obj = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}, "spec": spec}
        await plane.request("POST", f"{KUEUE}/{path}", obj, accept={409})
    return f"{KUEUE}/clusterqueues/{namespace}"
