"""Places in the queue that outlive what had them: pods and processes that are gone, and a ledger that people delete."""

import asyncio
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest

from controller.placement import admission
from controller.placement.admission import LATE_WRITE_SECONDS
from controller.placement.ledger import LEDGER, FreedPlace, LedgerContent
from controller.placement.observed_units import ObservedUnits, observe_units_in_steps
from controller.placement.queue_places import find_own_place, format_place
from crds.meta import CONTROLLER_NAMESPACE, ENQUEUED_AT
from kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    PODS,
    ObjectKey,
)
from tests.support import virtual_time
from tests.support.admission_api import AdmissionBench
from tests.support.api_objects import NOW, host, process
from tests.support.queue_objects import deployment_of, queue_pod, queued_service, timestamp
from tests.unit.controller.placement.test_admission_pods import LONG_AGO, bench, ledger_of, node, play, victim


def test_places_of_evicted_pods_outlive_a_ledger_that_people_delete() -> None:
    admission_bench = bench(victim("v", "low"), queue_pod("p", service="vip"), nodes=(node("n1"), node("n2")))
    admission_bench.change(PODS, queue_pod("q", service="vip", gated=False, node="n2"))

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(1)
            assert admission_bench.api.evictions == ["v"]
            del admission_bench.api.objects[CONFIG_MAPS, ObjectKey(CONTROLLER_NAMESPACE, LEDGER)]
            admission_bench.remove(PODS, "q")
            await asyncio.sleep(LATE_WRITE_SECONDS + 5)

    virtual_time.run(main())
    assert admission_bench.api.tries == [("p", "n2")]
    assert [place["unit"] for place in ledger_of(admission_bench)["freed"]] == ["uid-v"]


def test_place_of_a_pod_that_vanishes_during_a_round_is_not_forgotten() -> None:
    old = victim("old", "chat")
    freed = FreedPlace(
        service="uid-chat", unit="uid-old", namespace="team", name="old", enqueued_at=format_place(find_own_place(old))
    )
    other = queue_pod("other", service="mail")
    admission_bench = bench(old, queue_pod("a"), other, ledger=LedgerContent(leader="other", freed=(freed,)))
    admission_bench.during_plan = vanish_once(admission_bench, "old")
    play(admission_bench)
    assert admission_bench.api.find(PODS, "a")["metadata"]["annotations"][ENQUEUED_AT] == freed.enqueued_at


def vanish_once(found: AdmissionBench, name: str) -> Callable[[], None]:
    """Return what lets the watch show the end of a pod, at the first call."""

    def vanish() -> None:
        found.during_plan = lambda: None
        found.remove(PODS, name)

    return vanish


@pytest.mark.parametrize("has_record", [False, True], ids=["it is deleted by force", "it has failed"])
def test_successor_of_a_pod_that_ends_at_once_has_its_place(has_record: bool) -> None:
    old = queue_pod("old", gated=False, node="n1", created=LONG_AGO + timedelta(days=1))
    place = format_place(find_own_place(old))
    admission_bench = bench(old)

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(1)
            if has_record:
                admission_bench.change(PODS, {**old, "status": {"phase": "Failed"}})
            else:
                admission_bench.remove(PODS, "old")
            await see_place_inherited(admission_bench, place)

    virtual_time.run(main())


def test_successor_of_a_pod_that_vanishes_while_a_new_leader_reads_the_units_has_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others have their turn between two services: the watch is one of them."""
    old = queue_pod("old", gated=False, node="n1", created=LONG_AGO + timedelta(days=1))
    admission_bench = bench(old, queue_pod("other", service="mail", devices=9))

    def observe_and_vanish(*arguments: Any, **options: Any) -> Iterator[ObservedUnits | None]:
        for step in observe_units_in_steps(*arguments, **options):
            yield step
            if (PODS, ObjectKey("team", "old")) in admission_bench.api.objects:
                admission_bench.remove(PODS, "old")

    monkeypatch.setattr(admission, "observe_units_in_steps", observe_and_vanish)

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(1)
            await see_place_inherited(admission_bench, format_place(find_own_place(old)))

    virtual_time.run(main())


async def see_place_inherited(found: AdmissionBench, place: str) -> None:
    """Hold that the place of a unit that has ended is written down, and that the pod which comes then has it."""
    await asyncio.sleep(1)
    assert [entry["enqueued_at"] for entry in ledger_of(found)["freed"]] == [place], "the leader may end now"
    found.change(PODS, queue_pod("new"))
    await asyncio.sleep(1)
    assert found.api.find(PODS, "new")["metadata"]["annotations"][ENQUEUED_AT] == place


@pytest.mark.parametrize("end", ["withdrawn", "stopped", "gone"])
def test_pod_has_the_place_of_a_process_whose_replica_goes_to_a_node(end: str) -> None:
    created = timestamp(LONG_AGO + timedelta(days=1))
    old = process("chat-1-0", creationTimestamp=created, host="mac-1" if end == "stopped" else None)
    place = format_place(find_own_place(old))
    admission_bench = bench(queue_pod("other", service="mail"))
    for resource, obj in ((INFERENCE_SERVICES, queued_service(created=LONG_AGO)), (DEPLOYMENTS, deployment_of())):
        admission_bench.known.put(resource, obj)
    admission_bench.change(METAL_PROCESSES, old)

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(1)
            if end == "gone":
                admission_bench.remove(METAL_PROCESSES, "chat-1-0")
            else:
                ended = deepcopy(admission_bench.api.find(METAL_PROCESSES, "chat-1-0"))
                ended["metadata"]["deletionTimestamp"] = timestamp(NOW)
                ended["status"] = {"phase": "Stopped" if end == "stopped" else "Pending"}
                admission_bench.change(METAL_PROCESSES, ended)
            await see_place_inherited(admission_bench, place)

    virtual_time.run(main())


def test_process_has_the_place_of_the_pod_whose_replica_goes_to_a_host() -> None:
    old = queue_pod("old", created=LONG_AGO + timedelta(days=1))
    admission_bench = bench(old, victim("other", "mail"))
    admission_bench.change(METAL_PROCESSES, process("chat-1-0", creationTimestamp=timestamp(NOW)))
    admission_bench.known.put(METAL_HOSTS, host("mac-1"))
    play(admission_bench)
    assert admission_bench.api.tries == [("chat-1-0", "mac-1")]
    annotations = admission_bench.api.find(METAL_PROCESSES, "chat-1-0")["metadata"]["annotations"]
    assert annotations[ENQUEUED_AT] == format_place(find_own_place(old)), "also if it starts at once"


def test_place_of_a_pod_that_nothing_replaces_is_not_kept() -> None:
    old, stays = (queue_pod(name, gated=False, node="n1", created=LONG_AGO) for name in ("old", "stays"))
    admission_bench = bench(old, stays, nodes=(node("n1", 2),))

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(1)
            admission_bench.remove(PODS, "old")
            await asyncio.sleep(1)
            admission_bench.change(PODS, queue_pod("later"))
            await asyncio.sleep(1)

    virtual_time.run(main())
    place = format_place(find_own_place(queue_pod("later")))
    assert admission_bench.api.find(PODS, "later")["metadata"]["annotations"][ENQUEUED_AT] == place
