"""The commands about the queue on the real API server and scheduler: what they print agrees with what then happens."""

import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from crds.meta import API_VERSION, GROUP
from kube.client import Client, Obj
from kube.resources import NODES, PODS
from tests.cluster.queue.queue_user import QueueUser
from tests.controlplane.plane import ControlPlane
from tests.support.eventually import eventually
from tests.support.pomona_command import Pomona
from tests.support.simulated_nodes import GPU, SimulatedNodes

OPTIONS = ("--min-run=1s", "--scheduling-mode=Queue")
"""The options of the controller of these tests, which is no Deployment."""
OWN_KINDS = ("inferenceservices", "models", "metalhosts", "metalprocesses", "acceleratorpools", "nodefitnesses")


@pytest.fixture
def pomona(plane: ControlPlane, namespace: str) -> Pomona:
    return Pomona(plane, namespace)


def write_service(folder: Path, name: str, gpus: int, priority: str = "normal", **spec: Any) -> Path:
    wanted = {"modelRef": "tiny", "hardware": {"accelerator": "nvidia", "count": gpus}, "priority": priority, **spec}
    manifest = {"apiVersion": API_VERSION, "kind": "InferenceService", "metadata": {"name": name}, "spec": wanted}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(manifest))
    return path


async def plan(pomona: Pomona, *words: str) -> dict[str, Obj]:
    """Return the rows of a plan by service."""
    answer = json.loads(await pomona.succeed("plan", *words, *OPTIONS, "-o", "json"))
    assert answer["isComplete"]
    return {row["service"]: row for row in answer["replicas"]}


@pytest_asyncio.fixture
async def reader(plane: ControlPlane, namespace: str) -> AsyncIterator[Pomona]:
    """The command as one runs it who may list what a plan needs in the whole cluster, and change nothing."""
    kinds = ("pods", "nodes", "deployments", "configmaps", *(f"{kind}.{GROUP}" for kind in OWN_KINDS))
    words = ("create", "clusterrole", "queue-reader", "--verb=get,list", f"--resource={','.join(kinds)}")
    await plane.kubectl(*words)
    account = f"--serviceaccount={namespace}:default"
    await plane.kubectl("create", "clusterrolebinding", "queue-reader", "--clusterrole=queue-reader", account)
    reader = Pomona(plane, namespace)
    reader.kubeconfig = await plane.service_account_kubeconfig(namespace, "default")

    async def is_granted() -> bool:
        # The API server learns of a new binding from a watch, a bit later.
        return "may not" not in (await reader.run("plan", "drain", "absent", *OPTIONS)).errors

    try:
        await eventually(is_granted)
        yield reader
    finally:
        await plane.kubectl("delete", "clusterrolebinding,clusterrole", "queue-reader")


async def test_queue_lists_services_in_their_order(simulated: SimulatedNodes, user: QueueUser, pomona: Pomona) -> None:
    assert f"no service of namespace {user.namespace} waits" in (await pomona.run("queue")).errors
    await simulated.add("sim-1", devices=1)
    await user.serve("running", priority="critical")
    await user.wait_until_on("running", "sim-1")
    for name, priority, gpus in (("batch", "batch", 1), ("large", "high", 8), ("high", "high", 1)):
        await user.serve(name, gpus, priority)
        await user.wait_until_queued(name)
    await user.wait_for_status("high", place="1/2")
    await user.wait_for_status("batch", place="2/2")
    await user.wait_for_status("large", reason="NoSuchHardware")
    listed = (await pomona.succeed("queue", "-o", "wide")).splitlines()
    titles = "POOL PLACE SERVICE PRIORITY SINCE ESTIMATED START REASON WAITS FOR MESSAGE"
    assert listed[0].split() == titles.split()
    assert [line.split()[1:4] for line in listed[1:]] == [
        ["1/2", "high", "high"],
        ["2/2", "batch", "batch"],
        ["none", "large", "high"],
    ]
    items = json.loads(await pomona.succeed("queue", "-A", "-o", "json"))["items"]
    assert [item["metadata"]["name"] for item in items] == ["high", "batch", "large"]


