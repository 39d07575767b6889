"""One service on hosts and nodes at once, as docs/several-accelerators.md says: where its replicas go, and when."""

import contextlib
import re
from pathlib import Path

from crds.meta import ENQUEUED_AT
from kube.client import Client, Obj
from kube.resources import DEPLOYMENTS, ENDPOINT_SLICES, INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES
from tests.cluster.queue.queue_user import GIB, RUN_SECONDS, QueueUser
from tests.cluster.queue.test_pools import Administrator, admin
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks
from tests.support.eventually import eventually
from tests.support.fake_metal_agent import FakeMetalAgent
from tests.support.shell import Shell
from tests.support.simulated_nodes import SimulatedNodes

__all__ = ["admin"]

DOCUMENT = (CHECKOUT / "docs" / "several-accelerators.md").read_text()
OLLAMA = ("ollama",)
"""The engine of the Model of the user of the queue, in pods and on hosts."""


async def read_status(user: QueueUser, service: str) -> Obj:
    """Return the status of a service."""
    status: Obj = (await user.client.get(INFERENCE_SERVICES, service, user.namespace)).get("status", {})
    return status


async def wait_until_split(user: QueueUser, service: str, nodes: list[str], hosts: list[str]) -> Obj:
    """Wait until the replicas of a service are on these nodes and hosts, and all serve; return its status."""

    async def reached() -> Obj:
        status = await read_status(user, service)
        places = await user.nodes(service), await user.hosts(service)
        assert places == (nodes, hosts), status.get("choice")
        assert (status["phase"], status["readyReplicas"]) == ("Ready", len(nodes) + len(hosts)), status
        return status

    status = await eventually(reached, RUN_SECONDS)
    assert status is not None
    return status


async def is_ready(client: Client, host: str) -> bool:
    """Return whether the controller has found a host alive."""
    conditions = (await client.get(METAL_HOSTS, host)).get("status", {}).get("conditions", ())
    return any((condition["type"], condition["status"]) == ("Ready", "True") for condition in conditions)


async def list_deployments(user: QueueUser) -> list[str]:
    """Return the names of the Deployments of all services."""
    return sorted(item["metadata"]["name"] for item in (await user.client.list(DEPLOYMENTS, user.namespace)).items)


async def list_uids(user: QueueUser, service: str) -> set[str]:
    """Return the uids of the pods and processes of a service."""
    processes = (await user.client.list(METAL_PROCESSES, user.namespace)).items
    return await user.uids(service) | {
        process["metadata"]["uid"] for process in processes if process["spec"].get("serviceName") == service
    }


async def list_places(user: QueueUser, host: str) -> list[str]:
    """Return the place in the queue that each process on a host was given."""
    processes = (await user.client.list(METAL_PROCESSES, user.namespace, field_selector=f"spec.hostName={host}")).items
    return [process["metadata"].get("annotations", {}).get(ENQUEUED_AT, "") for process in processes]


async def test_service_uses_hosts_and_nodes_at_once_and_moves_what_is_evicted(
    plane: ControlPlane, simulated: SimulatedNodes, user: QueueUser, admin: Administrator, tmp_path: Path
) -> None:
    client = user.client
    await simulated.add("gpu-1", devices=1)
    (manifest,), examples = list_blocks(DOCUMENT, "yaml"), list_blocks(DOCUMENT, "console")
    shell = Shell(plane, tmp_path)
    path = tmp_path / "service.yaml"
    path.write_text(manifest)

    async def print_as_in_document(example: str) -> None:
        for command, printed in re.findall(r"^\$ (.*)\n(.*)$", example, re.MULTILINE):
            assert (await shell.run(f"{command} --namespace {user.namespace}")).strip() == printed

    async with contextlib.AsyncExitStack() as hosts:
        studio = FakeMetalAgent(client, "studio-1", 2 * GIB + GIB // 2, runtimes=OLLAMA)
        await hosts.enter_async_context(studio.running())
        await eventually(lambda: is_ready(client, "studio-1"), RUN_SECONDS)
        await shell.run(f"kubectl apply --namespace {user.namespace} --filename {path}")
        await wait_until_split(user, "chat", ["gpu-1"], ["studio-1", "studio-1"])
        await print_as_in_document(examples[0])
        slices = (await client.list(ENDPOINT_SLICES, user.namespace)).items
        addresses = {endpoint["addresses"][0] for slice_ in slices for endpoint in slice_.get("endpoints") or ()}
        assert len(addresses) == 2, "pods and hosts are behind one Service"
        before = await list_uids(user, "chat")
        await user.kill_controller()
        await user.wait_until_evictable("chat")
        # A critical service takes the node, and hosts have no room yet.
        await user.serve("critical", priority="critical")
        await user.wait_until_on("critical", "gpu-1")
        waited = await user.wait_for_status("chat", pool="nvidia", place="1/1")
        await hosts.enter_async_context(FakeMetalAgent(client, "studio-2", GIB + GIB // 2, runtimes=OLLAMA).running())
        await wait_until_split(user, "chat", [], ["studio-1", "studio-1", "studio-2"])
        await print_as_in_document(examples[1])
        assert await list_deployments(user) == ["critical"]
        (moved,) = await list_places(user, "studio-2")
        assert moved[:19] == waited["enqueuedAt"][:19], "it has kept its place in the queue"
        on_hosts = await list_uids(user, "chat")
        assert len(before & on_hosts) == 2, "neither the restart nor the move has touched the others"
        # An edit chooses anew: `auto` has nodes first, and one has room again.
        await admin.define("nvidia")
        await admin.wait_for_status("nvidia", used="1/1")
        await user.delete("critical")
        await admin.wait_for_status("nvidia", used="0/1")
        await user.edit("chat", hardware={"accelerator": "auto"}, scheduling=None)
        status = await wait_until_split(user, "chat", ["gpu-1"], ["studio-1", "studio-1"])
        assert status["choice"]["message"].startswith("1 on nvidia, 2 on metal; amd: no node has amd.com/gpu")
        assert before & on_hosts < await list_uids(user, "chat"), "what stays on its host is not restarted"
        await user.delete_services()
