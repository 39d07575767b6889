"""Copies of weights on nodes, with the real scheduler: it chooses the node of each by what a replica asks for."""

import shlex
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from controller.reconcile.conditions import find
from crds.cache import NodeCopy
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY, Condition
from crds.model import Model
from kube.client import Client, Obj
from kube.resources import INFERENCE_SERVICES, JOBS, MODELS, NODES, PODS, PVCS, Resource
from tests.cluster.nodes import joined
from tests.cluster.shared_controller import SharedController
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT, Process
from tests.support.eventually import eventually
from tests.support.file_server import FileServer, TransferFault
from tests.support.local_volumes import VOLUMES, local_storage
from tests.support.tiny_models import tiny_gguf

pytestmark = pytest.mark.usefixtures("kubelets", "controller")

FIRST, SECOND = "disk-1", "disk-2"
DISK = {"disk": "nvme"}
"""Label of the nodes of these tests."""
DOCUMENT = (CHECKOUT / "docs" / "models.md").read_text().partition("### A copy on each node")[2].partition("\n## ")[0]
GPU = {"nvidia.com/gpu": "1"}
LARGE = "20Gi"
"""Memory of which a node has room for one."""


@pytest_asyncio.fixture
async def kubelets(plane: ControlPlane, tmp_path: Path, watched: list[Process]) -> AsyncIterator[dict[str, Process]]:
    """Two nodes with disks and a device each."""
    async with AsyncExitStack() as stack:
        disks = {name: joined(plane, name, tmp_path, watched, labels=DISK, resources=GPU) for name in (FIRST, SECOND)}
        nodes = {name: await stack.enter_async_context(disk) for name, disk in disks.items()}
        yield nodes


@pytest_asyncio.fixture
async def controller(shared_controller: SharedController) -> Process:
    """The controller, with room for one tiny model and a half on each node."""
    return await shared_controller.lend("--node-cache-size=25Mi")


@pytest_asyncio.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    """A file server with one.gguf and two.gguf, where pods reach it."""
    root = tmp_path / "served"
    root.mkdir()
    for name in ("one", "two"):
        tiny_gguf.write(root / f"{name}.gguf", name=name)
    async with FileServer(root, address=ADDRESS) as server:
        yield server