async def test_explanation_names_each_node_and_the_nearest_remedy(
    simulated: SimulatedNodes, user: QueueUser, pomona: Pomona, client: Client
) -> None:
    await simulated.add("sim-1", devices=4)
    await simulated.add("sim-2", devices=4)
    await simulated.add("sim-3", devices=1)
    await client.patch_merge(NODES, "sim-2", None, {"spec": {"unschedulable": True}}, field_manager="admin")
    foreign = {
        "metadata": {"name": "foreign", "namespace": user.namespace},
        "spec": {
            "nodeName": "sim-1",
            "containers": [
                {"name": "main", "image": "any", "resources": {"requests": {GPU: "3"}, "limits": {GPU: "3"}}}
            ],
        },
    }
    await client.create(PODS, foreign)
    await user.serve("chat", gpus=2)
    await user.wait_for_status("chat", reason="InsufficientDevices")
    text = await pomona.succeed("queue", "explain", "chat", *OPTIONS)
    assert "chat waits, 1/1 in pool nvidia (InsufficientDevices)" in text
    assert "best remedy, for node/sim-2: open the node (node sim-2 is cordoned: kubectl uncordon sim-2)" in " ".join(
        text.split()
    )
    facts = json.loads(await pomona.succeed("queue", "explain", "chat", *OPTIONS, "-o", "json"))
    assert [(cell["cell"], cell["reason"], cell["message"]) for cell in facts["cells"]] == [
        ("node/sim-2", "Cordoned", "node sim-2 is cordoned: kubectl uncordon sim-2"),
        ("node/sim-1", "Insufficient", f"2 of {GPU} needed, 1 left"),
        ("node/sim-3", "TooSmall", f"2 of {GPU} needed, 1 in all"),
    ]
    assert facts["bestRemedy"]["cell"] == "node/sim-2"
    await client.patch_merge(NODES, "sim-2", None, {"spec": {"unschedulable": None}}, field_manager="admin")
    await user.wait_until_on("chat", "sim-2")
    assert "chat does not wait in the queue" in await pomona.succeed("queue", "explain", "chat", *OPTIONS)
    await client.delete(PODS, "foreign", user.namespace)


async def test_user_of_one_namespace_sees_status_and_the_rights_that_are_missing(
    simulated: SimulatedNodes, user: QueueUser, plane: ControlPlane
) -> None:
    await simulated.add("sim-1", devices=1)
    await user.serve("running")
    await user.wait_until_on("running", "sim-1")
    await user.serve("chat")
    await user.wait_for_status("chat", place="1/1")
    tenant = Pomona(plane, user.namespace)
    tenant.kubeconfig = await plane.service_account_kubeconfig(user.namespace, "default")
    account = f"--serviceaccount={user.namespace}:default"
    await plane.kubectl("create", "rolebinding", "viewer", "--clusterrole=view", account, f"-n={user.namespace}")

    async def explain() -> str:
        result = await tenant.run("queue", "explain", "chat")
        assert result.code == 1
        assert "chat waits, 1/1 in pool nvidia" in result.output, result
        return " ".join(result.output.split())

    text = await eventually(explain)
    assert text is not None
    assert "may not list inferenceservices.inference.pomona.dev in the whole cluster" in text
    assert "may not list nodes in the whole cluster" in text
    refused = await tenant.run("plan", "drain", "sim-1")
    assert refused.code == 1
    assert "a plan needs the whole cluster" in refused.errors
    assert "may not list pods in the whole cluster" in refused.errors


