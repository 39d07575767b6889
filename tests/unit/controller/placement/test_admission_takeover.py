"""Admission by a new leader: claims that others have left, ledgers that are damaged, lost or refused."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from controller.placement.admission import LATE_WRITE_SECONDS
from controller.placement.ledger import LEDGER, Claim, FreedPlace, LedgerContent, QueueLedger
from controller.placement.planner import PlanRules
from controller.placement.pool_limits import PoolRules
from crds.meta import CONTROLLER_NAMESPACE
from kube.client import Obj
from kube.errors import ApiError, Unreachable
from kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    NODES,
    PODS,
    ObjectKey,
    Resource,
)
from tests.support import virtual_time
from tests.support.admission_api import AdmissionBench
from tests.support.api_objects import host
from tests.support.eventually import eventually
from tests.support.queue_objects import deployment_of, queue_pod, queued_service
from tests.unit.controller.placement.test_admission_pods import (
    CLAIM,
    LONG_AGO,
    bench,
    is_gated,
    ledger_of,
    node,
    play,
    victim,
    written,
)

LEDGER_PLACE = CONFIG_MAPS, ObjectKey(CONTROLLER_NAMESPACE, LEDGER)
OF_OTHER = LedgerContent(leader="other", claims={"uid-a": CLAIM})


def hold_write(found: AdmissionBench, name: str) -> asyncio.Event:
    """Hold up each write of a pod until the Event is set."""
    arrives, patch = asyncio.Event(), found.api.patch_json

    async def patch_json(resource: Resource, of: str, *arguments: Any, **options: Any) -> Obj:
        if of == name:
            await arrives.wait()
        return await patch(resource, of, *arguments, **options)

    found.api.patch_json = patch_json  # type: ignore[method-assign, assignment]
    return arrives


@pytest.mark.parametrize(
    ("names", "cells"),
    [
        pytest.param(("a",), ("node/n1", "node/n1"), id="two cells"),
        pytest.param(("a",), ("host/one",), id="a host"),
        pytest.param((), (), id="no object"),
        pytest.param(("a",), ("node/",), id="no name of a cell"),
        pytest.param(("",), ("node/n1",), id="no name"),
        pytest.param(("a/b",), ("node/n1",), id="no name that can be asked for"),
    ],
)
def test_claim_that_people_have_damaged_stops_nothing(names: tuple[str, ...], cells: tuple[str, ...]) -> None:
    claim = Claim(kind="pod", namespace="team", names=names, cells=cells)
    admission_bench = bench(queue_pod("a"), ledger=LedgerContent(leader="other", claims={"uid-a": claim}))
    admission_bench.known.put(METAL_HOSTS, host("one"))
    assert play(admission_bench, LATE_WRITE_SECONDS + 5).api.tries == [("a", "n1")]


@pytest.mark.parametrize("is_seen", [True, False], ids=["its service is suspended", "its pod is not seen yet"])
def test_cell_of_a_claim_whose_unit_is_not_seen_goes_to_nobody_else(is_seen: bool) -> None:
    """Another leader is giving it to a pod that counts as no unit here; its write may still arrive."""
    admission_bench = bench(queue_pod("a"), queue_pod("b", service="vip"), ledger=OF_OTHER)
    if is_seen:
        service = queued_service(suspend=True)
        service["metadata"]["resourceVersion"] = "2"
        admission_bench.change(INFERENCE_SERVICES, service)
    else:
        admission_bench.known.remove(PODS, "team", "a", uid="uid-a")
    arrives = hold_write(admission_bench, "a")

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(30)
            assert admission_bench.api.tries == []
            arrives.set()
            await asyncio.sleep(30)

    virtual_time.run(main())
    assert admission_bench.api.tries == [("a", "n1")]


def test_ledger_that_nests_without_end_counts_as_empty() -> None:
    admission_bench = bench(queue_pod("a"))
    admission_bench.api.put(CONFIG_MAPS, {**written(OF_OTHER), "data": {"ledger.json": '{"x":' * 100_000}})
    assert play(admission_bench, LATE_WRITE_SECONDS + 5).api.tries == [("a", "n1")]


def damage_claim(found: AdmissionBench) -> None:
    damaged = {**ledger_of(found)["claims"]["uid-a"], "cells": ["host/n1"]}
    content = msgspec.convert({"leader": "one", "claims": {"uid-a": damaged}}, LedgerContent)
    found.api.put(CONFIG_MAPS, written(content))


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(lambda admission_bench: admission_bench.api.objects.pop(LEDGER_PLACE), id="deleted"),
        pytest.param(
            lambda admission_bench: admission_bench.api.put(
                CONFIG_MAPS, {**written(OF_OTHER), "data": {"ledger.json": "{"}}
            ),
            id="garbage",
        ),
        pytest.param(damage_claim, id="a damaged claim"),
    ],
)
def test_late_write_of_a_claim_that_is_lost_meets_no_other_unit(lose: Callable[[AdmissionBench], object]) -> None:
    """A leader claims a cell, and its write takes long. The ledger is lost, and two others lead after each other."""
    first = bench(queue_pod("a"))
    others = [bench(queue_pod("a"), queue_pod("b", service="vip"), identity=name) for name in ("two", "three")]
    arrives = hold_write(first, "a")

    async def main() -> None:
        async with first.running():
            await eventually(lambda: LEDGER_PLACE in first.api.objects and "uid-a" in ledger_of(first)["claims"])
            lose(first)
            first.api.put(PODS, queue_pod("b", service="vip"))
            for other in others:
                other.api = first.api
            async with others[0].running():
                await asyncio.sleep(5)
            async with others[1].running():
                await asyncio.sleep(34)
                arrives.set()
                await eventually(lambda: not is_gated(first, "a"))
                others[1].show(PODS, "a")
                await asyncio.sleep(60)

    virtual_time.run(main())
    assert first.api.tries == [("a", "n1")]


def test_leader_that_begins_without_a_ledger_says_what_units_wait_for() -> None:
    admission_bench = bench(queue_pod("a"))
    del admission_bench.api.objects[LEDGER_PLACE]

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(LATE_WRITE_SECONDS - 1)
            (report,) = admission_bench.reports
            assert "was missing or damaged" in report.failures["uid-a"]
            assert admission_bench.api.tries == []
            await asyncio.sleep(2)
            assert admission_bench.reports[-1].failures == {}

    virtual_time.run(main())
    assert admission_bench.api.tries == [("a", "n1")]
    assert not ledger_of(admission_bench)["is_incomplete"]


def test_leader_that_begins_without_a_ledger_and_without_waiting_units_admits_at_once() -> None:
    admission_bench = bench(victim("v", "low"), nodes=(node("n1", 2),))
    del admission_bench.api.objects[LEDGER_PLACE]

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(1)
            admission_bench.change(PODS, queue_pod("a", service="low"))
            await asyncio.sleep(5)

    virtual_time.run(main())
    assert admission_bench.api.tries == [("a", "n1")]


def test_claims_of_a_ledger_that_is_deleted_while_it_is_taken_over_are_finished_once() -> None:
    admission_bench = bench(queue_pod("a"), ledger=OF_OTHER)

    async def main() -> None:
        ledger = QueueLedger(admission_bench.api, "one")
        admission_bench.api.lost_ledger_answers = 1
        with pytest.raises(Unreachable):
            await ledger.take_over()
        del admission_bench.api.objects[LEDGER_PLACE]
        left = await ledger.take_over()
        assert (left.claims, left.is_incomplete) == (OF_OTHER.claims, True)
        left = await ledger.take_over()
        assert (left.claims, left.is_incomplete) == ({}, True)

    virtual_time.run(main())


def test_open_claims_outlive_a_write_that_fails_while_late_writes_are_awaited() -> None:
    """A leader finds a damaged ledger with a claim, and cannot write, 40 s later, that no more are missing."""
    admission_bench = bench(queue_pod("a"), queue_pod("b", service="vip"))
    damaged = Claim(kind="pod", namespace="team", names=("z",), cells=("host/z",))
    content = LedgerContent(leader="other", claims={"uid-a": CLAIM, "uid-z": damaged})
    admission_bench.api.put(CONFIG_MAPS, written(content))
    admission_bench.known.remove(PODS, "team", "a", uid="uid-a")
    arrives = hold_write(admission_bench, "a")

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(LATE_WRITE_SECONDS / 2)
            assert ledger_of(admission_bench)["is_incomplete"]
            admission_bench.api.lost_ledger_answers = 1
            await asyncio.sleep(LATE_WRITE_SECONDS)
            assert (admission_bench.api.tries, list(ledger_of(admission_bench)["claims"])) == ([], ["uid-a"])
            arrives.set()
            await asyncio.sleep(2 * LATE_WRITE_SECONDS)

    virtual_time.run(main())
    assert admission_bench.api.tries == [("a", "n1")]
    assert not ledger_of(admission_bench)["is_incomplete"]


@pytest.mark.parametrize("elastic", [0, 1], ids=["a full pool", "a pool that an autoscaler grows"])
def test_nobody_is_evicted_and_no_node_asked_for_while_a_cell_may_be_free(elastic: int) -> None:
    """The pod of a claim is gone, and the new leader has not learnt it yet: its node seems full."""
    rules = PlanRules(pools={"nvidia": PoolRules(elastic=elastic)})
    admission_bench = bench(
        victim("v", "low"), queue_pod("b", service="vip"), nodes=(node("n1"), node("n2")), rules=rules
    )
    gone = Claim(kind="pod", namespace="team", names=("gone",), cells=("node/n2",))
    admission_bench.api.put(CONFIG_MAPS, written(LedgerContent(leader="other", claims={"uid-gone": gone})))
    learnt, get = asyncio.Event(), admission_bench.api.get

    async def get_late(resource: Resource, name: str, namespace: str | None = None) -> Obj:
        if name == "gone":
            await learnt.wait()
        return await get(resource, name, namespace)

    admission_bench.api.get = get_late  # type: ignore[method-assign]

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(10)
            assert (admission_bench.api.tries, admission_bench.api.evictions) == ([], [])
            learnt.set()
            await asyncio.sleep(5)

    virtual_time.run(main())
    assert (admission_bench.api.tries, admission_bench.api.evictions) == ([("b", "n2")], [])


def test_own_claims_whose_write_was_not_answered_are_planned_anew() -> None:
    admission_bench = bench(victim("v", "low"), nodes=(node("n1", 2),))

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(1)
            admission_bench.api.lost_ledger_answers = 1
            admission_bench.change(PODS, queue_pod("a", service="low"))
            await eventually(lambda: admission_bench.api.lost_ledger_answers == 0)
            assert "uid-a" in ledger_of(admission_bench)["claims"]
            admission_bench.change(NODES, node("n1", 1))
            await asyncio.sleep(20)

    virtual_time.run(main())
    assert admission_bench.api.tries == []


def test_claims_of_another_leader_survive_a_lost_answer_while_the_ledger_is_taken_over() -> None:
    admission_bench = bench(queue_pod("first", service="mail"), nodes=(node("n0"),))
    freed = FreedPlace(
        service="uid-chat", unit="uid-gone", namespace="team", name="gone", enqueued_at="2026-01-01T00:00:01.000000Z"
    )

    def lead_elsewhere() -> None:
        content = LedgerContent(leader="other", claims={"uid-a": CLAIM}, freed=(freed,))
        metadata = {"name": LEDGER, "namespace": CONTROLLER_NAMESPACE, "resourceVersion": "9000"}
        admission_bench.api.put(CONFIG_MAPS, {**written(content), "metadata": metadata})

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(5)
            lead_elsewhere()
            admission_bench.api.lost_ledger_answers = 1
            for name, priority in (("vip", "critical"), ("chat", "normal")):
                admission_bench.known.put(INFERENCE_SERVICES, queued_service(name, created=LONG_AGO, priority=priority))
                admission_bench.known.put(DEPLOYMENTS, deployment_of(name))
            admission_bench.change(PODS, queue_pod("b", service="vip"))
            admission_bench.change(PODS, queue_pod("a"))
            admission_bench.change(NODES, node("n1"))
            await asyncio.sleep(20)

    virtual_time.run(main())
    assert admission_bench.api.tries == [("first", "n0"), ("a", "n1")], "the other leader may still send its write"
    assert admission_bench.api.lost_ledger_answers == 0


@pytest.mark.parametrize("begins_well", [True, False], ids=["while it leads", "when it begins to lead"])
def test_units_whose_turn_the_ledger_does_not_take_say_so(*, begins_well: bool) -> None:
    refusal = ApiError("patch configmaps pomona-system/pomona-queue", status=422, message="field is immutable")
    admission_bench = bench(victim("v", "low"), nodes=(node("n1"), node("n2")), ledger=LedgerContent())

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(5 if begins_well else 0)
            admission_bench.api.refuse_ledger = lambda: refusal
            for name, priority in (("vip", "critical"), ("chat", "normal"), ("mail", "batch")):
                admission_bench.known.put(INFERENCE_SERVICES, queued_service(name, created=LONG_AGO, priority=priority))
                admission_bench.known.put(DEPLOYMENTS, deployment_of(name))
                admission_bench.change(PODS, queue_pod(name, service=name))
            await asyncio.sleep(30)
            report = admission_bench.reports[-1]
            assert report.failures == dict.fromkeys(("uid-vip", "uid-chat"), str(refusal))
            assert (report.round.actions, [*report.round.blocked]) == ((), ["uid-mail"])
            assert (admission_bench.api.tries, admission_bench.api.evictions) == ([], [])
            admission_bench.api.refuse_ledger = lambda: None
            await asyncio.sleep(60)
            assert admission_bench.reports[-1].failures == {}

    virtual_time.run(main())
    assert (admission_bench.api.tries, {*admission_bench.api.evictions}) == ([("vip", "n2")], {"v"})
