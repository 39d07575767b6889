"""A node for these tests, whose kubelet restarts containers quickly, and a helper that runs pods on it."""

import secrets
from collections.abc import Callable
from typing import Any

import pytest
import pytest_asyncio

from kube.client import Client, Obj
from kube.resources import PODS
from tests.cluster.nodes import SharedNodes
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


@pytest_asyncio.fixture
async def quick_node(shared_nodes: SharedNodes) -> str:
    """The name of a node that waits 0.5 s before a second restart, where Kubernetes waits 10 s."""
    await shared_nodes.lend("quick_node", NODE, labels={"team": "a"}, arguments=("--backoff-base=0.5",))
    return NODE


@pytest.fixture
def pods(client: Client, namespace: str, quick_node: str) -> Pods:
    """Pods on the quick node."""
    return Pods(client, namespace, quick_node)
