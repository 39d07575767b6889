"""Pools and quotas on the real API server and scheduler: who is held back, who is not, and what administrators see."""

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from kube.client import Client, Obj
from kube.resources import ACCELERATOR_POOLS, INFERENCE_SERVICES
from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.namespaces import open_namespace
from tests.support.simulated_nodes import SimulatedNodes

TEAM_A = {"nodeSelector": {"team": "a"}}
AMOUNTS = ("USED", "WAITING", "BORROWED", "LENT")


class Administrator:
    """An administrator of pools."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def define(self, name: str, **spec: Any) -> None:
        """Make a pool."""
        body = {"metadata": {"name": name}, "spec": {"accelerator": "nvidia", **spec}}
        await self.client.create(ACCELERATOR_POOLS, body)

    async def edit(self, name: str, **spec: Any) -> None:
        """Edit the spec of a pool."""
        await self.client.patch_merge(ACCELERATOR_POOLS, name, None, {"spec": spec}, field_manager="admin")

    async def delete(self, name: str) -> None:
        """Delete a pool."""
        await self.client.delete(ACCELERATOR_POOLS, name)

    async def wait_for_status(self, name: str, reason: str = "Ready", **status: Any) -> str:
        """Wait until the status of a pool has these values, and its condition this reason; return its message."""

        async def reached() -> str:
            observed = (await self.client.get(ACCELERATOR_POOLS, name)).get("status", {})
            ready: Obj = next(iter(observed.get("conditions", ())), {})
            assert (ready.get("reason"), {field: observed.get(field) for field in status}) == (reason, status), observed
            return str(ready["message"])

        message = await eventually(reached, RUN_SECONDS)
        assert message is not None
        return message


@pytest_asyncio.fixture
async def admin(client: Client) -> AsyncIterator[Administrator]:
    """An administrator, whose pools are gone after the test."""
    yield Administrator(client)
    for item in (await client.list(ACCELERATOR_POOLS)).items:
        await client.delete(ACCELERATOR_POOLS, item["metadata"]["name"])


@pytest_asyncio.fixture
async def neighbour(plane: ControlPlane, client: Client, controller: Process) -> AsyncIterator[QueueUser]:
    """A user of another namespace."""
    async with open_namespace(plane) as name:
        user = QueueUser(plane, client, name, controller)
        await user.make_model()
        yield user
        await user.delete_services()


async def wait_for_reason(user: QueueUser, service: str, reason: str) -> str:
    """Wait until Ready of a service has a reason; return its message."""

    async def reached() -> str:
        status = (await user.client.get(INFERENCE_SERVICES, service, user.namespace)).get("status", {})
        ready: Obj = next((condition for condition in status.get("conditions", ()) if condition["type"] == "Ready"), {})
        assert ready.get("reason") == reason, status
        return str(ready["message"])

    message = await eventually(reached, RUN_SECONDS)
    assert message is not None
    return message


async def test_quota_holds_the_third_service_of_a_namespace_and_no_other(
    simulated: SimulatedNodes, user: QueueUser, neighbour: QueueUser, admin: Administrator
) -> None:
    await simulated.add("sim-1", devices=8)
    await admin.define("nvidia", quotas=[{"namespace": user.namespace, "devices": 2}])
    await admin.wait_for_status("nvidia", cells=1, used="0/8")
    for number in (1, 2):
        await user.serve(f"chat-{number}")
        await user.wait_until_on(f"chat-{number}", "sim-1")
    await user.serve("chat-3")
    await user.wait_for_status("chat-3", reason="Quota", place="1/1")
    await neighbour.serve("other", gpus=4, priority="batch")
    await neighbour.wait_until_on("other", "sim-1")
    assert await user.nodes("chat-3") == [""]
    await admin.wait_for_status("nvidia", used="6/8", waiting=1)
    await admin.edit("nvidia", quotas=[{"namespace": user.namespace, "devices": 1}])
    message = await admin.wait_for_status("nvidia", "LimitExceeded")
    assert f"quota of namespace {user.namespace} is 1 device, but 2 are in use" in message
    assert await user.nodes("chat-1") == ["sim-1"], "a quota below what runs ends nothing"
    await admin.edit("nvidia", quotas=[{"namespace": user.namespace, "devices": 3}])
    await user.wait_until_on("chat-3", "sim-1")
    # What is more important takes the place of the last one of its own namespace, though there is room for both.
    await user.wait_until_evictable("chat-3")
    await user.serve("urgent", priority="critical")
    await user.wait_until_on("urgent", "sim-1")
    await user.wait_for_status("chat-3", reason="Quota", place="1/1")
    assert (await user.nodes("chat-1"), await neighbour.nodes("other")) == (["sim-1"], ["sim-1"])


async def test_replica_that_borrows_goes_first_when_the_owner_comes(
    simulated: SimulatedNodes, user: QueueUser, admin: Administrator
) -> None:
    await simulated.add("sim-a", devices=2, team="a")
    await admin.define("team-a", **TEAM_A, lendingLimit=1)
    await admin.wait_for_status("team-a", cells=1)
    await user.serve("own", priority="low", scheduling={"pools": ["team-a"]})
    await user.wait_until_on("own", "sim-a")
    await user.serve("guest", priority="low")
    await user.wait_until_on("guest", "sim-a")
    await user.serve("second-guest", priority="low")
    await user.wait_until_queued("second-guest")
    await admin.wait_for_status("team-a", used="2/2", lent="1", borrowed="0")
    await user.wait_until_evictable("own", "guest")
    await user.serve("owner", scheduling={"pools": ["team-a"]})
    await user.wait_until_on("owner", "sim-a")
    assert (await user.nodes("own"), await user.nodes("guest")) == (["sim-a"], [""])
    await admin.wait_for_status("team-a", used="2/2", lent="0")


async def test_elastic_pool_lets_exactly_as_many_pods_wait_for_nodes_as_it_says(
    simulated: SimulatedNodes, user: QueueUser, admin: Administrator
) -> None:
    await simulated.add("sim-else", devices=8)
    await admin.define("team-a", **TEAM_A, elastic={"maxWaiting": 2})
    for number in range(4):
        await user.serve(f"chat-{number}", scheduling={"pools": ["team-a"]})
        await user.wait_until_made(f"chat-{number}")

    async def pending() -> list[str]:
        return [name for number in range(4) if not await user.gates(name := f"chat-{number}")]

    async def has_two() -> bool:
        names = await pending()
        assert names == ["chat-0", "chat-1"], f"{names} are without a gate"
        return True

    await eventually(has_two, RUN_SECONDS)
    await admin.wait_for_status("team-a", cells=0, waiting=2)
    await user.wait_until_unschedulable("chat-0", "chat-1")
    assert await pending() == ["chat-0", "chat-1"], "no further one while these wait"
    assert await user.nodes("chat-0") == [""], "the free node of another pool is none of theirs"
    await simulated.add("sim-a", devices=2, team="a")
    await user.wait_until_on("chat-0", "sim-a")
    await user.wait_until_on("chat-1", "sim-a")
    await user.wait_until_unschedulable("chat-2", "chat-3")
    await simulated.add("sim-b", devices=2, team="a")
    await user.wait_until_on("chat-2", "sim-b")
    await user.wait_until_on("chat-3", "sim-b")


async def test_pool_is_edited_and_deleted_while_services_wait(
    simulated: SimulatedNodes, user: QueueUser, admin: Administrator
) -> None:
    await simulated.add("sim-a", devices=1, team="a")
    await admin.define("team-a", **TEAM_A)
    await user.serve("first", scheduling={"pools": ["team-a"]})
    await wait_for_reason(user, "first", "Serving")
    await user.serve("second", scheduling={"pools": ["team-a"]})
    await user.wait_for_status("second", pool="team-a", place="1/1")
    (pod,) = await user.pods("first")
    await admin.delete("team-a")
    message = await wait_for_reason(user, "second", "UnknownPool")
    assert "spec.scheduling.pools names team-a, which does not exist: use nvidia, or create AcceleratorPool" in message
    message = await wait_for_reason(user, "first", "UnknownPool")
    assert message.startswith("still serving; ")
    await user.wait_for_a_later_second()
    await user.serve("third")
    await user.wait_until_queued("third")
    await admin.define("team-a", nodeSelector={"team": "b"})
    assert (await user.pods("first"))[0]["metadata"]["uid"] == pod["metadata"]["uid"], "nothing is lost"
    await user.wait_for_status("second", reason="NoSuchHardware")
    await simulated.add("sim-b", devices=1, team="b")
    await user.wait_until_on("second", "sim-b")
    await wait_for_reason(user, "first", "Serving")


async def test_service_that_names_a_pool_of_another_accelerator_says_so(
    simulated: SimulatedNodes, user: QueueUser, admin: Administrator
) -> None:
    await simulated.add("sim-1", devices=1)
    await admin.define("amd-a", accelerator="amd", **TEAM_A)
    await user.serve("chat", scheduling={"pools": ["nvidia", "amd-a"]})
    message = await wait_for_reason(user, "chat", "InvalidSpec")
    assert "names amd-a, which has accelerator amd, not nvidia: use nvidia" in message
    await admin.wait_for_status("amd-a", "NoCell", cells=0)
    await user.edit("chat", scheduling={"pools": ["nvidia"]})
    await user.wait_until_on("chat", "sim-1")


async def test_kubectl_shows_pools_at_a_glance(
    plane: ControlPlane, simulated: SimulatedNodes, user: QueueUser, admin: Administrator
) -> None:
    await simulated.add("sim-1", devices=8, team="a")
    await admin.define("team-a", **TEAM_A, nominal=4)
    await admin.define("team-b", **TEAM_A)
    await user.serve("chat", gpus=3)
    await user.wait_until_on("chat", "sim-1")
    await admin.wait_for_status("team-a", used="3/8", lent="3")
    message = await admin.wait_for_status("team-b", "NoCell")
    assert message.endswith("pool team-a selects sim-1, too, and comes first by name: change one nodeSelector")
    head, first, second = (await plane.kubectl("get", "pools")).splitlines()
    assert head.split() == ["NAME", "ACCELERATOR", "CELLS", *AMOUNTS, "READY", "REASON", "AGE"]
    assert first.split()[:-1] == ["team-a", "nvidia", "1", "3/8", "0", "0", "3", "True", "Ready"]
    assert second.split()[:-1] == ["team-b", "nvidia", "0", "0/0", "0", "0", "0", "False", "NoCell"]
    wide = await plane.kubectl("get", "pools", "-o", "wide")
    assert "MAX WAITING" in wide
    said = await plane.kubectl("explain", "pool.spec.lendingLimit")
    assert "The most that replicas at home in other pools use of this one" in said
