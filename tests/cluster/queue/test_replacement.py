"""Replacement of replicas whose speed has fallen, on the real control plane: docs/placement.md."""

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from aiohttp import web

from crds.meta import CONTROLLER_NAMESPACE
from kube.client import Client, Obj
from kube.resources import CONFIG_MAPS, EVENTS, INFERENCE_SERVICES, PODS, Resource
from kube.store import Store
from kube.watch import Selection, reflect
from tests.cluster.queue.conftest import ENGINE_PORT
from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.cluster.queue.test_placement_by_speed import L4, store_measurements
from tests.cluster.shared_controller import SharedController
from tests.controlplane.network import ADDRESS
from tests.controlplane.process import Process
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.simulated_nodes import SimulatedNodes

EXPECTED, SLOW = 140.0, 40.0
TOKENS = 100
"""Tokens between two readings."""


class CountingEngine:
    """The proxy and engine of every pod, whose lone streams have this speed."""

    def __init__(self) -> None:
        self.speed = EXPECTED
        self._tokens, self._seconds = 0.0, 0.0

    async def complete(self, _request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}})

    async def metrics(self, _request: web.Request) -> web.Response:
        self._tokens += TOKENS
        self._seconds += TOKENS / self.speed
        lines = (
            f"pomona_proxy_lone_tokens_total {self._tokens}",
            f"pomona_proxy_lone_token_seconds_total {self._seconds}",
            "pomona_proxy_request_seconds_count 1",
            "pomona_proxy_request_seconds_sum 1",
            "",
        )
        return web.Response(text="\n".join(lines))


@pytest_asyncio.fixture
async def engine(controller: Process) -> AsyncIterator[CountingEngine]:
    del controller
    served, app = CountingEngine(), web.Application()
    app.router.add_post("/v1/chat/completions", served.complete)
    app.router.add_get("/metrics", served.metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, ENGINE_PORT).start()
    yield served
    await runner.cleanup()


@pytest_asyncio.fixture
async def controller(shared_controller: SharedController) -> Process:
    """A controller that checks every second, and replaces one replica of a namespace in an hour."""
    return await shared_controller.lend(
        *("--min-run=1s", "--metrics-bind-address=0", "--replace-degraded"),
        *("--degrade-check-interval=1s", "--degrade-cool-down=1h"),
    )


@pytest_asyncio.fixture(autouse=True)
async def measurements(simulated: SimulatedNodes, user: QueueUser, client: Client) -> AsyncIterator[None]:
    """The speeds of the Model of the user on the device classes of the nodes, which outlive its services."""
    del simulated
    stored = await store_measurements(client, user.namespace)
    yield
    await client.delete(CONFIG_MAPS, stored, CONTROLLER_NAMESPACE)


class ReadyMonitor:
    """The moments at which a service had fewer ready pods than it wants."""

    def __init__(self, service: str, wanted: int = 1) -> None:
        self.store = Store()
        self.gaps: list[str] = []
        self._service, self._wanted, self._was_ready = service, wanted, False
        self.store.subscribe(self._look)

    def _look(self, _resource: Resource, _old: Obj | None, _new: Obj | None) -> None:
        pods = [
            pod
            for pod in self.store.list(PODS)
            if pod["metadata"]["labels"].get("inference.pomona.dev/service") == self._service
        ]
        ready = [pod["metadata"]["name"] for pod in pods if _serves(pod)]
        if self._was_ready and len(ready) < self._wanted:
            self.gaps.append(f"{pods}")
        self._was_ready |= len(ready) >= self._wanted


def _serves(pod: Obj) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    is_ready = any((condition["type"], condition["status"]) == ("Ready", "True") for condition in conditions)
    return is_ready and "deletionTimestamp" not in pod["metadata"]


