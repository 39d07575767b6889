"""The queue as a user sees it on a real API server: places that move, and hardware that does not exist."""

from typing import Any

from kube.client import Obj
from kube.resources import INFERENCE_SERVICES
from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.support.eventually import eventually
from tests.support.simulated_nodes import GPU, SimulatedNodes


async def wait_for_status(user: QueueUser, service: str, phase: str, **queue: Any) -> Obj:
    """Wait until a service has this phase and these fields of status.queue; return its status."""

    async def reached() -> Obj:
        found = await user.client.get(INFERENCE_SERVICES, service, user.namespace)
        status: Obj = found.get("status", {})
        shown = {name: status.get("queue", {}).get(name) for name in queue}
        assert (status.get("phase"), shown) == (phase, queue), f"{service}: {status.get('queue')}"
        return status

    return await eventually(reached, RUN_SECONDS)


async def test_places_move_and_are_gone_with_the_wait(simulated: SimulatedNodes, user: QueueUser) -> None:
    await simulated.add("sim-1", devices=1)
    await user.serve("running")
    await user.wait_until_on("running", "sim-1")
    await user.serve("first")
    await wait_for_status(user, "first", "WaitingForGPU", place="1/1", reason="InsufficientDevices", position=1)
    # Times of creation are in whole seconds, so another priority orders the two.
    await user.serve("second", priority="low")
    status = await wait_for_status(user, "second", "WaitingForGPU", place="2/2", aheadByPriority={"normal": 1})
    assert status["queue"]["waitingFor"] == f"{GPU}: 1"
    await wait_for_status(user, "first", "WaitingForGPU", place="1/2")
    await user.delete("running")
    await user.wait_until_on("first", "sim-1")
    await wait_for_status(user, "first", "Ready", place=None)
    await wait_for_status(user, "second", "WaitingForGPU", place="1/1")


async def test_hardware_that_does_not_exist_has_no_place(simulated: SimulatedNodes, user: QueueUser) -> None:
    await simulated.add("sim-1", devices=4)
    await user.serve("huge", gpus=16)
    status = await wait_for_status(user, "huge", "WaitingForGPU", reason="NoSuchHardware", position=None)
    (ready,) = (each for each in status["conditions"] if each["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NoSuchHardware")
    assert f"the largest, sim-1, has {GPU}: 4" in ready["message"]
    await simulated.add("sim-2", devices=16)
    await user.wait_until_on("huge", "sim-2")
