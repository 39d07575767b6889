"""Admission in races: claims that are out of date, answers that are lost, objects that change after the decision."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from controller.placement import admission
from controller.placement.admission_writer import AdmissionWriter
from controller.placement.ledger import LEDGER, Claim, FreedPlace, LedgerContent
from controller.placement.observed_units import LATE_SECONDS
from controller.placement.process_units import MOST_ENDING_SECONDS
from controller.placement.units import UnitKey
from controller.placement.unreported_ends import UNREPORTED_SECONDS
from controller.placement.unscheduled_pods import PINNED_SECONDS
from controller.reconcile.plan import Leading
from crds.meta import CONTROLLER_NAMESPACE, NOMINATED
from kube.client import Obj
from kube.errors import ApiError, Conflict, LeadershipLost
from kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    Resource,
)
from tests.support import queue_units, virtual_time
from tests.support.admission_api import AdmissionBench, SilentRecorder
from tests.support.api_objects import GIB, host, process, store
from tests.support.eventually import eventually
from tests.support.queue_objects import deployment_of, queue_pod, queued_service, timestamp
from tests.unit.controller.placement.test_admission_pods import (
    CLAIM,
    LONG_AGO,
    admitted,
    bench,
    budget,
    node,
    play,
    unschedulable,
    victim,
    written,
)

OF_OTHER = LedgerContent(leader="other", claims={"uid-a": CLAIM})


@pytest.mark.parametrize(
    ("names", "cells"),
    [
        pytest.param(("a",), ("node/n1", "node/n1"), id="two cells"),
        pytest.param(("a",), ("host/one",), id="a host"),
        pytest.param((), (), id="no object"),
    ],
)
def test_claim_that_people_have_damaged_stops_nothing(names: tuple[str, ...], cells: tuple[str, ...]) -> None:
    claim = Claim(kind="pod", namespace="team", names=names, cells=cells)
    found = bench(queue_pod("a"), ledger=LedgerContent(leader="other", claims={"uid-a": claim}))
    found.known.put(METAL_HOSTS, host("one"))
    assert play(found).api.tries == [("a", "n1")]


@pytest.mark.parametrize("is_seen", [True, False], ids=["its service is suspended", "its pod is not seen yet"])
def test_cell_of_a_claim_whose_unit_is_not_seen_goes_to_nobody_else(is_seen: bool) -> None:
    """Another leader is giving it to a pod that counts as no unit here; its write may still arrive."""
    found = bench(queue_pod("a"), queue_pod("b", service="vip"), ledger=OF_OTHER)
    if is_seen:
        service = queued_service(suspend=True)
        service["metadata"]["resourceVersion"] = "2"
        found.change(INFERENCE_SERVICES, service)
    else:
        found.known.remove(PODS, "team", "a", uid="uid-a")
    arrives, patch = asyncio.Event(), found.api.patch_json

    async def patch_json(resource: Resource, name: str, *arguments: Any, **options: Any) -> Obj:
        if name == "a":
            await arrives.wait()
        return await patch(resource, name, *arguments, **options)

    found.api.patch_json = patch_json  # type: ignore[method-assign]

    async def main() -> None:
        async with found.running():
            await asyncio.sleep(30)
            assert found.api.tries == []
            arrives.set()
            await asyncio.sleep(30)

    virtual_time.run(main())
    assert found.api.tries == [("a", "n1")]


def test_ledger_that_nests_without_end_counts_as_empty() -> None:
    found = bench(queue_pod("a"))
    found.api.put(CONFIG_MAPS, {**written(OF_OTHER), "data": {"ledger.json": '{"x":' * 100_000}})
    assert play(found).api.tries == [("a", "n1")]


def test_claims_of_another_leader_survive_a_lost_answer_while_the_ledger_is_taken_over() -> None:
    found = bench(queue_pod("first", service="mail"), nodes=(node("n0"),))
    freed = FreedPlace(
        service="uid-chat", unit="uid-gone", namespace="team", name="gone", enqueued_at="2026-01-01T00:00:01.000000Z"
    )

    def lead_elsewhere() -> None:
        content = LedgerContent(leader="other", claims={"uid-a": CLAIM}, freed=(freed,))
        metadata = {"name": LEDGER, "namespace": CONTROLLER_NAMESPACE, "resourceVersion": "9000"}
        found.api.put(CONFIG_MAPS, {**written(content), "metadata": metadata})

    async def main() -> None:
        async with found.running():
            await asyncio.sleep(5)
            lead_elsewhere()
            found.api.lost_ledger_answers = 1
            for name, priority in (("vip", "critical"), ("chat", "normal")):
                found.known.put(INFERENCE_SERVICES, queued_service(name, created=LONG_AGO, priority=priority))
                found.known.put(DEPLOYMENTS, deployment_of(name))
            found.change(PODS, queue_pod("b", service="vip"))
            found.change(PODS, queue_pod("a"))
            found.change(NODES, node("n1"))
            await asyncio.sleep(20)

    virtual_time.run(main())
    assert found.api.tries == [("first", "n0"), ("a", "n1")], "the other leader may still send its write"
    assert found.api.lost_ledger_answers == 0


@pytest.mark.parametrize("begins_well", [True, False], ids=["while it leads", "when it begins to lead"])
def test_units_whose_turn_the_ledger_does_not_take_say_so(*, begins_well: bool) -> None:
    refusal = ApiError("patch configmaps pomona-system/pomona-queue", status=422, message="field is immutable")
    found = bench(victim("v", "low"), nodes=(node("n1"), node("n2")), ledger=LedgerContent())

    async def main() -> None:
        async with found.running():
            await asyncio.sleep(5 if begins_well else 0)
            found.api.refuse_ledger = lambda: refusal
            for name, priority in (("vip", "critical"), ("chat", "normal"), ("mail", "batch")):
                found.known.put(INFERENCE_SERVICES, queued_service(name, created=LONG_AGO, priority=priority))
                found.known.put(DEPLOYMENTS, deployment_of(name))
                found.change(PODS, queue_pod(name, service=name))
            await asyncio.sleep(30)
            report = found.reports[-1]
            assert report.failures == dict.fromkeys(("uid-vip", "uid-chat"), str(refusal))
            assert (report.round.actions, [*report.round.blocked]) == ((), ["uid-mail"])
            assert (found.api.tries, found.api.evictions) == ([], [])
            found.api.refuse_ledger = lambda: None
            await asyncio.sleep(60)
            assert found.reports[-1].failures == {}

    virtual_time.run(main())
    assert (found.api.tries, {*found.api.evictions}) == ([("vip", "n2")], {"v"})


def preemption_on_a_host() -> AdmissionBench:
    """Return the loop with a process that another one, of higher priority, is about to replace."""
    old = process("low-1-0", host="one", gib=8, priority="low", creationTimestamp="2026-01-01T00:00:00Z")
    first = process("vip-1-0", gib=8, serviceName="vip", priority="critical")
    machine = host("one", 8 * GIB)
    return AdmissionBench(store(), (METAL_HOSTS, machine), (METAL_PROCESSES, old), (METAL_PROCESSES, first))


def call_before_nomination(found: AdmissionBench, change: Callable[[], None]) -> None:
    """Change something between a decision and its effects."""
    patch = found.api.patch_merge

    async def patch_merge(*arguments: Any, **options: Any) -> Obj:
        change()
        return await patch(*arguments, **options)

    found.api.patch_merge = patch_merge  # type: ignore[method-assign]


def test_victim_on_a_host_is_ended() -> None:
    assert play(preemption_on_a_host(), 1).api.deleted == ["low-1-0"]


def test_host_that_ends_no_process_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thief of a Mac renews its Lease, and never reports that a victim has ended: another one ends in its place."""
    began = datetime.now(UTC)

    class LoopClock:
        @staticmethod
        def now(_zone: object) -> datetime:
            return began + timedelta(seconds=asyncio.get_running_loop().time())

    monkeypatch.setattr(admission, "datetime", LoopClock)
    found = preemption_on_a_host()
    found.change(METAL_HOSTS, host("two", 8 * GIB))
    other = process("low-2-0", host="two", gib=8, priority="low", creationTimestamp="2026-01-01T00:00:00Z")
    found.change(METAL_PROCESSES, other)

    async def main() -> None:
        async with found.running():
            await asyncio.sleep(1)
            (first,) = found.api.deleted
            ending = found.api.find(METAL_PROCESSES, first)
            found.change(
                METAL_PROCESSES, {**ending, "metadata": ending["metadata"] | {"deletionTimestamp": timestamp(began)}}
            )
            await asyncio.sleep(MOST_ENDING_SECONDS)
            assert found.api.deleted == [first]
            await asyncio.sleep(LATE_SECONDS)
            assert set(found.api.deleted) == {"low-1-0", "low-2-0"}

    virtual_time.run(main())


