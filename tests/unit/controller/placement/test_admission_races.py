"""Admission in races: answers that are lost, objects that change after the decision."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from controller.placement import admission
from controller.placement.admission_writer import AdmissionWriter, StaleUnit
from controller.placement.ledger import Claim, FreedPlace, LedgerContent
from controller.placement.observed_units import LATE_SECONDS
from controller.placement.process_units import MOST_ENDING_SECONDS
from controller.placement.units import Nomination, UnitKey
from controller.placement.unscheduled_pods import PINNED_SECONDS
from controller.placement.vanished_units import UNREPORTED_SECONDS
from controller.reconcile.plan import Leading
from crds.meta import NOMINATED
from crds.serving import DRAIN_SECONDS
from kube.client import Obj
from kube.errors import ApiError, Conflict, LeadershipLost
from kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    ObjectKey,
    Resource,
)
from tests.support import queue_units, virtual_time
from tests.support.admission_api import AdmissionBench, SilentRecorder
from tests.support.api_objects import GIB, host, process, store
from tests.support.eventually import eventually
from tests.support.queue_objects import deployment_of, queue_pod, queued_service, timestamp
from tests.unit.controller.placement.test_admission_pods import (
    LONG_AGO,
    admitted,
    bench,
    budget,
    ledger_of,
    node,
    play,
    unschedulable,
    victim,
    written,
)
from tests.unit.controller.placement.test_admission_takeover import hold_write


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
    admission_bench = preemption_on_a_host()
    admission_bench.change(METAL_HOSTS, host("two", 8 * GIB))
    other = process("low-2-0", host="two", gib=8, priority="low", creationTimestamp="2026-01-01T00:00:00Z")
    admission_bench.change(METAL_PROCESSES, other)

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(1)
            (first,) = admission_bench.api.deleted
            ending = admission_bench.api.find(METAL_PROCESSES, first)
            admission_bench.change(
                METAL_PROCESSES, {**ending, "metadata": ending["metadata"] | {"deletionTimestamp": timestamp(began)}}
            )
            await asyncio.sleep(DRAIN_SECONDS + MOST_ENDING_SECONDS)
            assert admission_bench.api.deleted == [first]
            await asyncio.sleep(LATE_SECONDS)
            assert set(admission_bench.api.deleted) == {"low-1-0", "low-2-0"}

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
    admission_bench = AdmissionBench(
        store(),
        *((METAL_HOSTS, machine) for machine in machines),
        *((METAL_PROCESSES, replica) for replica in (*old, first)),
    )

    async def main() -> None:
        async with admission_bench.running():
            await evict_and_end(admission_bench)
            await asyncio.sleep(5)
            assert len(admission_bench.api.deleted) == 1, "no other one is evicted meanwhile"
            place = admission_bench.api.deleted[0].partition("-")[0]
            reported = host(place, 8 * GIB, budgetBytes=8 * GIB)
            reported["metadata"]["resourceVersion"] = "2"
            admission_bench.known.put(METAL_HOSTS, reported)
            older = process("old-1-0", gib=8, priority="critical", creationTimestamp="2026-01-01T00:00:00Z")
            admission_bench.change(METAL_PROCESSES, older)
            await eventually(lambda: admission_bench.api.tries)
            assert admission_bench.api.tries == [("vip-1-0", place)]
            assert "ending" not in {unit.state for unit in admission_bench.reports[-1].units}, (
                "its room is free, not to come"
            )

    virtual_time.run(main())


def test_room_that_a_host_never_gives_back_is_promised_for_some_time_only() -> None:
    old = process("one-1-0", host="one", gib=8, priority="low", creationTimestamp="2026-01-01T00:00:00Z")
    first = process("vip-1-0", gib=8, serviceName="vip", priority="critical")
    objects = ((METAL_PROCESSES, replica) for replica in (old, first))
    admission_bench = AdmissionBench(store(), (METAL_HOSTS, full_host("one", "uid-one-1-0")), *objects)

    async def main() -> None:
        async with admission_bench.running():
            await evict_and_end(admission_bench)
            await asyncio.sleep(UNREPORTED_SECONDS - 1)
            assert NOMINATED in admission_bench.api.find(METAL_PROCESSES, "vip-1-0")["metadata"]["annotations"]
            await eventually(
                lambda: not admission_bench.api.find(METAL_PROCESSES, "vip-1-0")["metadata"]["annotations"]
            )

    virtual_time.run(main())


def test_successor_with_the_name_of_a_victim_is_not_ended() -> None:
    admission_bench = preemption_on_a_host()
    successor = process("low-1-0", gib=8, priority="low")
    successor["metadata"] |= {"uid": "uid-successor", "resourceVersion": "900"}
    call_before_nomination(admission_bench, lambda: admission_bench.change(METAL_PROCESSES, successor))
    assert play(admission_bench).api.deleted == []


def test_leader_that_was_overtaken_ends_no_process() -> None:
    admission_bench = preemption_on_a_host()
    admission_bench.api.put(CONFIG_MAPS, written(LedgerContent(leader="other")))
    # The first write takes the ledger over.
    answers = iter([None])
    admission_bench.api.refuse_ledger = lambda: next(answers, Conflict("patch", status=409))
    play(admission_bench)
    assert admission_bench.api.deleted == []


def test_leader_that_is_overtaken_while_a_budget_refuses_an_eviction_deletes_no_pod() -> None:
    admission_bench = bench(victim("v", "low"), queue_pod("p", service="vip"))
    admission_bench.known.put(POD_DISRUPTION_BUDGETS, budget("InferenceService"))
    is_overtaken = False

    def refuse(_name: str) -> ApiError:
        nonlocal is_overtaken
        is_overtaken = True
        cause = ("", "The disruption budget low needs 1 healthy pods and has 1 currently")
        return ApiError("create", status=429, causes=(cause,))

    def require_leadership() -> None:
        if is_overtaken:
            raise LeadershipLost("the lease was not renewed")

    admission_bench.api.refuse_eviction = refuse
    recorder: Any = SilentRecorder()
    leading = Leading(
        admission_bench.api, admission_bench.known, recorder, lambda _resource, _key: None, require_leadership
    )
    eviction = AdmissionWriter(leading).evict(
        queue_units.pod("uid-v", key=UnitKey("pod", "team", "v"), cells=("node/n1",)),
        queue_units.pod("uid-p", key=UnitKey("pod", "team", "p")),
    )
    with pytest.raises(LeadershipLost):
        virtual_time.run(eviction)
    assert (admission_bench.api.evictions, admission_bench.api.deleted) == (["v"], [])


WAITS = queue_units.pod("uid-p", key=UnitKey("pod", "team", "p"))
RUNS = queue_units.pod("uid-v", key=UnitKey("pod", "team", "v"), state="running", cells=("node/n1",))
BINDING = Claim(kind="process", namespace="team", names=("vip-1-0",), cells=("host/one",))
WRITES: dict[str, Callable[[AdmissionWriter], Coroutine[Any, Any, None]]] = {
    "admit": lambda writer: writer.admit(
        "uid-p", Claim(kind="pod", namespace="team", names=("p",), cells=("node/n1",))
    ),
    "bind": lambda writer: writer.admit("uid-vip-1-0", BINDING),
    "nominate": lambda writer: writer.nominate(WAITS, Nomination(("node/n1",), frozenset())),
    "keep a place": lambda writer: writer.keep_place("pod", ObjectKey("team", "p"), "2026-01-01T00:00:00.000000Z"),
    "evict": lambda writer: writer.evict(RUNS, WAITS),
    "end a process": lambda writer: writer.evict(
        msgspec.structs.replace(RUNS, uid="uid-vip-1-0", key=UnitKey("process", "team", "vip-1-0")), WAITS
    ),
    "requeue": lambda writer: writer.requeue(msgspec.structs.replace(RUNS, evictable_since=None)),
}


@pytest.mark.parametrize("write", WRITES)
def test_leader_that_lost_its_lease_makes_no_write(write: str) -> None:
    """It may have been suspended between any two of its writes, and another leads since."""
    admission_bench = bench(unschedulable(victim("v", "low")), queue_pod("p", service="vip"))
    admission_bench.known.put(METAL_PROCESSES, process("vip-1-0", gib=8))
    before = dict(admission_bench.api.objects)

    def require_leadership() -> None:
        raise LeadershipLost("the lease was not renewed")

    recorder: Any = SilentRecorder()
    leading = Leading(
        admission_bench.api, admission_bench.known, recorder, lambda _resource, _key: None, require_leadership
    )
    with pytest.raises(LeadershipLost):
        virtual_time.run(WRITES[write](AdmissionWriter(leading)))
    assert (
        admission_bench.api.objects,
        admission_bench.api.tries,
        admission_bench.api.evictions,
        admission_bench.api.deleted,
    ) == (before, [], [], [])


@pytest.mark.parametrize(
    ("uid", "spec"),
    [("uid-of-a-predecessor", {}), ("uid-vip-1-0", {"host": "two"})],
    ids=["successor", "bound elsewhere"],
)
def test_process_that_is_not_what_was_decided_gets_no_host(uid: str, spec: dict[str, Any]) -> None:
    """Its name is that of its predecessor, whose claim another leader has left."""
    admission_bench = AdmissionBench(store(), (METAL_PROCESSES, process("vip-1-0", gib=8, **spec)))
    admission_bench.known.put(METAL_PROCESSES, admission_bench.api.find(METAL_PROCESSES, "vip-1-0"))
    recorder: Any = SilentRecorder()
    writer = AdmissionWriter(
        Leading(admission_bench.api, admission_bench.known, recorder, lambda _resource, _key: None, lambda: None)
    )
    with pytest.raises(StaleUnit):
        virtual_time.run(writer.admit(uid, BINDING))
    assert admission_bench.api.tries == []


def test_nobody_ends_for_a_pod_that_is_deleted_after_it_was_nominated() -> None:
    admission_bench = bench(victim("v", "low"), queue_pod("p", service="vip"))
    put = admission_bench.api.put

    def delete_once_nominated(resource: Resource, obj: Obj) -> Obj:
        stored = put(resource, obj)
        if NOMINATED in (obj["metadata"].get("annotations") or {}):
            admission_bench.known.remove(resource, "team", "p", uid="uid-p", resource_version="9000")
        return stored

    admission_bench.api.put = delete_once_nominated  # type: ignore[method-assign]
    play(admission_bench)
    assert admission_bench.api.evictions == []


def test_pod_that_the_scheduler_takes_at_the_last_moment_stays() -> None:
    admission_bench = bench(unschedulable(admitted("a", "n1")))

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(1)
            admission_bench.api.before_ledger = lambda: admission_bench.change(
                PODS, queue_pod("a", gated=False, node="n1")
            )
            await asyncio.sleep(PINNED_SECONDS + 20)

    virtual_time.run(main())
    assert admission_bench.api.find(PODS, "a")["spec"]["nodeName"] == "n1", "the pod was about to go back"
    assert admission_bench.api.deleted == []


def test_place_that_cannot_be_written_is_retried_ever_more_rarely() -> None:
    freed = FreedPlace(
        service="uid-chat", unit="uid-gone", namespace="team", name="gone", enqueued_at="2026-01-01T00:00:01.000000Z"
    )
    running = queue_pod("old", gated=False, node="n1", created=LONG_AGO + timedelta(days=1))
    admission_bench = bench(queue_pod("a", devices=9), running, ledger=LedgerContent(leader="other", freed=(freed,)))
    tries: list[str] = []

    async def refuse(_resource: object, name: str, *_arguments: object, **_options: object) -> Obj:
        tries.append(name)
        raise ApiError("patch", status=403)

    admission_bench.api.patch_merge = refuse  # type: ignore[method-assign,assignment]
    play(admission_bench, 60)
    assert 3 < len(tries) < 30


def test_waiting_process_whose_estimate_shrinks_is_bound() -> None:
    admission_bench = AdmissionBench(
        store(), (METAL_HOSTS, host("one", 8 * GIB)), (METAL_PROCESSES, process("a-1-0", gib=10))
    )

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(5)
            large = admission_bench.api.find(METAL_PROCESSES, "a-1-0")
            admission_bench.change(METAL_PROCESSES, {**large, "spec": {**large["spec"], "memoryBytes": 6 * GIB}})
            await asyncio.sleep(30)

    virtual_time.run(main())
    assert admission_bench.api.host_of("a-1-0") == "one"


def test_process_that_grows_after_the_decision_is_not_bound_where_it_does_not_fit() -> None:
    admission_bench = AdmissionBench(
        store(), (METAL_HOSTS, host("one", 8 * GIB)), (METAL_PROCESSES, process("a-1-0", gib=6))
    )

    def grow() -> None:
        admission_bench.api.before_ledger = lambda: None
        small = admission_bench.api.find(METAL_PROCESSES, "a-1-0")
        admission_bench.change(METAL_PROCESSES, {**small, "spec": {**small["spec"], "memoryBytes": 10 * GIB}})

    def grow_later() -> None:
        admission_bench.during_plan = lambda: None
        admission_bench.api.before_ledger = grow

    admission_bench.during_plan = grow_later
    assert play(admission_bench).api.find(METAL_PROCESSES, "a-1-0")["spec"]["memoryBytes"] == 10 * GIB
    assert admission_bench.api.host_of("a-1-0") == ""


@pytest.mark.parametrize(("gib", "place"), [(10, ""), (6, "one")], ids=["it has grown", "it is as it was"])
def test_new_leader_binds_no_process_that_has_grown_since_it_was_claimed(gib: int, place: str) -> None:
    waiting = process("a-1-0", gib=gib)
    admission_bench = AdmissionBench(store(), (METAL_HOSTS, host("one", 8 * GIB)), (METAL_PROCESSES, waiting))
    names, cells = ("a-1-0",), ("host/one",)
    claim = Claim(kind="process", namespace="team", names=names, cells=cells, memory_bytes=6 * GIB)
    admission_bench.api.put(CONFIG_MAPS, written(LedgerContent(leader="other", claims={"uid-a-1-0": claim})))
    assert play(admission_bench).api.host_of("a-1-0") == place


def move(obj: Obj, namespace: str) -> Obj:
    return {**obj, "metadata": {**obj["metadata"], "namespace": namespace}}


def test_pod_that_vanishes_during_a_write_that_hangs_stops_no_preemption_of_others() -> None:
    """A webhook hangs in one namespace, whose tenant deletes each pod that is being admitted."""
    admission_bench = bench(victim("v", "low"), nodes=(node("n1"), node("n2")))
    vip = queued_service("vip", created=LONG_AGO, priority="critical")
    for namespace in ("theirs", "team"):
        admission_bench.change(INFERENCE_SERVICES, move(vip, namespace))
        admission_bench.change(DEPLOYMENTS, move(deployment_of("vip"), namespace))
    admission_bench.change(PODS, move(queue_pod("a", service="vip"), "theirs"))
    hold_write(admission_bench, "a")

    async def main() -> None:
        async with admission_bench.running():
            await eventually(lambda: "uid-a" in ledger_of(admission_bench)["claims"])
            admission_bench.remove(PODS, "a", "theirs")
            admission_bench.change(PODS, queue_pod("p", service="vip"))
            await asyncio.sleep(10)
            assert set(admission_bench.api.evictions) == {"v"}
            assert json.loads(admission_bench.api.find(PODS, "p")["metadata"]["annotations"][NOMINATED])["cells"] == [
                "node/n1"
            ]

    virtual_time.run(main())
