"""Pomona's image, by its content: controller, Jobs and proxy as pods of it, and of nothing else.

The root of these containers is what `Containerfile` assembles, from this machine's Python. It is read-only and without
a shell, and the process is the image's user in a user namespace of its own, with no variables but the image's and
Kubernetes' own.
What is not proven here: the base image, the other architecture, and which files another owner's mode would hide;
`make test-node` runs the same content under a real kubelet.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kube.client import Client, Obj
from kube.resources import JOBS, LEASES, PODS
from tests.cluster.main_job.cluster import Cluster
from tests.cluster.main_job.test_pod_proxy import LLAMA
from tests.controlplane import members
from tests.controlplane.helm import CHART, run_helm
from tests.controlplane.kubelet.images import ASSEMBLED
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.file_server import ALLOWED_NETWORKS, FileServer
from tests.support.tiny_models import tiny_gguf

pytestmark = pytest.mark.long

RESTRICTED: Obj = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


@pytest_asyncio.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "tiny.gguf")
    async with FileServer(root, address=ADDRESS) as server:
        yield server


@pytest_asyncio.fixture
async def controller_pod(plane: ControlPlane, client: Client, node: Process, tmp_path: Path) -> AsyncIterator[str]:
    """The name of the pod with the controller of the chart, ready."""
    del node

    async def ready() -> str:
        pods = (await client.list(PODS, CONTROLLER_NAMESPACE)).items
        assert len(pods) == 1
        (pod,) = pods
        conditions = {condition["type"]: condition["status"] for condition in pod["status"]["conditions"]}
        assert conditions["Ready"] == "True", pod["status"]
        return str(pod["metadata"]["name"])

    repository, _, tag = ASSEMBLED.rpartition(":")
    networks = ",".join(map(str, ALLOWED_NETWORKS))
    values = (f"image.repository={repository}", f"image.tag={tag}", "replicas=1")
    settings = (f"--set={setting}" for setting in (*values, f"models.allowPrivateSources={{{networks}}}"))
    manifest = tmp_path / "controller.yaml"
    manifest.write_text(
        await run_helm("template", "pomona", str(CHART), "--show-only=templates/controller.yaml", *settings)
    )
    await plane.apply(manifest)
    try:
        yield await eventually(ready)
    finally:
        await plane.kubectl("delete", f"--filename={manifest}", "--cascade=foreground", "--wait")
        await members.delete_leadership(plane)


@pytest.fixture
def cluster(plane: ControlPlane, client: Client, namespace: str, files: FileServer, tmp_path: Path) -> Cluster:
    return Cluster(plane, client, namespace, files, tmp_path)


async def test_image_runs_as_controller_job_and_proxy(client: Client, cluster: Cluster, controller_pod: str) -> None:
    async def leads() -> bool:
        lease = await client.get(LEASES, CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE)
        return controller_pod in lease["spec"]["holderIdentity"]

    # A pod is ready before it leads.
    await eventually(leads)

    await cluster.apply(cluster.model(), cluster.service("chat", "cpu", **LLAMA))
    await cluster.ready("chat")
    assert await cluster.answers("chat")
    assert (await cluster.ask("chat", token="")).status == 401

    jobs = (await client.list(JOBS, cluster.namespace)).items
    images = [job["spec"]["template"]["spec"]["containers"][0]["image"] for job in jobs]
    assert images == [ASSEMBLED, ASSEMBLED]
    pods = (await client.list(PODS, cluster.namespace, label_selector="inference.pomona.dev/service=chat")).items
    assert [container["image"] for pod in pods for container in pod["spec"]["containers"]] == [ASSEMBLED]


KUBERNETES = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
PROBE = """
import importlib.util, json, os, shutil

def try_to_write(folder):
    try:
        open(folder + "/probe", "w").close()
    except OSError as error:
        return error.strerror

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
facts = {
    "ids": [os.getuid(), os.geteuid(), os.getgid()],
    "capabilities": int(status["CapPrm"], 16),
    "variables": sorted(each.partition("=")[0] for each in open("/proc/self/environ").read().split("\\0") if each),
    "writing": {folder: try_to_write(folder) for folder in ("/", "/tmp", "/etc", "/opt/pomona/lib")},
    "programs": sorted(os.listdir("/opt/pomona/bin")),
    "folders": [folder for folder in ("/bin", "/sbin", "/usr/bin") if os.path.exists(folder + "/sh")],
    "modules": [name for name in ("pip", "uv", "ensurepip", "pytest") if importlib.util.find_spec(name)],
}
with open("/dev/termination-log", "w") as result:
    json.dump(facts, result)
"""


async def test_image_has_no_shell_no_installer_and_a_read_only_root(
    client: Client, namespace: str, node: Process
) -> None:
    del node
    container: Obj = {
        "name": "main",
        "image": ASSEMBLED,
        "command": ["python", "-c", PROBE],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": RESTRICTED,
    }
    pod: Obj = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]},
    }
    await client.create(PODS, pod)

    async def ended() -> Obj:
        (status,) = (await client.get(PODS, "probe", namespace))["status"]["containerStatuses"]
        state: Obj = status["state"]["terminated"]
        return state

    terminated = await eventually(ended)
    assert terminated["exitCode"] == 0, terminated["message"]
    report = json.loads(terminated["message"])
    interpreters = [name for name in report.pop("programs") if not name.startswith("python")]
    assert interpreters == ["pomona"]
    refused = dict.fromkeys(("/", "/tmp", "/etc", "/opt/pomona/lib"), "Read-only file system")
    assert report == {
        "ids": [65532, 65532, 65532],
        "capabilities": 0,
        "variables": ["HOME", "HOSTNAME", *KUBERNETES, "PATH", "PYTHONDONTWRITEBYTECODE", "SSL_CERT_FILE"],
        "writing": refused,
        "folders": [],
        "modules": [],
    }
