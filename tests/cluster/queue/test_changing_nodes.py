"""Nodes that change under the queue: they vanish, are cordoned, tainted or relabelled, and lose devices."""

from tests.cluster.queue.queue_user import QueueUser
from tests.support.simulated_nodes import SimulatedNodes


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