async def wait_for_reason(user: QueueUser, reason: str) -> Obj:
    """Wait until condition SpeedDegraded of `chat` has a reason; return it."""

    async def reached() -> Obj:
        status = (await user.client.get(INFERENCE_SERVICES, "chat", user.namespace))["status"]
        conditions: list[Obj] = [
            condition for condition in status["conditions"] if condition["type"] == "SpeedDegraded"
        ]
        assert [condition["reason"] for condition in conditions] == [reason], status
        return conditions[0]

    found = await eventually(reached, RUN_SECONDS)
    assert found is not None
    return found


async def wait_for_note(user: QueueUser, reason: str) -> str:
    """Wait for an Event: it is sent after what it tells, and not again by the next controller."""

    async def is_sent() -> str:
        events = (await user.client.list(EVENTS, user.namespace)).items
        return next((str(event.get("note")) for event in events if event["reason"] == reason), "")

    note = await eventually(is_sent, RUN_SECONDS)
    assert note is not None
    return note


async def wait_until_ready(user: QueueUser, count: int) -> None:
    async def reached() -> bool:
        assert sum(map(_serves, await user.pods("chat"))) == count
        return True

    await eventually(reached, RUN_SECONDS)


async def wait_for_replacement(user: QueueUser, **fields: Any) -> None:
    async def reached() -> bool:
        status = (await user.client.get(INFERENCE_SERVICES, "chat", user.namespace))["status"]
        replacement = status.get("replacement", {})
        assert {name: replacement.get(name) for name in fields} == fields, status
        return True

    await eventually(reached, RUN_SECONDS)


async def test_slow_replica_is_replaced_without_a_moment_without_a_ready_one(
    simulated: SimulatedNodes, user: QueueUser, engine: CountingEngine, client: Client
) -> None:
    await simulated.add("gpu-a", devices=1)
    await user.serve("chat")
    await user.wait_until_on("chat", "gpu-a")
    monitor = ReadyMonitor("chat")
    async with running(reflect(client, monitor.store, Selection(PODS))):
        engine.speed = SLOW
        held = await wait_for_reason(user, "NoBetterPlace")
        assert "on node/gpu-a gives a single request 40.0 of 140 tokens/s; it stays" in held["message"]
        await simulated.add("gpu-l4", devices=1, **L4)
        await simulated.add("gpu-b", devices=1)
        await wait_for_replacement(user, fromPlace="node/gpu-a")
        slow = await wait_for_note(user, "ReplicaSlow")
        assert "a better place, such as node/gpu-b" in slow
        await user.kill_controller()
        await user.wait_until_on("chat", "gpu-b")
        await wait_for_replacement(user, outcome="Moved", fromPlace="node/gpu-a", toPlace="node/gpu-b")
        assert monitor.gaps == []
        engine.speed = EXPECTED
        await wait_for_replacement(user, helped=True)
        # It becomes slow again: that the old node is free does not count before the cool-down is over, which a
        # controller that starts anew finds in the status.
        await user.kill_controller()
        engine.speed = SLOW
        held = await wait_for_reason(user, "CoolDown")
    assert await user.nodes("chat") == ["gpu-b"]
    assert monitor.gaps == []
    assert "replaced by a replica on node/gpu-b" in await wait_for_note(user, "ReplicaMoved")


async def test_one_replica_of_several_is_replaced_and_the_others_stay(
    simulated: SimulatedNodes, user: QueueUser, engine: CountingEngine, client: Client
) -> None:
    await simulated.add("gpu-a", devices=2)
    await user.serve("chat", replicas=2)
    await user.wait_until_on("chat", "gpu-a", "gpu-a")
    await wait_until_ready(user, 2)
    before, monitor = await user.uids("chat"), ReadyMonitor("chat", 2)
    async with running(reflect(client, monitor.store, Selection(PODS))):
        engine.speed = SLOW
        await wait_for_reason(user, "NoBetterPlace")
        await simulated.add("gpu-b", devices=8)
        await wait_for_replacement(user, outcome="Moved", fromPlace="node/gpu-a", toPlace="node/gpu-b")
        await user.wait_until_on("chat", "gpu-a", "gpu-b")
        await wait_for_reason(user, "CoolDown")
    assert len(set(before) & set(await user.uids("chat"))) == 1
    assert monitor.gaps == []