def full_host(name: str, *uids: str) -> Obj:
    """Return a host that reports processes, and no free memory."""
    processes = [{"uid": uid, "namespace": "team", "name": uid, "memoryBytes": 8 * GIB} for uid in uids]
    return host(name, 0, budgetBytes=8 * GIB, processes=processes)


async def evict_and_end(found: AdmissionBench) -> None:
    """Wait until a process is evicted, and end it: its host has not reported that yet."""
    await eventually(lambda: found.api.deleted)
    await eventually(lambda: NOMINATED in found.api.find(METAL_PROCESSES, "vip-1-0")["metadata"]["annotations"])
    found.show(METAL_PROCESSES, "vip-1-0")
    found.remove(METAL_PROCESSES, found.api.deleted[0])


def test_room_of_a_process_that_is_over_stays_promised_until_its_host_reports_it() -> None:
    old = [
        process(f"{name}-1-0", host=name, gib=8, priority="low", creationTimestamp="2026-01-01T00:00:00Z")
        for name in ("one", "two")
    ]
    first = process("vip-1-0", gib=8, serviceName="vip", priority="critical")
    machines = [full_host(name, f"uid-{name}-1-0") for name in ("one", "two")]
    found = AdmissionBench(
        store(), *((METAL_HOSTS, each) for each in machines), *((METAL_PROCESSES, each) for each in (*old, first))
    )

    async def main() -> None:
        async with found.running():
            await evict_and_end(found)
            await asyncio.sleep(5)
            assert len(found.api.deleted) == 1, "no other one is evicted meanwhile"
            place = found.api.deleted[0].partition("-")[0]
            reported = host(place, 8 * GIB, budgetBytes=8 * GIB)
            reported["metadata"]["resourceVersion"] = "2"
            found.known.put(METAL_HOSTS, reported)
            older = process("old-1-0", gib=8, priority="critical", creationTimestamp="2026-01-01T00:00:00Z")
            found.change(METAL_PROCESSES, older)
            await eventually(lambda: found.api.tries)
            assert found.api.tries == [("vip-1-0", place)]
            assert "ending" not in {unit.state for unit in found.reports[-1].units}, "its room is free, not to come"

    virtual_time.run(main())


