"""Admission of units: room is promised once, answers that are lost or refused, and what is changed during a round."""

import asyncio
import itertools
import threading
from functools import partial
from typing import Any

import pytest

from controller.placement import admission, admission_writer, round_pacer
from controller.placement.admission import REPORTED_TRIES
from controller.placement.planner import Round, plan
from controller.placement.round_pacer import RoundCause, RoundPacer
from kube.client import Obj
from kube.errors import ApiError, Forbidden, Invalid, NotFound
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES
from tests.support import virtual_time
from tests.support.admission_api import AdmissionBench
from tests.support.api_objects import GIB, condition, host, process, service, store
from tests.support.eventually import eventually

GONE = {"deletionTimestamp": "2026-11-21T12:00:00Z"}


def bench(*processes: Obj, hosts: tuple[Obj, ...] = (), **options: Any) -> AdmissionBench:
    """Return the loop with these processes, and with host `one` if no other is named."""
    known_hosts = [(METAL_HOSTS, machine) for machine in hosts or (host("one"),)]
    return AdmissionBench(store(), *known_hosts, *((METAL_PROCESSES, process) for process in processes), **options)


def numbered(count: int, gib: int = 1, **fields: Any) -> list[Obj]:
    """Return processes of different services, so that no rule spreads them."""
    return [process(f"p{number}-b-0", gib=gib, serviceName=f"p{number}", **fields) for number in range(count)]


def bound(found: AdmissionBench) -> list[str]:
    return sorted(filter(None, (obj["spec"].get("hostName") for obj in found.api.objects.values() if "spec" in obj)))


@pytest.mark.parametrize("refused_reads", [0, 2])
async def test_a_lost_answer_never_promises_the_same_memory_twice(
    refused_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_writer, "READ_AGAIN_SECONDS", 0)
    admission_bench = bench(*numbered(3, gib=6), hosts=(host("one", 8 * GIB),))
    admission_bench.api.loses_answers, admission_bench.api.refused_reads = True, refused_reads
    async with admission_bench.running():
        await eventually(
            lambda: any("hostName" in process["spec"] for process in admission_bench.known.list(METAL_PROCESSES))
        )
        assert admission_bench.api.refused_reads == 0
        admission_bench.known.put(METAL_HOSTS, host("two", 8 * GIB))
        await eventually(lambda: len(bound(admission_bench)) == 2)
    assert bound(admission_bench) == ["one", "two"]


async def test_round_is_planned_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round over a thousand cells takes half a second, in which probes and the Lease go on."""
    threads: list[threading.Thread] = []

    def note(*arguments: Any) -> Round:
        threads.append(threading.current_thread())
        return plan(*arguments)

    monkeypatch.setattr(admission, "plan", note)
    admission_bench = bench(*numbered(2))
    async with admission_bench.running():
        await eventually(lambda: len(bound(admission_bench)) == 2)
    assert threads
    assert threading.main_thread() not in threads


def test_memory_stays_reserved_while_the_outcome_of_a_write_is_unknown() -> None:
    async def main() -> AdmissionBench:
        found = bench(*numbered(2, gib=6), hosts=(host("one", 8 * GIB),))
        found.api.loses_answers, found.api.refused_reads = True, 1_000_000
        async with found.running():
            for _ in range(60):
                found.loop.wake()
                await asyncio.sleep(1)
        return found

    admission_bench = virtual_time.run(main())
    assert len(admission_bench.api.tries) == 1


async def test_process_that_changed_in_between_is_read_again_and_bound() -> None:
    admission_bench = bench(process("a-b-0"))
    admission_bench.api.put(METAL_PROCESSES, process("a-b-0"))
    async with admission_bench.running():
        await eventually(lambda: admission_bench.api.host_of("a-b-0") == "one")


REFUSALS = [
    ApiError("patch", status=400, reason="BadRequest", message="admission webhook denied the request"),
    Forbidden("patch", status=403, message="a policy has something against it"),
    Invalid("patch", status=422, message="a policy has something against it"),
    ApiError("patch", status=429, message="slow down"),
    ApiError("patch", status=500, message="failed calling webhook"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: str(error.status))
async def test_refused_unit_delays_no_other_and_is_retried_with_backoff(refusal: ApiError) -> None:
    first = [process(f"a-b-{number}", creationTimestamp="2026-11-21T11:00:00Z") for number in range(8)]
    admission_bench = bench(*first, process("z-b-0"))
    admission_bench.api.refuse = lambda name, _host: refusal if name.startswith("a-") else None
    async with admission_bench.running():
        await eventually(lambda: admission_bench.api.host_of("z-b-0") == "one")
        assert ("z-b-0", "one") in admission_bench.api.tries[:9], "each is tried once before any is tried again"
        admission_bench.api.refuse = lambda _name, _host: None
        await eventually(lambda: admission_bench.api.host_of("a-b-7") == "one")


def test_a_refused_unit_is_retried_ever_more_rarely() -> None:
    async def main() -> int:
        admission_bench = bench(process("a-b-0"))
        admission_bench.api.refuse = lambda _name, _host: ApiError("patch", status=500)
        async with admission_bench.running():
            await asyncio.sleep(1)
            for number in range(100):
                changed = host("one", (8 + number % 2) * GIB)
                changed["metadata"]["resourceVersion"] = str(number + 2)
                admission_bench.known.put(METAL_HOSTS, changed)
                await asyncio.sleep(36)
        return len(admission_bench.api.tries)

    assert 40 < virtual_time.run(main()) < 100, "an hour, with a change of the host every 36 s"


class NotedEvents:
    """A recorder that keeps its Events: the kind of the object, the reason and the note of each."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, str, str]] = []

    async def event(self, regarding: Obj, _type: str, reason: str, note: str, _action: str) -> None:
        self.noted.append((regarding["kind"], reason, note))


