"""A Node without a kubelet, and real node agents on it with a token as kubelet gives it to their pod."""

import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import NODE_FITNESSES, NODES
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.node_tokens import node_agent_kubeconfig

NAME = "fitness-1"
METRICS_PORT = 9100
REST_PORT = 8787


@dataclass
class AgentNode:
    """The Node, and the API as an administrator.

    Attributes:
        client: the API.
        start: starts an agent with further options.
    """

    client: Client
    start: Callable[..., Process]

    async def status(self) -> Obj:
        """Return the status of the NodeFitness; empty if there is none."""
        with contextlib.suppress(NotFound):
            found: Obj = (await self.client.get(NODE_FITNESSES, NAME)).get("status", {})
            return found
        return {}

    async def condition(self) -> Obj:
        """Return the condition Ready; empty if there is none."""
        return next(iter((await self.status()).get("conditions", ())), {})

    async def labels(self) -> dict[str, str]:
        node_labels: dict[str, str] = (await self.client.get(NODES, NAME))["metadata"]["labels"]
        return node_labels

    async def set_labels(self, labels: dict[str, str | None], manager: str = "gpu-feature-discovery") -> None:
        await self.client.patch_merge(NODES, NAME, None, {"metadata": {"labels": labels}}, field_manager=manager)


@pytest.fixture
async def agent_node(
    plane: ControlPlane, client: Client, tmp_path: Path, watched: list[Process]
) -> AsyncIterator[AgentNode]:
    async with contextlib.AsyncExitStack() as stack:
        # As by a kubelet: the API server records no owners of fields of an object that was created without any.
        await client.create(NODES, {"metadata": {"name": NAME, "labels": {"kubernetes.io/hostname": NAME}}})
        stack.push_async_callback(plane.request, "DELETE", NODES.path(None, NAME), accept={404})
        stack.push_async_callback(plane.request, "DELETE", NODE_FITNESSES.path(None, NAME), accept={404})
        kubeconfig = await node_agent_kubeconfig(plane, client, NAME, stack)

        def start(*options: str) -> Process:
            argv = [
                *(sys.executable, "-m", "cli.main", "node-agent", f"--node-name={NAME}", f"--kubeconfig={kubeconfig}"),
                *("--interval=1s", f"--metrics-port={METRICS_PORT}", f"--port={REST_PORT}", *options),
            ]
            process = Process("node agent", argv, tmp_path / "node-agent.log")
            process.start()
            watched.append(process)
            stack.push_async_callback(process.kill)
            return process

        yield AgentNode(client, start)
