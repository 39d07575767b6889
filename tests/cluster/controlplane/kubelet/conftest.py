"""A node for these tests, whose kubelet restarts containers quickly, and a helper that runs pods on it."""

import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import NODES, PODS
from tests.controlplane import members
from tests.controlplane.kubelet.worker import kill_leftovers
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import LIMIT_SECONDS, eventually

NODE = "cpu-2"


class Pods:
    """Pods of one test, on one node; names are made up, `main` is the container."""

    def __init__(self, client: Client, namespace: str, node: str) -> None:
        self.client = client
        self.namespace = namespace
        self.node = node

    async def run(
        self, script: str, *, labels: dict[str, str] | None = None, main: Obj | None = None, **spec: Any
    ) -> str:
        """Create a pod whose container runs a shell script; `main` are more fields of the container."""
        name = f"pod-{secrets.token_hex(3)}"
        container = {"name": "main", "image": "pomona-test", "command": ["sh", "-c", script], **(main or {})}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "labels": labels or {}},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": self.node},
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "containers": [container],
                **spec,
            },
        }
        await self.client.create(PODS, pod)
        return name

    async def status(self, name: str) -> Obj:
        """Return a pod's status."""
        status: Obj = (await self.client.get(PODS, name, self.namespace))["status"]
        return status

    async def main(self, name: str) -> Obj:
        """Return the status of a pod's container; LookupError as long as there is none."""
        found: Obj = (await self.status(name))["containerStatuses"][0]
        return found

    async def until(self, name: str, condition: Callable[[Obj], Any], seconds: float = LIMIT_SECONDS) -> Obj:
        """Wait until a pod's status fulfils a condition, and return the status."""

        async def fulfilled() -> Obj | None:
            status = await self.status(name)
            assert condition(status), status
            return status

        status = await eventually(fulfilled, seconds)
        assert status is not None
        return status

    async def ended(self, name: str) -> Obj:
        """Wait until a pod succeeded or failed, and return the terminated state of its container."""
        status = await self.until(name, lambda status: status["phase"] in {"Succeeded", "Failed"})
        terminated: Obj = status["containerStatuses"][0]["state"]["terminated"]
        return terminated

    async def output(self, script: str, **more: Any) -> str:
        """Run a script until it succeeds, and return its termination message."""
        terminated = await self.ended(await self.run(script, **more))
        assert terminated["exitCode"] == 0, terminated
        return str(terminated.get("message", ""))

    async def is_gone(self, name: str) -> bool:
        """Return whether a pod's object is gone."""
        try:
            await self.client.get(PODS, name, self.namespace)
        except NotFound:
            return True
        return False


def conditions(status: Obj) -> dict[str, str]:
    """Return the conditions of any object's status, by type."""
    return {item["type"]: item["status"] for item in status["conditions"]}


async def joined(plane: ControlPlane, kubelet: Process, name: str) -> None:
    """Start a kubelet and wait until the scheduler may use its node."""
    kubelet.start()

    async def accepts_pods() -> bool:
        node = await plane.request("GET", NODES.path(None, name), accept={404})
        untainted = "taints" not in node["spec"]
        return untainted and {"Ready": "True"}.items() <= conditions(node["status"]).items()

    await eventually(accepts_pods)


async def removed(plane: ControlPlane, kubelet: Process, name: str, folder: Path) -> None:
    """End a kubelet and its containers, and delete the node, so that no other test's pod is scheduled there."""
    await kubelet.kill()
    await kill_leftovers(folder / name)
    await plane.request("DELETE", NODES.path(None, name), accept={404})


@pytest.fixture(scope="package")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the pods and logs of the node."""
    return tmp_path_factory.mktemp("kubelet")


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def quick_node(plane: ControlPlane, node_folder: Path, watched: list[Process]) -> AsyncIterator[str]:
    """The name of a node that waits 0.5 s before a second restart, where Kubernetes waits 10 s."""
    kubelet = members.kubelet(plane, NODE, node_folder, labels={"team": "a"}, arguments=("--backoff-base=0.5",))
    watched.append(kubelet)
    await joined(plane, kubelet, NODE)
    yield NODE
    await removed(plane, kubelet, NODE, node_folder)


@pytest.fixture
def pods(client: Client, namespace: str, quick_node: str) -> Pods:
    """Pods on the quick node."""
    return Pods(client, namespace, quick_node)
