"""The queue of accelerators on the real API server and the real scheduler: order, preemption, and no device twice."""

from crds.meta import ENQUEUED_AT
from kube.resources import PODS
from tests.cluster.queue.queue_user import QueueUser
from tests.support.simulated_nodes import GPU, SimulatedNodes


async def test_a_critical_service_takes_the_place_of_the_least_important_ones(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    await simulated.add("sim-1", devices=4)
    for name, priority in (("normal", "normal"), ("low", "low"), ("batch-1", "batch"), ("batch-2", "batch")):
        await user.serve(name, priority=priority)
        await user.wait_until_on(name, "sim-1")
    await user.wait_until_evictable("low", "batch-1", "batch-2")
    (first,) = await user.pods("batch-2")
    simulated.hold_ends()
    await user.serve("critical", gpus=2, priority="critical")
    # Both of batch, and no other; nothing is admitted before they have ended.
    await user.wait_until_on("batch-1", "")
    await user.wait_until_on("batch-2", "")
    assert await user.nodes("critical") == [""]
    assert await user.nodes("low") == ["sim-1"]
    await user.serve("late-batch", priority="batch")
    await user.wait_until_queued("late-batch")
    simulated.let_end()
    await user.wait_until_on("critical", "sim-1")
    (successor,) = await user.pods("batch-2")
    created, place = first["metadata"]["creationTimestamp"], successor["metadata"]["annotations"][ENQUEUED_AT]
    assert place.startswith(created.removesuffix("Z")), "the successor has the place of its predecessor"
    await user.delete("critical")
    await user.wait_until_on("batch-1", "sim-1")
    await user.wait_until_on("batch-2", "sim-1")
    assert await user.nodes("late-batch") == [""]


async def test_a_foreign_pod_that_takes_a_freed_device_costs_one_more_eviction_and_no_device_twice(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    await simulated.add("sim-1", devices=3)
    names = ("low-1", "low-2", "low-3")
    for name in names:
        await user.serve(name, priority="low")
        await user.wait_until_on(name, "sim-1")
    simulated.hold_ends()
    await user.wait_until_evictable(*names)
    await user.serve("critical", priority="critical")
    await user.wait_until_waiting(names, 1)
    # The scheduler binds the thief as soon as the victim has ended, while no controller gives the device to another.
    await user.controller.kill()
    requests = {"requests": {GPU: "1"}, "limits": {GPU: "1"}}
    thief = {"containers": [{"name": "main", "image": "any", "resources": requests}]}
    await user.client.create(PODS, {"metadata": {"name": "thief", "namespace": user.namespace}, "spec": thief})
    simulated.let_end()
    await user.wait_until_bound("thief")
    user.controller.start()
    await user.wait_until_on("critical", "sim-1")
    await user.wait_until_waiting(names, 2)
    await user.client.delete(PODS, "thief", user.namespace)
    await user.wait_until_waiting(names, 1)
