"""A service that has moved in the queue reports its new place."""

from benchmarks.simulated_controller import NAMESPACE, fill, simulated_controller
from benchmarks.simulated_server import SimulatedServer
from controller.placement.board import FRONT
from controller.reconcile.plan import Snapshot
from controller.services.reconciler import service_reconciler
from controller.services.service_view import ServiceInputs
from controller.services.tokens import KnownTokens, token_secret
from kube.client import Client, Obj
from kube.resources import INFERENCE_SERVICES, METAL_PROCESSES, MODELS, PODS, ObjectKey, Resource
from tests.support import virtual_time
from tests.support.api_objects import NOW, as_service, condition, model, store
from tests.support.eventually import eventually
from tests.support.service_decisions import KEY, SETTINGS, chat_service, plain_sources
from tests.unit.controller.services.test_queue_report import NVIDIA, STANDING, gated_pod


class OneSecret(Client):
    """An API that has the token of `chat`."""

    def __init__(self) -> None:
        self._secret = token_secret(as_service(waiting_chat()[1]), "token", "again")[1]

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        del resource, name, namespace
        return self._secret | {"data": self._secret.get("data") or {"token": "dG9rZW4="}}


def waiting_chat() -> tuple[Resource, Obj]:
    resource, chat = chat_service(**NVIDIA)
    status = {"conditions": [condition("Ready", "False", "Queued")], "tokenRotation": "again"}
    return resource, {**chat, "status": status}


async def test_waiting_service_reports_its_place_within_ten_minutes_by_itself() -> None:
    known = store(waiting_chat(), (MODELS, model()), (PODS, gated_pod()))
    sources = plain_sources(SETTINGS)._replace(
        tokens=KnownTokens(lambda: NOW), find_standing=lambda _key, _last: STANDING
    )
    reconciler = service_reconciler(sources)
    assert reconciler.observe is not None
    inputs: ServiceInputs = await reconciler.observe(OneSecret(), Snapshot(known, NOW), KEY)
    plan = reconciler.decide(Snapshot(known, NOW, inputs), KEY)
    assert plan.again_seconds is not None
    assert plan.again_seconds <= 600, "docs/queue.md says how old a position may be"


def list_positions(server: SimulatedServer) -> dict[str, int]:
    statuses = {service["metadata"]["name"]: service["status"] for service in server.list_objects(INFERENCE_SERVICES)}
    return {name: status["queue"]["position"] for name, status in statuses.items() if "queue" in status}


def test_moves_of_a_queue_are_reported() -> None:
    server = SimulatedServer()
    fill(server, in_pods=0, on_hosts=1, waiting=12, hosts=1, per_host=1)

    async def main() -> None:
        async with simulated_controller(server) as world:
            before = list_positions(server)
            assert sorted(before.values()) == list(range(1, 13))
            leaving = next(name for name, position in before.items() if position == FRONT + 1)
            process = next(
                candidate
                for candidate in server.list_objects(METAL_PROCESSES)
                if leaving in candidate["metadata"]["name"]
            )
            client = Client(server)
            await client.delete(INFERENCE_SERVICES, leaving, NAMESPACE)
            await client.delete(METAL_PROCESSES, process["metadata"]["name"], NAMESPACE)
            await eventually(lambda: sorted(list_positions(server).values()) == list(range(1, 12)))
            await world.settle()
            after = list_positions(server)
            moved = {name for name, position in after.items() if position != before[name]}
            assert len(moved) == 12 - FRONT - 1
            writes = server.writes
            for key in (ObjectKey(NAMESPACE, service_name) for service_name in after):
                world.controller._enqueue(INFERENCE_SERVICES, key)  # as the resync does, hours later
            await world.settle()
            assert server.writes == writes, "a decision says the same"

    virtual_time.run(main())