def test_room_that_a_host_never_gives_back_is_promised_for_some_time_only() -> None:
    old = process("one-1-0", host="one", gib=8, priority="low", creationTimestamp="2026-01-01T00:00:00Z")
    first = process("vip-1-0", gib=8, serviceName="vip", priority="critical")
    objects = ((METAL_PROCESSES, each) for each in (old, first))
    found = AdmissionBench(store(), (METAL_HOSTS, full_host("one", "uid-one-1-0")), *objects)

    async def main() -> None:
        async with found.running():
            await evict_and_end(found)
            await asyncio.sleep(UNREPORTED_SECONDS - 1)
            assert NOMINATED in found.api.find(METAL_PROCESSES, "vip-1-0")["metadata"]["annotations"]
            await eventually(lambda: not found.api.find(METAL_PROCESSES, "vip-1-0")["metadata"]["annotations"])

    virtual_time.run(main())


def test_successor_with_the_name_of_a_victim_is_not_ended() -> None:
    found = preemption_on_a_host()
    successor = process("low-1-0", gib=8, priority="low")
    successor["metadata"] |= {"uid": "uid-successor", "resourceVersion": "900"}
    call_before_nomination(found, lambda: found.change(METAL_PROCESSES, successor))
    assert play(found).api.deleted == []