def bench_of_service(events: NotedEvents) -> AdmissionBench:
    admission_bench = bench(process("chat-1-0"), recorder=events)
    chat = service("chat", status={"observedGeneration": 1})
    admission_bench.known.put(INFERENCE_SERVICES, chat | {"kind": "InferenceService"})
    return admission_bench


def test_owner_is_told_of_an_admission_once() -> None:
    events = NotedEvents()

    async def main() -> None:
        admission_bench = bench_of_service(events)
        async with admission_bench.running():
            for _ in range(10):
                await asyncio.sleep(60)
                admission_bench.loop.wake()

    virtual_time.run(main())
    assert events.noted == [("InferenceService", "Admitted", "process team/chat-1-0 gets host/one")]


async def test_owner_is_told_of_an_admission_that_fails_again_and_again() -> None:
    events = NotedEvents()
    admission_bench = bench_of_service(events)
    admission_bench.api.refuse = lambda _name, _host: ApiError("patch", status=400, message="a webhook denied it")
    async with admission_bench.running():
        await eventually(lambda: len(admission_bench.api.tries) == REPORTED_TRIES + 1)
    ((kind, reason, note),) = events.noted
    assert (kind, reason) == ("InferenceService", "AdmissionFailed")
    assert "chat-1-0" in note
    assert "host/one" in note
    assert "a webhook denied it" in note
    assert "a webhook denied it" in admission_bench.reports[-1].failures["uid-chat-1-0"], "and it is said in its place"


async def test_unit_that_one_host_refuses_goes_to_another() -> None:
    admission_bench = bench(process("a-b-0"), hosts=(host("large", 9 * GIB), host("small", 2 * GIB)))
    admission_bench.api.refuse = lambda _name, place: Forbidden("patch", status=403) if place == "large" else None
    async with admission_bench.running():
        await eventually(lambda: admission_bench.api.host_of("a-b-0") == "small")
    assert [place for _name, place in admission_bench.api.tries] == ["large", "small"]


async def test_host_that_refused_every_unit_is_still_the_last_choice() -> None:
    admission_bench = bench(process("a-b-0"), hosts=(host("large", 9 * GIB),))
    refusals = iter([Forbidden("patch", status=403)])
    admission_bench.api.refuse = lambda _name, _place: next(refusals, None)
    async with admission_bench.running():
        await eventually(lambda: admission_bench.api.host_of("a-b-0") == "large")


async def test_host_that_expires_during_a_round_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "WRITES_AT_ONCE", 1)
    alive = {"one", "two"}
    admission_bench = bench(*numbered(3), hosts=(host("one"), host("two", 9 * GIB)), alive=alive)
    admission_bench.api.before_answer = lambda _name: alive.discard("one")
    async with admission_bench.running():
        await eventually(lambda: len(bound(admission_bench)) == 3)
    assert bound(admission_bench) == ["one", "two", "two"]
    assert admission_bench.outcomes.count("stale") == 2