class CopyNamespace:
    """One namespace with a StorageClass of volumes on nodes, as a user handles it."""

    def __init__(self, client: Client, namespace: str, files: FileServer, storage_class: str) -> None:
        self.client = client
        self.namespace = namespace
        self._files = files
        self._storage_class = storage_class

    async def make(self, resource: Resource, name: str, **body: Any) -> Obj:
        metadata = {"name": name, "namespace": self.namespace, **body.pop("metadata", {})}
        return await self.client.create(resource, {"metadata": metadata, **body})

    async def make_model(self, name: str = "one", **cache: Any) -> None:
        cache = {"scope": "node", "storageClassName": self._storage_class, **cache}
        await self.make(MODELS, name, spec={"source": f"{self._files.url}/{name}.gguf", "cache": cache})

    async def make_service(self, model: str = "one", **spec: Any) -> None:
        hardware, resources = {"accelerator": "cpu"}, {"memory": LARGE}
        body = {"modelRef": model, "hardware": hardware, "resources": resources, "nodeSelector": DISK, **spec}
        await self.make(INFERENCE_SERVICES, f"of-{model}", spec=body)

    async def scale(self, replicas: int, model: str = "one") -> None:
        operations = [{"op": "add", "path": "/spec/replicas", "value": replicas}]
        await self.client.patch_json(INFERENCE_SERVICES, f"of-{model}", self.namespace, operations)

    async def model(self, name: str = "one") -> Model:
        return msgspec.convert(await self.client.get(MODELS, name, self.namespace), Model)

    async def copies_on(self, *nodes: str, model: str = "one") -> list[NodeCopy]:
        """Wait until the Model has copies on exactly these nodes."""

        async def there() -> list[NodeCopy] | None:
            status = (await self.model(model)).status
            assert [copy.node for copy in status.copies] == [*nodes], status
            return status.copies or [NodeCopy(node="", name="", claim="", path="")]

        copies = await eventually(there)
        assert copies is not None
        return copies

    async def fill(self, name: str, node: str, **body: Any) -> None:
        """Create a pod that takes most of a node's memory, or waits for it."""
        container: Obj = {"name": "main", "image": "pomona-test", "command": ["sleep", "1000"]}
        container["resources"] = {"requests": {"memory": LARGE}}
        terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        spec = {"containers": [container], "affinity": {"nodeAffinity": required}, **body.pop("spec", {})}
        await self.make(PODS, name, spec=spec, **body)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The disk of the volumes of all nodes."""
    folder = tmp_path / "volumes"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "disk", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest_asyncio.fixture
async def cluster(client: Client, namespace: str, files: FileServer, disk: Path) -> AsyncIterator[CopyNamespace]:
    async with local_storage(client, namespace, disk) as storage_class:
        yield CopyNamespace(client, namespace, files, storage_class)


def condition(model: Model, kind: str) -> Condition:
    reported = find(model.status.conditions, kind)
    assert reported is not None, model.status
    return reported


async def test_two_replicas_get_a_copy_on_each_node(
    cluster: CopyNamespace, files: FileServer, kubelets: dict[str, Process], plane: ControlPlane
) -> None:
    await cluster.make_model()
    await cluster.make_service(replicas=2)
    copies = await cluster.copies_on(FIRST, SECOND)
    for copy in copies:
        claim = await cluster.client.get(PVCS, copy.name, cluster.namespace)
        volume = await cluster.client.get(VOLUMES, claim["spec"]["volumeName"])
        path = Path(volume["spec"]["local"]["path"])
        assert path.parent.name == copy.node
        assert (path / copy.path).read_bytes() == (files.root / "one.gguf").read_bytes()
    jobs = (await cluster.client.list(JOBS, cluster.namespace)).items
    fetches = [job["spec"]["template"]["spec"]["containers"][0] for job in jobs if "-fetch-" in job["metadata"]["name"]]
    # The engine's, and the 96 MiB of its proxy.
    assert [fetch["resources"]["requests"]["memory"] for fetch in fetches] == [str((20 << 30) + (96 << 20))] * 2
    assert "copies on nodes disk-1, disk-2 at /models/" in condition(await cluster.model(), "Cached").message

    commands = [
        shlex.split(line, comments=True) for line in DOCUMENT.splitlines() if line.startswith("kubectl get mdl")
    ]
    listed, explained = [
        await plane.kubectl(
            f"--namespace={cluster.namespace}", *("one" if word == "qwen3-8b" else word for word in words[1:])
        )
        for words in commands
    ]
    assert listed.split() == [word for copy in copies for word in (copy.node, copy.name)]
    assert explained == condition(await cluster.model(), "Cached").message

    await kubelets[SECOND].kill()
    await plane.request("DELETE", NODES.path(None, SECOND))
    await cluster.copies_on(FIRST)


async def test_download_from_a_source_that_stalls_holds_no_device(cluster: CopyNamespace, files: FileServer) -> None:
    await cluster.make_model()

    async def is_inspected() -> bool:
        return condition(await cluster.model(), "Ready").status == "True"

    await eventually(is_inspected)
    files.faults.extend([TransferFault(1000, silent=True)] * 4)
    await cluster.make_service(hardware={"accelerator": "nvidia"})

    async def list_requests() -> list[tuple[str, Obj]]:
        """Return the phase and the requests of each pod that fetches."""
        pods = (await cluster.client.list(PODS, cluster.namespace)).items
        fetches = [pod for pod in pods if pod["spec"]["containers"][0]["name"] == "fetch"]
        return [(pod["status"]["phase"], pod["spec"]["containers"][0]["resources"]["requests"]) for pod in fetches]

    async def is_without_device() -> bool:
        return [(phase, [*requests]) for phase, requests in await list_requests()] == [("Running", ["cpu", "memory"])]

    await eventually(is_without_device)
    (claim,) = (await cluster.client.list(PVCS, cluster.namespace)).items
    assert claim["status"]["phase"] == "Bound"


async def test_full_node_leads_to_a_copy_elsewhere(cluster: CopyNamespace) -> None:
    await cluster.fill("foreign", FIRST)

    async def runs() -> bool:
        pod = await cluster.client.get(PODS, "foreign", cluster.namespace)
        return bool(pod["spec"].get("nodeName"))

    await eventually(runs)
    await cluster.make_model()
    await cluster.make_service(replicas=1)
    (copy,) = await cluster.copies_on(SECOND)
    await cluster.client.delete(PODS, "foreign", cluster.namespace)
    # A replica that the scheduler refuses beside the only copy. The first one may be there by now.
    await cluster.fill("taker", SECOND)
    mounts = [{"name": "models", "persistentVolumeClaim": {"claimName": copy.name, "readOnly": True}}]
    labels = {LABEL_SERVICE: "of-one", LABEL_MANAGED_BY: MANAGED_BY}
    await cluster.fill("refused", SECOND, metadata={"labels": labels}, spec={"volumes": mounts})
    await cluster.copies_on(FIRST, SECOND)


async def test_full_disk_takes_an_unused_copy(cluster: CopyNamespace, files: FileServer, disk: Path) -> None:
    on_first = {"nodeSelector": {"kubernetes.io/hostname": FIRST}, "resources": {"memory": "1Gi"}}
    await cluster.make_model("one", size="5Mi")
    await cluster.make_service("one", **on_first)
    await cluster.copies_on(FIRST, model="one")
    # The rest of the disk is too small for another copy.
    size_bytes = (files.root / "two.gguf").stat().st_size
    (disk / "rest").write_bytes(bytes(shutil.disk_usage(disk).free - size_bytes // 2))
    await cluster.make_model("two", size="5Mi")
    await cluster.make_service("two", **on_first)

    async def short() -> bool:
        return condition(await cluster.model("two"), "Cached").reason == "NoSpace"

    await eventually(short)
    await cluster.copies_on(FIRST, model="one")
    await cluster.scale(0)
    await cluster.copies_on(FIRST, model="two")
    await cluster.copies_on(model="one")
