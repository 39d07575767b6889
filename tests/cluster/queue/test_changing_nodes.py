"""Nodes that change under the queue: they vanish, are cordoned, tainted or relabelled, and lose devices."""

from kube.resources import PODS
from tests.cluster.queue.queue_user import QueueUser
from tests.support.simulated_nodes import SimulatedNodes

PRODUCT = "nvidia.com/gpu.product"
H100 = "NVIDIA-H100-80GB-HBM3"


async def test_a_unit_of_a_node_that_is_gone_runs_elsewhere_before_later_ones(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    for name, node in (("lost", "sim-1"), ("busy", "sim-2")):
        await simulated.add(node, devices=1)
        await user.serve(name)
        await user.wait_until_on(name, node)
    await user.wait_for_a_later_second()
    await user.serve("waiting")
    await user.wait_for_places("waiting")
    await simulated.remove("sim-1")
    # Kubernetes does the same within a minute or two.
    (pod,) = await user.pods("lost")
    options = {"gracePeriodSeconds": 0}
    await user.plane.request("DELETE", PODS.path(user.namespace, pod["metadata"]["name"]), options)
    await user.wait_for_places("lost", "waiting")
    await user.kill_controller()
    await simulated.add("sim-3", devices=1)
    await user.wait_until_on("lost", "sim-3")
    await user.wait_for_places("waiting")


async def test_a_cordoned_node_gets_nothing_until_it_is_uncordoned(simulated: SimulatedNodes, user: QueueUser) -> None:
    await simulated.add("sim-1", devices=1)
    await user.serve("holder")
    await user.wait_until_on("holder", "sim-1")
    await user.serve("waiting")
    await user.wait_for_places("waiting")
    await simulated.edit("sim-1", spec={"unschedulable": True})
    await user.wait_for_status("waiting", reason="CellsClosed", place="1/1")
    await user.delete("holder")
    await user.serve("later", priority="low")
    await user.wait_for_status("later", reason="CellsClosed", place="2/2")
    assert await user.nodes("waiting") == [""]
    await simulated.edit("sim-1", spec={"unschedulable": None})
    await user.wait_until_on("waiting", "sim-1")
    await user.wait_for_status("later", reason="InsufficientDevices", place="1/1")


async def test_a_taint_excludes_those_that_do_not_tolerate_it(simulated: SimulatedNodes, user: QueueUser) -> None:
    await simulated.add("sim-1", devices=1)
    await user.serve("holder", tolerations=[{"key": "team", "operator": "Exists"}])
    await user.wait_until_on("holder", "sim-1")
    await user.serve("waiting")
    await user.wait_for_places("waiting")
    taint = {"key": "team", "value": "research", "effect": "NoSchedule"}
    await simulated.edit("sim-1", spec={"taints": [taint]})
    await user.wait_for_status("waiting", reason="NoSuchHardware", position=None)
    # One that tolerates it is not held up by one that cannot run.
    await user.serve("tolerant", priority="low", tolerations=[{"key": "team", "operator": "Exists"}])
    await user.wait_for_places("tolerant")
    await user.delete("holder")
    await user.wait_until_on("tolerant", "sim-1")
    await user.wait_until_evictable("tolerant")
    await simulated.edit("sim-1", spec={"taints": None})
    await user.wait_until_on("waiting", "sim-1")
    await user.wait_for_places("tolerant")


async def test_a_node_that_is_relabelled_is_another_product(simulated: SimulatedNodes, user: QueueUser) -> None:
    await simulated.add("sim-1", devices=1)
    await user.serve("holder", priority="high")
    await user.wait_until_on("holder", "sim-1")
    await user.serve("waiting", hardware={"accelerator": "nvidia", "products": [H100]})
    await user.wait_for_places("waiting")
    await simulated.edit("sim-1", labels={PRODUCT: "NVIDIA-L4"})
    await user.wait_for_status("waiting", reason="NoSuchHardware", position=None)
    await user.delete("holder")
    await user.serve("any")
    await user.wait_until_on("any", "sim-1")
    await user.delete("any")
    await simulated.edit("sim-1", labels={PRODUCT: H100})
    await user.wait_until_on("waiting", "sim-1")


async def test_devices_that_vanish_are_given_to_nobody(simulated: SimulatedNodes, user: QueueUser) -> None:
    await simulated.add("sim-1", devices=4)
    for name in ("first", "second"):
        await user.serve(name, gpus=2)
        await user.wait_until_on(name, "sim-1")
    await user.serve("waiting")
    await user.wait_for_places("waiting")
    await simulated.set_devices("sim-1", 2)
    await user.delete("first")
    await user.serve("low", priority="low")
    await user.wait_for_places("waiting", "low")
    await user.kill_controller()
    # Nothing waits for as many devices as there were.
    await user.serve("large", gpus=4, priority="high")
    await user.wait_for_status("large", reason="NoSuchHardware", position=None)
    assert (await user.nodes("waiting"), await user.nodes("second")) == ([""], ["sim-1"])
    await user.delete("second")
    await user.wait_until_run("waiting", "low")
