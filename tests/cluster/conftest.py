"""One control plane for all tests of this folder, and the nodes, hosts and controller that join it for one test.

Everything runs in the sandbox: `make test-cluster`. Session fixtures run in the event loop of the session and each test
in a new loop, which works because no object here belongs to a loop.
"""

import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path

import pytest
import pytest_asyncio

from crds.meta import HOSTS_NAMESPACE
from kube import credentials, transport
from kube.client import Client, connect
from kube.resources import (
    LEASES,
    METAL_HOSTS,
    POD_MONITORS,
    SECRETS,
)
from tests.cluster.nodes import SharedNodes
from tests.cluster.shared_controller import SharedController
from tests.controlplane import binaries, members, sandbox
from tests.controlplane.members import MetalHost
from tests.controlplane.network import ADDRESS, Network
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT, Process
from tests.support.eventually import eventually
from tests.support.namespaces import open_namespace

TAIL_LINES = 30
KEPT_LOGS = CHECKOUT / "build" / "cluster-logs"

HUB_PORT = 8070
"""Port of the bridge at which a test may serve a hub: the same for all, so that they can share a controller.

A pod of an earlier test may still ask there.
"""

StartMetalHost = Callable[..., Awaitable[MetalHost]]
"""`await metal_host("studio-1", *options of pomona agent)`."""

FOLDER = pytest.StashKey[Path]()
PROCESSES = pytest.StashKey[list[Process]]()
SHARED = pytest.StashKey[SharedController]()
SHARED_NODES = pytest.StashKey[SharedNodes]()


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to start outside of a sandbox; each parallel worker runs in a separate sandbox."""
    if not sandbox.inside() and not config.getoption("sandboxes", None):
        raise pytest.UsageError("tests/cluster needs a sandbox: run `make test-cluster`, with ARGS=... for pytest")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the ends of the logs that a failed test wrote below it; keep all logs in build/cluster-logs/."""
    report = yield
    if report.failed:
        if shared := item.config.stash.get(SHARED, None):
            shared.is_suspect = True
        kept = KEPT_LOGS / re.sub(r"[^\w.-]+", "_", item.nodeid)
        for process in item.config.stash.get(PROCESSES, []):
            if process.log.exists() and process.log.stat().st_mtime >= call.start:
                report.sections.append((f"log of {process.name}", process.tail(TAIL_LINES)))
        report.sections.append(("all logs", str(kept)))
        shutil.rmtree(kept, ignore_errors=True)
        own = item.funcargs.get("tmp_path") if isinstance(item, pytest.Function) else None
        for folder in [place for place in (item.config.stash.get(FOLDER, None), own) if isinstance(place, Path)]:
            for log in folder.rglob("*.log"):
                copy = kept / log.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, copy)
    return report


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the files of the session."""
    path = tmp_path_factory.mktemp("cluster")
    request.config.stash[FOLDER] = path
    return path


@pytest.fixture(scope="session")
def watched(request: pytest.FixtureRequest) -> list[Process]:
    """Processes whose logs a failed test shows."""
    return request.config.stash.setdefault(PROCESSES, [])


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def network() -> Network:
    """The bridge, to which hosts are added."""
    network = Network()
    await network.start()
    return network


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plane(network: Network, folder: Path) -> AsyncIterator[ControlPlane]:
    """A control plane with Pomona's kinds and roles."""
    del network  # the API server's address is on it
    plane = ControlPlane(binaries.ensure_binaries(), folder / "plane")
    try:
        await plane.start()
        await members.install(plane)
        await plane.collect_new_kinds()
        yield plane
    finally:
        await plane.stop()


@pytest_asyncio.fixture(autouse=True)
async def no_host_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail a test that leaves a MetalHost: the next test's processes would be bound to it."""
    yield
    if "plane" not in request.fixturenames:
        return
    plane: ControlPlane = request.getfixturevalue("plane")
    left = [host["metadata"]["name"] for host in (await plane.request("GET", METAL_HOSTS.path(None)))["items"]]
    for name in left:
        await plane.request("DELETE", METAL_HOSTS.path(None, name), accept={404})
    assert left == []


@pytest_asyncio.fixture
async def client(plane: ControlPlane) -> AsyncIterator[Client]:
    """The API, as cluster administrator."""
    async with connect(credentials.load(plane.kubeconfig())) as client:
        yield client


