"""Services given to the real Kueue: admission by its quota, the place in its queue, and edits that it refuses."""

from typing import Any

from crds.meta import KUEUE_QUEUE_NAME
from kube.client import Client, Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES
from tests.cluster.queue.queue_user import QueueUser
from tests.controlplane.kueue import Kueue
from tests.kueue.conftest import make_queue
from tests.support.eventually import eventually
from tests.support.simulated_nodes import SimulatedNodes

GIVEN: dict[str, Any] = {"scheduling": {"mode": "Kueue", "queueName": "models"}}


async def read_status(user: QueueUser, service: str) -> Obj:
    status: Obj = (await user.client.get(INFERENCE_SERVICES, service, user.namespace)).get("status", {})
    return status


async def wait_for_place(user: QueueUser, service: str, place: str) -> Obj:
    async def reached() -> Obj:
        status = await read_status(user, service)
        assert status.get("queue", {}).get("place") == place, status
        return status

    return await eventually(reached)


async def wait_for_reason(user: QueueUser, service: str, reason: str) -> str:
    async def reached() -> str:
        ready = (await read_status(user, service))["conditions"][0]
        assert ready["reason"] == reason, ready
        return str(ready["message"])

    return await eventually(reached)


async def test_services_are_admitted_by_quota_and_priority_and_see_their_place(
    kueue: Kueue, simulated: SimulatedNodes, user: QueueUser
) -> None:
    del kueue
    await make_queue(user.plane, user.namespace, devices=1)
    await simulated.add("sim-1", devices=4)
    await user.serve("first", **GIVEN)
    await user.wait_until_on("first", "sim-1")
    await user.serve("second", **GIVEN)
    status = await wait_for_place(user, "second", "1/1")
    assert status["phase"] == "WaitingForGPU"
    assert (status["queue"]["pool"], status["queue"]["position"]) == ("kueue/models", 1)
    await user.serve("third", priority="high", **GIVEN)
    await wait_for_place(user, "third", "1/2")
    await wait_for_place(user, "second", "2/2")
    message = await wait_for_reason(user, "second", "WaitingForKueue")
    assert "in LocalQueue models of Kueue at position 2 of 2, with 1 ahead in its ClusterQueue" in message
    await user.delete("first")
    await user.wait_until_on("third", "sim-1")
    assert await user.nodes("second") == [""]
    await wait_for_place(user, "second", "1/1")
    await user.delete("third")
    await user.wait_until_on("second", "sim-1")

    async def is_ready() -> bool:
        status = await read_status(user, "second")
        assert "queue" not in status, status
        return bool(status["phase"] == "Ready")

    await eventually(is_ready)


async def test_deployment_that_kueue_changed_is_not_written_again(
    kueue: Kueue, simulated: SimulatedNodes, user: QueueUser, client: Client
) -> None:
    del kueue
    await make_queue(user.plane, user.namespace, devices=1)
    await simulated.add("sim-1", devices=4)
    await user.serve("chat", **GIVEN)
    await user.wait_until_on("chat", "sim-1")
    await wait_for_reason(user, "chat", "Serving")
    before = await client.get(DEPLOYMENTS, "chat", user.namespace)
    await client.patch_merge(
        INFERENCE_SERVICES, "chat", user.namespace, {"metadata": {"labels": {"touched": "yes"}}}, field_manager="user"
    )
    await user.serve("other", **GIVEN)
    await wait_for_place(user, "other", "1/1")
    after = await client.get(DEPLOYMENTS, "chat", user.namespace)
    assert after["metadata"]["generation"] == before["metadata"]["generation"]


async def test_missing_queue_is_named_and_found_once_it_exists(
    kueue: Kueue, simulated: SimulatedNodes, user: QueueUser
) -> None:
    del kueue
    await simulated.add("sim-1", devices=4)
    await user.serve("chat", **GIVEN)
    message = await wait_for_reason(user, "chat", "LocalQueueNotFound")
    assert "edit spec.scheduling.queueName" in message
    await make_queue(user.plane, user.namespace, devices=1)
    await user.wait_until_on("chat", "sim-1")


async def test_service_that_serves_moves_to_another_mode_and_back(
    kueue: Kueue, simulated: SimulatedNodes, user: QueueUser
) -> None:
    del kueue
    await make_queue(user.plane, user.namespace, devices=1)
    await simulated.add("sim-1", devices=4)
    await user.serve("chat", scheduling={"mode": "Native"})
    await user.wait_until_on("chat", "sim-1")
    await wait_for_reason(user, "chat", "Serving")
    await user.edit("chat", **GIVEN)

    async def is_of(queue: str | None) -> bool:
        pods = await user.pods("chat")
        assert [pod["metadata"]["labels"].get(KUEUE_QUEUE_NAME) for pod in pods] == [queue]
        return bool(pods[0]["spec"].get("nodeName"))

    await eventually(lambda: is_of("models"))
    await user.edit("chat", scheduling={"mode": "Native", "queueName": None})
    await eventually(lambda: is_of(None))


async def test_edit_is_rolled_out_although_the_quota_is_full(
    kueue: Kueue, simulated: SimulatedNodes, user: QueueUser
) -> None:
    del kueue
    await make_queue(user.plane, user.namespace, devices=1)
    await simulated.add("sim-1", devices=4)
    await user.serve("chat", **GIVEN)
    await user.wait_until_on("chat", "sim-1")
    await wait_for_reason(user, "chat", "Serving")
    (earlier,) = await user.pods("chat")
    await user.edit("chat", resources={"cpu": "100m"})

    async def is_replaced() -> bool:
        pods = await user.pods("chat")
        assert [pod["spec"].get("nodeName") for pod in pods] == ["sim-1"], "the earlier pod has not made way"
        return bool(pods[0]["metadata"]["uid"] != earlier["metadata"]["uid"])

    await eventually(is_replaced)


async def test_stopped_queue_says_that_it_admits_nothing(
    kueue: Kueue, simulated: SimulatedNodes, user: QueueUser
) -> None:
    del kueue
    queue = await make_queue(user.plane, user.namespace, devices=1)
    await simulated.add("sim-1", devices=4)
    await user.plane.request("PATCH", queue, {"spec": {"stopPolicy": "Hold"}})
    await user.serve("chat", **GIVEN)

    async def is_told() -> bool:
        return "admits nothing now: Can't submit new workloads" in await wait_for_reason(
            user, "chat", "WaitingForKueue"
        )

    await eventually(is_told)
    await user.plane.request("PATCH", queue, {"spec": {"stopPolicy": "None"}})
    await user.wait_until_on("chat", "sim-1")


async def test_kueue_that_does_not_answer_leaves_other_services_alone(
    kueue: Kueue, simulated: SimulatedNodes, user: QueueUser
) -> None:
    await make_queue(user.plane, user.namespace, devices=1)
    await simulated.add("sim-1", devices=4)
    await user.serve("first", **GIVEN)
    await user.wait_until_on("first", "sim-1")
    await user.serve("second", **GIVEN)
    await wait_for_place(user, "second", "1/1")
    kueue.suspend()
    try:

        async def is_unknown() -> bool:
            message = await wait_for_reason(user, "second", "WaitingForKueue")
            assert "does not answer" in message, message
            return "position" not in (await read_status(user, "second"))["queue"]

        await eventually(is_unknown, 150)
    finally:
        kueue.resume()
    await wait_for_place(user, "second", "1/1")
