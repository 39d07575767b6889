"""Changes by people while victims still answer their last requests: one victim is enough, and nobody loses a place."""

from controller.placement.admission_writer import EVICTION_PATIENCE_SECONDS
from crds.meta import NOMINATED
from kube.resources import INFERENCE_SERVICES
from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.support.eventually import eventually
from tests.support.simulated_nodes import SimulatedNodes


async def start_preemption(simulated: SimulatedNodes, user: QueueUser) -> None:
    """Fill a node with two services of low priority, and let a critical one wait for the end of one of them."""
    await simulated.add("sim-1", devices=2)
    await user.serve("kept", priority="normal")
    await user.wait_until_on("kept", "sim-1")
    await user.serve("victim", priority="low")
    await user.wait_until_on("victim", "sim-1")
    await user.wait_until_evictable("kept", "victim")
    simulated.hold_ends()
    await user.serve("critical", priority="critical", contextLength=2048)
    await user.wait_for_status("critical", reason="Draining")
    await user.wait_until_on("victim", "")


async def test_an_edit_of_the_preemptor_costs_no_second_victim(simulated: SimulatedNodes, user: QueueUser) -> None:
    await start_preemption(simulated, user)
    kept = await user.uids("kept")
    (before,) = await user.uids("critical")
    await user.wait_for_a_later_second()
    await user.edit("critical", contextLength=4096)

    async def is_promised() -> bool:
        """Return whether the pod of the later spec is promised the place."""
        pods = [pod for pod in await user.pods("critical") if pod["metadata"]["uid"] != before]
        return any(NOMINATED in pod["metadata"]["annotations"] for pod in pods)

    await eventually(is_promised, RUN_SECONDS)
    await user.kill_controller()
    simulated.let_end()

    async def is_replaced() -> bool:
        assert await user.nodes("critical") == ["sim-1"]
        return before not in await user.uids("critical")

    await eventually(is_replaced, RUN_SECONDS)
    await user.wait_for_places("victim")
    assert await user.uids("kept") == kept


async def test_a_victim_comes_back_at_once_if_its_preemptor_is_gone(simulated: SimulatedNodes, user: QueueUser) -> None:
    await start_preemption(simulated, user)
    await user.serve("later", priority="low")
    await user.wait_until_queued("later")
    await user.delete("critical")
    simulated.let_end()
    await user.wait_until_on("victim", "sim-1")
    await user.wait_for_places("later")


async def test_a_victim_that_is_suspended_comes_back_behind_those_that_wait_by_then(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    await start_preemption(simulated, user)
    await user.serve("later", priority="low")
    await user.wait_for_places("critical", "victim", "later")
    await user.edit("victim", suspend=True)
    await user.wait_for_places("critical", "later")
    simulated.let_end()
    await user.wait_until_on("critical", "sim-1")
    await user.wait_for_places("later")
    await user.edit("victim", suspend=False)
    await user.wait_for_places("later", "victim")


async def test_a_promised_node_that_vanishes_is_replaced_by_another_one(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    await start_preemption(simulated, user)
    await simulated.add("sim-2", devices=1)
    # A free device is better than one that somebody must leave.
    await user.wait_until_on("critical", "sim-2")
    await user.wait_for_places("victim")
    simulated.let_end()
    await user.wait_until_on("victim", "sim-1")


async def test_one_of_several_replicas_makes_room_and_the_others_serve(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    await simulated.add("sim-1", devices=3)
    await user.serve("wide", priority="low", replicas=3)
    await user.wait_until_on("wide", "sim-1", "sim-1", "sim-1")
    await user.wait_until_evictable("wide")
    await user.serve("critical", priority="critical")
    await user.wait_until_on("critical", "sim-1")
    await user.wait_until_on("wide", "", "sim-1", "sim-1")
    await user.wait_for_places("wide")

    async def is_degraded() -> bool:
        status = (await user.client.get(INFERENCE_SERVICES, "wide", user.namespace))["status"]
        assert (status["phase"], status.get("readyReplicas")) == ("Degraded", 2), status
        return True

    await eventually(is_degraded, RUN_SECONDS)
    # The budget of the service, which is for drains, does not hold up a second eviction.
    await user.wait_until_evictable("wide")
    await user.serve("other", priority="critical")
    await user.wait_until_on("other", "sim-1", limit_seconds=EVICTION_PATIENCE_SECONDS - 5)
    await user.delete("other")
    await user.wait_until_on("wide", "", "sim-1", "sim-1")
    # The replica that waits is given up first.
    await user.edit("wide", replicas=2)
    await user.wait_until_on("wide", "sim-1", "sim-1")
    await user.edit("wide", replicas=3)
    await user.delete("critical")
    await user.wait_until_on("wide", "sim-1", "sim-1", "sim-1")
