"""The queue of accelerators on the real API server and the real scheduler: order, preemption, and no device twice."""

from controller.placement.admission_writer import EVICTION_PATIENCE_SECONDS
from crds.meta import ENQUEUED_AT, LABEL_SERVICE
from kube.resources import POD_DISRUPTION_BUDGETS, PODS
from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.support.simulated_nodes import GPU, SimulatedNodes


async def test_pods_are_admitted_by_priority_then_by_time(simulated: SimulatedNodes, user: QueueUser) -> None:
    await simulated.add("sim-1", devices=1)
    await user.serve("running", priority="critical")
    await user.wait_until_on("running", "sim-1")
    for name, priority in (("batch", "batch"), ("late", "normal"), ("high", "high")):
        await user.serve(name, priority=priority)
        await user.wait_until_queued(name)
    for first in ("running", "high", "late"):
        following = {"running": "high", "high": "late", "late": "batch"}[first]
        await user.delete(first)
        await user.wait_until_on(following, "sim-1")


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


async def test_a_disruption_budget_delays_an_eviction_and_causes_no_other(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    await simulated.add("sim-1", devices=2)
    for name in ("low", "batch"):
        await user.serve(name, priority=name)
        await user.wait_until_on(name, "sim-1")
    await user.wait_until_evictable("low", "batch")
    spec = {"minAvailable": 1, "selector": {"matchLabels": {LABEL_SERVICE: "batch"}}}
    metadata = {"name": "never", "namespace": user.namespace}
    await user.client.create(POD_DISRUPTION_BUDGETS, {"metadata": metadata, "spec": spec})
    await user.wait_until_budget_refuses("never")
    (protected,) = await user.pods("batch")
    await user.serve("critical", priority="critical")
    await user.wait_for_status("critical", reason="Draining")
    await user.wait_until_on("critical", "sim-1", limit_seconds=EVICTION_PATIENCE_SECONDS + RUN_SECONDS)
    assert await user.nodes("low") == ["sim-1"]
    (successor,) = await user.pods("batch")
    assert successor["metadata"]["uid"] != protected["metadata"]["uid"]
    await user.client.delete(POD_DISRUPTION_BUDGETS, "never", user.namespace)


async def test_a_killed_controller_books_nothing_twice(simulated: SimulatedNodes, user: QueueUser) -> None:
    for name in ("sim-1", "sim-2"):
        await simulated.add(name, devices=4)
    for number in range(12):
        await user.serve(f"service-{number}", priority=("low", "normal", "high")[number % 3])
        if number % 4 == 3:
            await user.kill_controller()
    high, normal, low = ([f"service-{number}" for number in range(first, 12, 3)] for first in (2, 1, 0))
    await user.wait_until_run(*high, *normal)
    await user.wait_until_queued(*low)
    await user.kill_controller()
    for name in high:
        await user.delete(name)
    await user.wait_until_run(*low)
