"""Scenarios of a queue on the real API server and scheduler: edits, and what people change while services wait."""

from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES
from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.support.eventually import eventually
from tests.support.simulated_nodes import SimulatedNodes

PRIORITIES = ("low", "normal", "batch", "high")


async def list_places(user: QueueUser, count: int) -> list[str]:
    """Wait until all services in the queue have different places of this many; return their names in that order."""

    async def settled() -> list[str]:
        places: dict[str, str] = {}
        for item in (await user.client.list(INFERENCE_SERVICES, user.namespace)).items:
            if place := item.get("status", {}).get("queue", {}).get("place"):
                places[place] = item["metadata"]["name"]
        wanted = [f"{number}/{count}" for number in range(1, count + 1)]
        assert places.keys() == set(wanted), f"places {sorted(places)}, not {count}"
        return [places[place] for place in wanted]

    return await eventually(settled, RUN_SECONDS)


async def check_serves(user: QueueUser, service: str) -> bool:
    """Check that the Service of a service has a pod that answers."""
    listed = await user.client.list(
        ENDPOINT_SLICES, user.namespace, label_selector=f"kubernetes.io/service-name={service}"
    )
    endpoints = [endpoint for item in listed.items for endpoint in item.get("endpoints") or ()]
    assert any(each["conditions"].get("ready") for each in endpoints), endpoints
    return True


async def wait_until_replaced(user: QueueUser, before: str) -> None:
    """Wait until the service `edited` has another pod in the place of an earlier one, before the service `waiting`."""

    async def is_replaced() -> bool:
        nodes = {pod["metadata"]["uid"]: pod["spec"].get("nodeName") for pod in await user.pods("edited")}
        assert await user.nodes("waiting") == [""], "the place of the edited service was given away"
        assert before not in nodes
        assert [*nodes.values()] == ["sim-1"]
        return True

    await eventually(is_replaced, RUN_SECONDS)


async def test_twenty_services_are_admitted_in_the_order_of_their_places(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    await simulated.add("sim-1", devices=8)
    await user.serve("holder", gpus=8, priority="critical")
    await user.wait_until_on("holder", "sim-1")
    for number in range(20):
        priority = PRIORITIES[number % len(PRIORITIES)]
        await user.serve(f"{priority}-{number}", priority=priority)
    order = await list_places(user, 20)
    ranks = [("high", "normal", "low", "batch").index(name.partition("-")[0]) for name in order]
    assert ranks == sorted(ranks), f"not by priority: {order}"
    await user.delete("holder")
    await user.wait_until_run(*order[:8])
    await user.kill_controller()
    assert await list_places(user, 12) == order[8:]
    for leaving, following in zip(order[:4], order[8:12], strict=True):
        await user.delete(leaving)
        await user.wait_until_run(following)
    assert await list_places(user, 8) == order[12:]
    admitted = [key.name.rsplit("-", 2)[0] for key in simulated.bound if key.name.rsplit("-", 2)[0] in order]
    assert set(admitted[:8]) == set(order[:8])
    assert admitted[8:] == order[8:12]


async def test_an_edit_on_a_full_node_rolls_out_in_its_own_place(simulated: SimulatedNodes, user: QueueUser) -> None:
    await simulated.add("sim-1", devices=1)
    await user.serve("edited", contextLength=2048)
    await user.wait_until_on("edited", "sim-1")
    await user.wait_for_a_later_second()
    await user.serve("waiting")
    await user.wait_for_places("waiting")
    (before,) = await user.uids("edited")
    await user.edit("edited", contextLength=4096)
    await wait_until_replaced(user, before)
    await user.wait_for_places("waiting")


async def test_an_edit_that_needs_more_waits_while_the_previous_pod_serves(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    await simulated.add("sim-1", devices=2)
    for name in ("edited", "other"):
        await user.serve(name)
        await user.wait_until_on(name, "sim-1")
    await eventually(lambda: check_serves(user, "edited"), RUN_SECONDS)
    await user.wait_for_a_later_second()
    await user.serve("waiting")
    await user.wait_for_places("waiting")
    (before,) = await user.uids("edited")
    await user.edit("edited", hardware={"accelerator": "nvidia", "count": 2})
    # The replica keeps its place, which is before that of the one that came later.
    await user.wait_for_places("edited", "waiting")
    await user.kill_controller()
    await user.wait_until_on("edited", "", "sim-1")
    assert before in await user.uids("edited")
    await check_serves(user, "edited")
    await user.delete("other")
    await wait_until_replaced(user, before)


async def test_scaling_while_queued_keeps_the_first_place(simulated: SimulatedNodes, user: QueueUser) -> None:
    await simulated.add("sim-1", devices=1)
    await user.serve("holder")
    await user.wait_until_on("holder", "sim-1")
    await user.serve("scaled")
    await user.wait_for_places("scaled")
    first = (await user.wait_for_status("scaled"))["enqueuedAt"]
    await user.wait_for_a_later_second()
    await user.serve("between")
    await user.wait_for_status("between", place="2/2")
    await user.edit("scaled", replicas=4)
    await user.wait_for_status("scaled", place="1/5")
    await user.wait_for_status("between", length=5)
    await user.edit("scaled", replicas=1)
    await user.wait_for_places("scaled", "between")
    await user.wait_for_status("scaled", enqueuedAt=first)
    await user.delete("holder")
    await user.wait_until_on("scaled", "sim-1")


async def test_a_service_that_is_suspended_leaves_the_queue(simulated: SimulatedNodes, user: QueueUser) -> None:
    await simulated.add("sim-1", devices=1)
    await user.serve("holder", priority="critical")
    await user.wait_until_on("holder", "sim-1")
    await user.serve("first", priority="high")
    await user.serve("second")
    await user.wait_for_places("first", "second")
    await user.edit("first", suspend=True)

    async def is_suspended() -> bool:
        status = (await user.client.get(INFERENCE_SERVICES, "first", user.namespace))["status"]
        assert (status["phase"], status.get("queue"), await user.pods("first")) == ("Suspended", None, [])
        return True

    await eventually(is_suspended, RUN_SECONDS)
    await user.wait_for_places("second")
    await user.edit("first", suspend=False)
    await user.wait_for_places("first", "second")
    await user.edit("first", suspend=True)
    await user.wait_for_places("second")
    await user.delete("holder")
    await user.wait_until_on("second", "sim-1")


async def test_a_priority_that_is_edited_moves_the_place_without_a_restart(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    await simulated.add("sim-1", devices=1)
    await user.serve("holder", priority="high")
    await user.wait_until_on("holder", "sim-1")
    (running,) = await user.uids("holder")
    await user.serve("first", priority="normal")
    await user.serve("second", priority="low")
    await user.wait_for_places("first", "second")
    places = {name: (await user.wait_for_status(name))["enqueuedAt"] for name in ("first", "second")}
    await user.edit("second", priority="high")
    await user.wait_for_places("second", "first")
    await user.edit("holder", priority="critical")
    await user.kill_controller()
    await user.edit("first", priority="critical")
    await user.wait_for_places("first", "second")
    for name, since in places.items():
        await user.wait_for_status(name, enqueuedAt=since)
    assert await user.uids("holder") == {running}