@pytest_asyncio.fixture
async def namespace(plane: ControlPlane) -> AsyncIterator[str]:
    """A new namespace."""
    async with open_namespace(plane) as name:
        yield name


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_nodes(
    request: pytest.FixtureRequest,
    plane: ControlPlane,
    tmp_path_factory: pytest.TempPathFactory,
    watched: list[Process],
) -> AsyncIterator[SharedNodes]:
    """The nodes, lent to one test after the other."""
    shared = request.config.stash[SHARED_NODES] = SharedNodes(plane, tmp_path_factory, watched)
    yield shared
    await shared.end_all_but(())


@pytest_asyncio.fixture(autouse=True)
async def no_node_beside(request: pytest.FixtureRequest) -> None:
    """End the nodes that a test before has borrowed and this one does not ask for."""
    if shared := request.config.stash.get(SHARED_NODES, None):
        await shared.end_all_but(request.fixturenames)


@pytest_asyncio.fixture
async def node(shared_nodes: SharedNodes) -> Process:
    """The node `cpu-1`, ready."""
    return await shared_nodes.lend("node", "cpu-1")


@pytest_asyncio.fixture
async def gpu_node(shared_nodes: SharedNodes) -> Process:
    """The node `gpu-1` with two NVIDIA devices, ready."""
    return await shared_nodes.lend("gpu_node", "gpu-1", resources={"nvidia.com/gpu": "2"})


@pytest_asyncio.fixture
async def pod_monitors(plane: ControlPlane) -> AsyncIterator[None]:
    """The kinds of Prometheus' operator, as long as a test runs."""
    crd = CHECKOUT / "tests" / "support" / "prometheus_operator_crds.yaml"
    await plane.apply(crd)
    await plane.kubectl("wait", "--for=condition=Established", "--timeout=90s", "-f", str(crd))

    async def is_served() -> bool:
        return "items" in await plane.request("GET", POD_MONITORS.path())

    await eventually(is_served)
    yield
    await plane.kubectl("delete", "-f", str(crd), "--wait=true")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_controller(
    request: pytest.FixtureRequest, plane: ControlPlane, folder: Path, watched: list[Process]
) -> AsyncIterator[SharedController]:
    """The controller, lent to one test after the other."""
    shared = request.config.stash[SHARED] = SharedController(plane, folder, watched)
    yield shared
    await shared.end()


@pytest.fixture(autouse=True)
def hub_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name the hub of the tests to every process, whether a test serves it or not."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://{ADDRESS}:{HUB_PORT}")


@pytest_asyncio.fixture(autouse=True)
async def no_controller_beside(request: pytest.FixtureRequest) -> None:
    """End the shared controller before a test of this folder without a controller, or with one of its own."""
    shared = request.config.stash.get(SHARED, None)
    if shared is not None and "controller" not in request.fixturenames:
        await shared.end()


@pytest_asyncio.fixture
async def controller(shared_controller: SharedController) -> Process:
    """The controller, started; a test may stop, kill and start it."""
    return await shared_controller.lend()


@pytest_asyncio.fixture
async def idle_host(
    plane: ControlPlane, network: Network, tmp_path: Path, watched: list[Process]
) -> AsyncIterator[StartMetalHost]:
    """Machines whose agents are not started yet."""
    hosts: list[MetalHost] = []

    async def add(name: str, *options: str) -> MetalHost:
        host = await members.metal_host(plane, network, name, tmp_path, *options, decided=True)
        hosts.append(host)
        watched.append(host.agent)
        return host

    yield add
    await plane.end_outage()
    for host in hosts:
        watched.remove(host.agent)
        await host.host.close()
        if host.agent.running:
            await host.agent.kill()
        for kind, place in ((METAL_HOSTS, None), (LEASES, HOSTS_NAMESPACE), (SECRETS, HOSTS_NAMESPACE)):
            await plane.request("DELETE", kind.path(place, host.name), accept={404})


@pytest.fixture(autouse=True)
def patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give clients in the test's own process more time to connect: unlike the product, they do not try again."""
    monkeypatch.setattr(transport, "CONNECT_SECONDS", transport.TOTAL_SECONDS)


@pytest.fixture
def metal_host(plane: ControlPlane, idle_host: StartMetalHost) -> StartMetalHost:
    """Machines with agents: returns once the agent has renewed its Lease for the first time."""

    async def start(name: str, *options: str) -> MetalHost:
        async def renewed() -> bool:
            lease = await plane.request("GET", LEASES.path(HOSTS_NAMESPACE, name))
            return "renewTime" in lease["spec"]

        host = await idle_host(name, *options)
        host.agent.start()
        await eventually(renewed)
        return host

    return start
