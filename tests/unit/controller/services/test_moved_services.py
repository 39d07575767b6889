"""A mere move in the queue is reported without a new decision, and says what a new decision would say."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from benchmarks.simulated_controller import NAMESPACE, fill, simulated_controller
from benchmarks.simulated_server import SimulatedServer
from controller.placement.board import FRONT, Board
from controller.placement.planner import PlanRules, plan
from controller.placement.standing import ServiceStanding
from controller.reconcile.plan import Plan, Reconciler, Snapshot
from controller.services import reconciler
from controller.services.reconciler import service_reconciler
from controller.services.service_view import ServiceInputs, build_view
from controller.services.status import ServiceView
from controller.services.tokens import KnownTokens, token_secret
from kube.client import Client, Obj
from kube.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    METAL_PROCESSES,
    MODELS,
    PODS,
    ObjectKey,
    Resource,
)
from tests.support import virtual_time
from tests.support.api_objects import NOW, as_service, condition, model, store
from tests.support.eventually import eventually
from tests.support.service_decisions import KEY, SETTINGS, chat_deployment, chat_pod, chat_service, plain_sources
from tests.support.waiting_units import gpu_cell, waiting_unit
from tests.unit.controller.services.test_queue_report import NVIDIA, STANDING, gated_pod

MOVED = msgspec.structs.replace(STANDING, position=2, length=11, message="needs more")


class OneSecret(Client):
    """An API that has the token of `chat`."""

    def __init__(self) -> None:
        self._secret = token_secret(as_service(waiting_chat()[1]), "token", "again")[1]

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        del resource, name, namespace
        return self._secret | {"data": self._secret.get("data") or {"token": "dG9rZW4="}}


def waiting_chat(**metadata: Any) -> tuple[Resource, Obj]:
    resource, chat = chat_service(**NVIDIA)
    status = {"conditions": [condition("Ready", "False", "Queued")], "tokenRotation": "again"}
    return resource, {**chat, "metadata": {**chat["metadata"], **metadata}, "status": status}


class WaitingChat:
    """The reconciler of services, and the service `chat`, which waits in the queue."""

    def __init__(self, *objects: tuple[Resource, Obj]) -> None:
        self.standing: ServiceStanding | None = STANDING
        self.known = store(waiting_chat(), (MODELS, model()), *objects)
        self.now = NOW
        self.reconciler: Reconciler = service_reconciler(
            plain_sources(SETTINGS)._replace(
                tokens=KnownTokens(lambda: self.now), find_standing=lambda _key, _last: self.standing
            )
        )

    async def decide(self, during: Callable[[], object] = lambda: None) -> Plan:
        """Decide as the executor does; `during` is called while the inputs are read."""
        assert self.reconciler.observe is not None
        assert self.reconciler.decided is not None
        self.report()
        inputs: ServiceInputs = await self.reconciler.observe(OneSecret(), Snapshot(self.known, self.now), KEY)
        during()
        snapshot = Snapshot(self.known, self.now, inputs)
        plan = self.reconciler.decide(snapshot, KEY)
        self.reconciler.decided(snapshot, KEY, plan)
        return plan

    def report(self) -> Plan | None:
        assert self.reconciler.report is not None
        return self.reconciler.report(Snapshot(self.known, self.now), KEY)

    def outdate(self) -> None:
        assert self.reconciler.outdate is not None
        self.reconciler.outdate(KEY)


async def test_move_is_reported_as_a_new_decision_would_report_it() -> None:
    chat = WaitingChat((PODS, gated_pod()))
    first = await chat.decide()
    chat.standing = MOVED
    reported = chat.report()
    decided = await chat.decide()
    assert reported is not None
    assert (reported.status, reported.events) == (decided.status, decided.events)
    assert reported.status != first.status
    assert reported.again_seconds == first.again_seconds
    assert reported == Plan(status=reported.status, events=reported.events, again_seconds=reported.again_seconds)


async def test_waiting_service_reports_its_place_within_ten_minutes_by_itself() -> None:
    plan = await WaitingChat((PODS, gated_pod())).decide()
    assert plan.again_seconds is not None
    assert plan.again_seconds <= 600, "docs/queue.md says how old a position may be"


async def test_waiting_service_reports_its_place_for_an_hour_without_another_decision() -> None:
    chat = WaitingChat((PODS, gated_pod()))
    decided = await chat.decide()
    assert decided.again_seconds is not None
    for _ in range(5):
        chat.now += timedelta(seconds=decided.again_seconds)
        plan = chat.report()
        assert plan is not None
        assert plan.again_seconds is not None
        assert plan.again_seconds <= 600


async def test_first_decision_is_never_skipped() -> None:
    assert WaitingChat().report() is None


def forget_standing(chat: WaitingChat) -> None:
    chat.standing = None


def edit(chat: WaitingChat) -> None:
    chat.known.put(*waiting_chat(generation=9, resourceVersion="9"))


def delete(chat: WaitingChat) -> None:
    chat.known.put(*waiting_chat(deletionTimestamp="2026-11-21T12:00:00Z", resourceVersion="9"))


def remake(chat: WaitingChat) -> None:
    chat.known.put(*waiting_chat(uid="another", resourceVersion="9"))


def pass_time(chat: WaitingChat) -> None:
    chat.now += timedelta(days=1)


def turn_clock_back(chat: WaitingChat) -> None:
    chat.now -= timedelta(seconds=1)


def lead_again(chat: WaitingChat) -> None:
    assert chat.reconciler.restart is not None
    chat.reconciler.restart()


@pytest.mark.parametrize(
    "change",
    [WaitingChat.outdate, forget_standing, edit, delete, remake, pass_time, turn_clock_back, lead_again],
    ids=lambda change: change.__name__,
)
async def test_service_of_which_more_has_changed_is_decided(change: Callable[[WaitingChat], None]) -> None:
    chat = WaitingChat((PODS, gated_pod()))
    await chat.decide()
    change(chat)
    assert chat.report() is None


async def test_change_during_a_decision_is_decided_next() -> None:
    chat = WaitingChat((PODS, gated_pod()))
    await chat.decide(chat.outdate)
    assert chat.report() is None
    changed = model()
    changed["metadata"]["resourceVersion"] = "9"
    await chat.decide(lambda: chat.known.put(MODELS, changed))
    assert chat.report() is None


async def test_service_that_serves_with_some_replicas_is_always_decided() -> None:
    objects = (waiting_chat(), (MODELS, model()))
    deployment = chat_deployment(*objects, replicas=2)
    chat = WaitingChat((DEPLOYMENTS, deployment), (PODS, chat_pod()), (PODS, gated_pod("chat-2")))
    await chat.decide()
    assert chat.report() is None


def test_mere_moves_are_told_apart_from_what_may_need_a_decision() -> None:
    changed, moved = [], []

    async def main() -> None:
        board = Board(lambda service: changed.append(service.name), on_move=lambda service: moved.append(service.name))
        cells = [gpu_cell("n1", free=0)]
        units = [waiting_unit(f"s{number}", enqueued_at=float(number)) for number in range(6)]
        for waiting in (units, units[1:]):
            changed.clear()
            board.update(plan(cells, waiting, PlanRules(), 0.0), cells, 0.0, units=waiting)
            await asyncio.sleep(5)

    virtual_time.run(main())
    assert (changed, sorted(moved)) == (["s1", "s2", "s3", "s0"], ["s4", "s5"])


def list_positions(server: SimulatedServer) -> dict[str, int]:
    statuses = {service["metadata"]["name"]: service["status"] for service in server.list_objects(INFERENCE_SERVICES)}
    return {name: status["queue"]["position"] for name, status in statuses.items() if "queue" in status}


def test_moves_of_a_queue_are_reported_without_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimulatedServer()
    built: set[str] = set()
    fill(server, in_pods=0, on_hosts=1, waiting=12, hosts=1, per_host=1)

    def build(snapshot: Snapshot, key: ObjectKey, *facts: Any) -> ServiceView:
        built.add(key.name)
        return build_view(snapshot, key, *facts)

    monkeypatch.setattr(reconciler, "build_view", build)

    async def main() -> None:
        async with simulated_controller(server) as world:
            before = list_positions(server)
            assert sorted(before.values()) == list(range(1, 13))
            leaving = next(name for name, position in before.items() if position == FRONT + 1)
            built.clear()
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
            assert not built & moved
            writes = server.writes
            for key in (ObjectKey(NAMESPACE, service_name) for service_name in after):
                world.controller._enqueue(INFERENCE_SERVICES, key)  # as the resync does, hours later
            await world.settle()
            assert built >= moved
            assert server.writes == writes, "a decision says the same"

    virtual_time.run(main())