def test_leader_that_was_overtaken_ends_no_process() -> None:
    found = preemption_on_a_host()
    found.api.put(CONFIG_MAPS, written(LedgerContent(leader="other")))
    # The first write takes the ledger over.
    answers = iter([None])
    found.api.refuse_ledger = lambda: next(answers, Conflict("patch", status=409))
    play(found)
    assert found.api.deleted == []


def test_leader_that_is_overtaken_while_a_budget_refuses_an_eviction_deletes_no_pod() -> None:
    found = bench(victim("v", "low"), queue_pod("p", service="vip"))
    found.known.put(POD_DISRUPTION_BUDGETS, budget("InferenceService"))
    is_overtaken = False

    def refuse(_name: str) -> ApiError:
        nonlocal is_overtaken
        is_overtaken = True
        cause = ("", "The disruption budget low needs 1 healthy pods and has 1 currently")
        return ApiError("create", status=429, causes=(cause,))

    def require_leadership() -> None:
        if is_overtaken:
            raise LeadershipLost("the lease was not renewed")

    found.api.refuse_eviction = refuse
    recorder: Any = SilentRecorder()
    leading = Leading(found.api, found.known, recorder, lambda _resource, _key: None, require_leadership)
    eviction = AdmissionWriter(leading).evict(
        queue_units.pod("uid-v", key=UnitKey("pod", "team", "v"), cells=("node/n1",)),
        queue_units.pod("uid-p", key=UnitKey("pod", "team", "p")),
    )
    with pytest.raises(LeadershipLost):
        virtual_time.run(eviction)
    assert (found.api.evictions, found.api.deleted) == (["v"], [])


def test_nobody_ends_for_a_pod_that_is_deleted_after_it_was_nominated() -> None:
    found = bench(victim("v", "low"), queue_pod("p", service="vip"))
    put = found.api.put

    def delete_once_nominated(resource: Resource, obj: Obj) -> Obj:
        stored = put(resource, obj)
        if NOMINATED in (obj["metadata"].get("annotations") or {}):
            found.known.remove(resource, "team", "p", uid="uid-p", resource_version="9000")
        return stored

    found.api.put = delete_once_nominated  # type: ignore[method-assign]
    play(found)
    assert found.api.evictions == []


def test_pod_that_the_scheduler_takes_at_the_last_moment_stays() -> None:
    found = bench(unschedulable(admitted("a", "n1")))

    async def main() -> None:
        async with found.running():
            await asyncio.sleep(1)
            found.api.before_ledger = lambda: found.change(PODS, queue_pod("a", gated=False, node="n1"))
            await asyncio.sleep(PINNED_SECONDS + 20)

    virtual_time.run(main())
    assert found.api.find(PODS, "a")["spec"]["nodeName"] == "n1", "the pod was about to go back"
    assert found.api.deleted == []


def test_place_that_cannot_be_written_is_retried_ever_more_rarely() -> None:
    freed = FreedPlace(
        service="uid-chat", unit="uid-gone", namespace="team", name="gone", enqueued_at="2026-01-01T00:00:01.000000Z"
    )
    running = queue_pod("old", gated=False, node="n1", created=LONG_AGO + timedelta(days=1))
    found = bench(queue_pod("a", devices=9), running, ledger=LedgerContent(leader="other", freed=(freed,)))
    tries: list[str] = []

    async def refuse(_resource: object, name: str, *_arguments: object, **_options: object) -> Obj:
        tries.append(name)
        raise ApiError("patch", status=403)

    found.api.patch_merge = refuse  # type: ignore[method-assign,assignment]
    play(found, 60)
    assert 3 < len(tries) < 30


def test_waiting_process_whose_estimate_shrinks_is_bound() -> None:
    found = AdmissionBench(store(), (METAL_HOSTS, host("one", 8 * GIB)), (METAL_PROCESSES, process("a-1-0", gib=10)))

    async def main() -> None:
        async with found.running():
            await asyncio.sleep(5)
            large = found.api.find(METAL_PROCESSES, "a-1-0")
            found.change(METAL_PROCESSES, {**large, "spec": {**large["spec"], "memoryBytes": 6 * GIB}})
            await asyncio.sleep(30)

    virtual_time.run(main())
    assert found.api.host_of("a-1-0") == "one"