async def test_host_that_loses_its_memory_during_a_round_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "WRITES_AT_ONCE", 1)
    admission_bench = bench(*numbered(3), hosts=(host("one"), host("two", 9 * GIB)))
    short = host("one", GIB // 2)
    short["metadata"]["resourceVersion"] = "2"

    def take_memory(_name: str) -> None:
        admission_bench.known.put(METAL_HOSTS, short)

    admission_bench.api.before_answer = take_memory
    async with admission_bench.running():
        await eventually(lambda: len(bound(admission_bench)) == 3)
    assert bound(admission_bench) == ["one", "two", "two"]


async def test_memory_that_is_lost_is_missing_to_all_writes_of_a_moment() -> None:
    """Each of several writes at once looks at the memory that the others are taking."""
    admission_bench = bench(*numbered(3, gib=4), hosts=(host("one", 12 * GIB),))
    short = host("one", 9 * GIB)
    short["metadata"]["resourceVersion"] = "2"
    # The ledger is taken over first, and then written between the decision and its effects.
    writes = itertools.count()
    admission_bench.api.before_ledger = lambda: next(writes) and admission_bench.known.put(METAL_HOSTS, short)
    async with admission_bench.running():
        await eventually(lambda: "stale" in admission_bench.outcomes)
    assert len(admission_bench.api.tries) == 2


async def test_successor_of_a_process_that_is_gone_is_bound() -> None:
    gone = process("a-b-0")
    admission_bench = bench(gone)
    successor = {**gone, "metadata": {**gone["metadata"], "uid": "successor", "resourceVersion": "9"}}

    def replace(_name: str, _place: str) -> ApiError | None:
        if len(admission_bench.api.tries) > 1:
            return None
        admission_bench.change(METAL_PROCESSES, successor)  # its event overtakes the answer
        return NotFound("patch", status=404)

    admission_bench.api.refuse = replace
    async with admission_bench.running():
        await eventually(lambda: admission_bench.api.host_of("a-b-0") == "one")
    assert admission_bench.api.find(METAL_PROCESSES, "a-b-0")["metadata"]["uid"] == "successor"


async def test_host_that_comes_alive_is_bound_when_the_loop_is_woken() -> None:
    alive: set[str] = set()
    admission_bench = bench(process("a-b-0"), alive=alive)
    async with admission_bench.running():
        admission_bench.known.put(METAL_HOSTS, host("two"))
        assert admission_bench.api.host_of("a-b-0") == ""
        alive.add("one")
        admission_bench.loop.wake()
        await eventually(lambda: admission_bench.api.host_of("a-b-0") == "one")


def test_room_is_given_while_rounds_that_let_nobody_in_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    class RestingPacer(RoundPacer):
        def find_begin(self, cause: RoundCause) -> float:
            return 0.0 if cause == RoundCause.ROOM or not admission_bench.reports else 3600.0

    monkeypatch.setattr(round_pacer, "RoundPacer", RestingPacer)
    admission_bench = bench(*numbered(2, gib=9), hosts=(host("one", 8 * GIB),))

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(10)
            admission_bench.loop.wake()
            await asyncio.sleep(10)
            assert len(admission_bench.reports) == 1
            assert admission_bench.reports[0].plan_seconds == 0 < admission_bench.reports[0].processor_seconds, (
                "no virtual time passed"
            )
            grown = host("one", 10 * GIB)
            grown["metadata"]["resourceVersion"] = "2"
            admission_bench.known.put(METAL_HOSTS, grown)
            await asyncio.sleep(0.5)
            assert bound(admission_bench) == ["one"]

    virtual_time.run(main())


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"unschedulable": True}},
        {"spec": {"drain": True}},
        {"status": {"conditions": [condition("Paused", "True", "OwnerActive")]}},
        {"metadata": GONE},
    ],
    ids=["cordoned", "drained", "paused", "deleted"],
)
async def test_host_that_closes_after_the_decision_gets_nothing(change: Obj, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "WRITES_AT_ONCE", 1)
    admission_bench = bench(*numbered(2))

    def close(_name: str) -> None:
        closed = host("one")
        closed["metadata"]["resourceVersion"] = "2"
        for part, fields in change.items():
            closed[part] = {**closed.get(part, {}), **fields}
        admission_bench.known.put(METAL_HOSTS, closed)

    admission_bench.api.before_answer = close
    async with admission_bench.running():
        await eventually(lambda: len(admission_bench.outcomes) == 2)
    assert (admission_bench.outcomes, bound(admission_bench)) == (["admitted", "stale"], ["one"])


async def is_still_waiting(found: AdmissionBench, name: str) -> bool:
    """Return whether a process waits after rounds in which others were admitted."""
    for number in range(2):
        another = f"other{number}-1-0"
        found.change(METAL_PROCESSES, process(another, priority="critical", serviceName=f"other{number}"))
        await eventually(partial(found.api.host_of, another))
    return found.api.host_of(name) == ""


@pytest.mark.parametrize(
    ("large", "waits"),
    [
        pytest.param(10, True, id="could fit"),
        pytest.param(99, False, id="never fits"),
    ],
)
async def test_head_of_line_holds_back_later_units_only_where_it_could_fit(large: int, *, waits: bool) -> None:
    on_host = process("old-1-0", host="one", gib=4, serviceName="old")
    first, second = (
        process("first-1-0", gib=large, serviceName="first"),
        process("second-1-0", creationTimestamp="2026-11-21T12:30:00Z"),
    )
    hosts = (host("one", 12 * GIB, processes=[]) | {"status": {**host("one")["status"], "availableBytes": 12 * GIB}},)
    hosts[0]["status"]["budgetBytes"] = 12 * GIB
    admission_bench = bench(on_host, first, second, hosts=hosts)
    async with admission_bench.running():
        if waits:
            assert await is_still_waiting(admission_bench, "second-1-0")
        else:
            await eventually(lambda: admission_bench.api.host_of("second-1-0") == "one")


def test_ledger_that_cannot_be_written_admits_nothing_and_is_taken_over_again() -> None:
    async def main() -> AdmissionBench:
        admission_bench = bench(process("a-b-0"))
        admission_bench.api.refuse_ledger = lambda: ApiError("patch", status=500)
        async with admission_bench.running():
            await asyncio.sleep(30)
            assert admission_bench.api.tries == []
            admission_bench.api.refuse_ledger = lambda: None
            await asyncio.sleep(30)
        return admission_bench

    assert virtual_time.run(main()).api.host_of("a-b-0") == "one"