async def test_plan_of_a_manifest_tells_what_then_happens(
    simulated: SimulatedNodes, user: QueueUser, pomona: Pomona, reader: Pomona, tmp_path: Path
) -> None:
    await simulated.add("sim-1", devices=4)
    await simulated.add("sim-2", devices=1)
    for name, gpus in (("low-1", 2), ("low-2", 1), ("wide", 1)):
        await user.serve(name, gpus, "low" if name != "wide" else "high")
        await user.wait_until_run(name)
    await user.wait_until_evictable("low-1", "low-2", "wide")
    before = {name: await user.nodes(name) for name in ("low-1", "low-2", "wide")}
    path = write_service(tmp_path, "critical", 3, "critical")
    rows = await plan(reader, "-f", str(path))
    table = await reader.succeed("plan", "-f", str(path), *OPTIONS)
    assert rows["critical"]["outcome"] == "starts"
    assert rows["critical"]["to"] == ["node/sim-1"]
    assert rows["critical"]["evicts"]
    assert table.splitlines()[0].split() == ["SERVICE", "OUTCOME", "WHERE", "WHY"]
    await pomona.succeed("deploy", "-f", str(path), "--no-wait")
    await user.wait_until_on("critical", "sim-1")
    for name, nodes in before.items():
        row = rows.get(name)
        expected = nodes if row is None else [cell.partition("/")[2] for cell in row["to"]] or [""]
        await user.wait_until_on(name, *expected)
    for row in rows.values():
        if row["outcome"] == "evicted":
            place = row["place"]
            await user.wait_for_status(row["service"], place=f"{place['position']}/{place['length']}")


async def is_replaced(user: QueueUser, name: str, earlier: Obj) -> bool:
    """Return whether a service has another pod than this one."""
    return [pod["metadata"]["uid"] for pod in await user.pods(name)] not in ([], [earlier["metadata"]["uid"]])


async def test_plan_of_a_drain_tells_where_replicas_go(
    simulated: SimulatedNodes, user: QueueUser, reader: Pomona, client: Client
) -> None:
    await simulated.add("sim-1", devices=4)
    for name, devices in (("two", 2), ("one", 1)):
        await user.serve(name, devices)
        await user.wait_until_run(name)
        await user.wait_for_a_later_second()
    await simulated.add("sim-2", devices=2)
    rows = await plan(reader, "drain", "sim-1")
    (row,) = (replica for replica in rows.values() if replica["outcome"] == "moves")
    (waiting,) = (replica for replica in rows.values() if replica["outcome"] == "waits")
    assert (row["from"], row["to"]) == (["node/sim-1"], ["node/sim-2"])
    assert (waiting["from"], waiting["reason"]) == (["node/sim-1"], "InsufficientDevices")
    await client.patch_merge(NODES, "sim-1", None, {"spec": {"unschedulable": True}}, field_manager="admin")
    for name in ("two", "one"):
        (pod,) = await user.pods(name)
        await client.delete(PODS, pod["metadata"]["name"], user.namespace)
        # It may be admitted to the other node at once.
        await eventually(partial(is_replaced, user, name, pod))
        await user.wait_for_a_later_second()
    await user.wait_until_on(row["service"], "sim-2")
    await user.wait_until_on(waiting["service"], "")
    unknown = await reader.run("plan", "drain", "absent", *OPTIONS)
    assert unknown.code == 1
    assert "absent is neither a host nor a node with an accelerator: there is node/sim-1, node/sim-2" in unknown.errors


async def test_plan_of_a_node_tells_who_starts_on_it(
    simulated: SimulatedNodes, user: QueueUser, reader: Pomona
) -> None:
    await simulated.add("sim-1", devices=1)
    await user.serve("running", priority="critical")
    await user.wait_until_on("running", "sim-1")
    for name in ("first", "second", "third"):
        await user.serve(name, 4)
        await user.wait_until_queued(name)
        await user.wait_for_a_later_second()
    rows = await plan(reader, "add", "--accelerator", "nvidia", "--devices", "8", "--memory", "512Gi")
    assert {name: (row["outcome"], row["to"]) for name, row in rows.items()} == {
        "first": ("starts", ["node/new"]),
        "second": ("starts", ["node/new"]),
    }
    await simulated.add("sim-2", devices=8)
    await user.wait_until_on("first", "sim-2")
    await user.wait_until_on("second", "sim-2")
    assert await user.nodes("third") == [""]
