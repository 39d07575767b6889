"""Claims whose outcome is unknown, or whose unit changes while they are carried out."""

import asyncio
from typing import Any

import pytest

from controller.placement import admission
from controller.placement.admission import LATE_WRITE_SECONDS
from controller.placement.ledger import Claim, LedgerContent
from controller.placement.open_claims import OpenClaims
from controller.placement.units import UnitKey
from crds.meta import LABEL_GANG, LABEL_GANG_SIZE
from kube.client import Obj
from kube.errors import ApiError, Invalid, Unreachable
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, NODES, PODS, Resource
from tests.support import queue_units, virtual_time
from tests.support.admission_api import AdmissionBench
from tests.support.api_objects import host, process, store
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
)
from tests.unit.controller.placement.test_admission_takeover import LEDGER_PLACE, hold_write

GANG = {LABEL_GANG: "g", LABEL_GANG_SIZE: "2"}
OF_GANG = LedgerContent(
    leader="other",
    claims={
        "uid-a": Claim(kind="gang", namespace="team", names=("a", "b"), cells=("node/n1", "node/n2"), service="chat")
    },
)


def show_vip(found: AdmissionBench) -> None:
    """Add pod `x`, which has a higher priority than all others, as the watch shows it."""
    found.known.put(INFERENCE_SERVICES, queued_service("vip", created=LONG_AGO, priority="critical"))
    found.known.put(DEPLOYMENTS, deployment_of("vip"))
    found.change(PODS, queue_pod("x", service="vip"))


def test_pod_that_loses_its_gate_while_its_place_is_written_stops_nothing() -> None:
    """Another leader's write, or a person, is faster."""
    admission_bench = bench(queue_pod("a"), queue_pod("b", service="mail"), nodes=(node("n1", 2),))
    put = admission_bench.api.put

    def put_ungated(resource: Resource, obj: Obj) -> Obj:
        if (resource, obj["metadata"]["name"]) == (PODS, "a"):
            obj = {**obj, "spec": {key: value for key, value in obj["spec"].items() if key != "schedulingGates"}}
        return put(resource, obj)

    admission_bench.api.put = put_ungated  # type: ignore[method-assign]
    play(admission_bench)
    assert not is_gated(admission_bench, "b")


@pytest.mark.parametrize("room_beside", [0, 1, 2])
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "its third pod is gone"])
def test_cells_of_a_gang_that_is_admitted_in_part_stay_its_own(room_beside: int, *, is_whole: bool) -> None:
    """Its other pods wait as one unit, or as none, and have the first uid no more."""
    labels = GANG if is_whole else {**GANG, LABEL_GANG_SIZE: "3"}
    pods = [queue_pod(name, labels=labels) for name in ("a", "b")]
    admission_bench = bench(*pods, nodes=(node("n1"), node("n2", 1 + room_beside)), ledger=OF_GANG)
    arrives = hold_write(admission_bench, "b")

    async def main() -> None:
        async with admission_bench.running():
            await eventually(lambda: not is_gated(admission_bench, "a"))
            show_vip(admission_bench)
            await asyncio.sleep(20)
            assert "uid-b" not in ledger_of(admission_bench)["claims"], "its rest is planned nowhere else"
            arrives.set()
            await asyncio.sleep(20)

    virtual_time.run(main())
    others = [("x", "n2")] if room_beside else []
    # What a pod needs that is no unit is unknown.
    rest = [*others, ("b", "n2")] if is_whole else [("b", "n2"), *others]
    assert admission_bench.api.tries == [("a", "n1"), *rest]


def test_rest_of_a_gang_that_was_refused_is_admitted_later() -> None:
    admission_bench = bench(*(queue_pod(name, labels=GANG) for name in ("a", "b")), nodes=(node("n1", 2),))
    refusals = iter([Invalid("patch", status=422)])
    admission_bench.api.refuse = lambda name, _place: next(refusals, None) if name == "b" else None
    assert [name for name, _ in play(admission_bench).api.tries] == ["a", "b", "b"]


def send_late(found: AdmissionBench, error: ApiError | Unreachable, seconds: float) -> asyncio.Event:
    """Refuse each answer to a write of pod `a`; the first arrives some seconds later, which sets the Event."""
    patch, has_begun, has_arrived = found.api.patch_json, False, asyncio.Event()

    async def patch_json(resource: Resource, name: str, *arguments: Any, **options: Any) -> Obj:
        nonlocal has_begun
        if name != "a":
            return await patch(resource, name, *arguments, **options)
        if not has_begun:
            has_begun = True
            show_vip(found)
            asyncio.get_running_loop().call_later(seconds, lambda: arrivals.append(asyncio.create_task(arrive())))

        async def arrive() -> None:
            await patch(resource, name, *arguments, **options)
            has_arrived.set()

        raise error

    arrivals = list[asyncio.Task[None]]()
    found.api.patch_json = patch_json  # type: ignore[method-assign]
    return has_arrived


@pytest.mark.parametrize(
    "error", [Unreachable("patch: timed out"), ApiError("patch", status=504, message="timeout")], ids=["cut", "504"]
)
def test_own_write_that_arrives_after_its_time_limit_meets_no_other_unit(error: ApiError | Unreachable) -> None:
    admission_bench = bench(queue_pod("a"))
    has_arrived = send_late(admission_bench, error, seconds=30)

    async def main() -> None:
        async with admission_bench.running():
            await has_arrived.wait()
            await asyncio.sleep(2 * LATE_WRITE_SECONDS)

    virtual_time.run(main())
    assert [is_gated(admission_bench, name) for name in ("a", "x")] == [False, True]
    claimed = [report.claimed for report in admission_bench.reports]
    assert {"node/n1"} in claimed
    assert claimed[-1] == frozenset()


def test_write_that_was_made_and_not_answered_is_seen_before_its_cell_is_given_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the last try to finish a claim. The watch shows nothing meanwhile."""
    monkeypatch.setattr(admission, "backoff_seconds", lambda *_arguments, **_options: LATE_WRITE_SECONDS)
    admission_bench = bench(
        queue_pod("a"), queue_pod("x", service="vip"), ledger=LedgerContent(claims={"uid-a": CLAIM})
    )
    admission_bench.api.loses_answers = True
    assert play(admission_bench, 3 * LATE_WRITE_SECONDS).api.tries == [("a", "n1")]


def test_cell_of_a_claim_whose_writes_are_never_answered_is_given_away_at_last() -> None:
    admission_bench = bench(queue_pod("a"), ledger=LedgerContent(claims={"uid-a": CLAIM}))
    admission_bench.api.refuse = lambda name, _place: Unreachable("patch: timed out") if name == "a" else None

    async def main() -> None:
        async with admission_bench.running():
            show_vip(admission_bench)
            await asyncio.sleep(LATE_WRITE_SECONDS + 20)
            assert ("x", "n1") not in admission_bench.api.tries
            await asyncio.sleep(LATE_WRITE_SECONDS)

    virtual_time.run(main())
    assert ("x", "n1") in admission_bench.api.tries


def test_late_write_of_a_gang_that_has_lost_a_pod_meets_no_other_unit() -> None:
    rest = queue_pod("b", labels=GANG)
    admission_bench = bench(rest, queue_pod("x", service="vip"), nodes=(node("n2"),), ledger=OF_GANG)

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(LATE_WRITE_SECONDS - 5)
            assert admission_bench.api.tries == []
            await asyncio.sleep(10)

    virtual_time.run(main())
    assert admission_bench.api.tries == [("x", "n2")]


def test_cells_of_a_gang_that_is_gone_are_given_away_at_once() -> None:
    admission_bench = bench(queue_pod("x", service="vip"), nodes=(node("n2"),), ledger=OF_GANG)
    assert play(admission_bench).api.tries == [("x", "n2")]


def test_leader_that_begins_without_a_ledger_awaits_writes_of_pods_that_are_no_units() -> None:
    """One pod of a gang is gone: the others are no unit, and the last leader is giving them their nodes."""
    admission_bench = bench(queue_pod("b", labels=GANG))
    del admission_bench.api.objects[LEDGER_PLACE]

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(5)
            show_vip(admission_bench)
            await asyncio.sleep(LATE_WRITE_SECONDS - 10)
            assert admission_bench.api.tries == []
            await asyncio.sleep(10)

    virtual_time.run(main())
    assert admission_bench.api.tries == [("x", "n1")]


def test_leader_that_begins_without_a_ledger_awaits_writes_of_processes() -> None:
    admission_bench = AdmissionBench(store(), (METAL_HOSTS, host("one")), (METAL_PROCESSES, process("a-1-0")))
    del admission_bench.api.objects[LEDGER_PLACE]
    assert play(admission_bench, LATE_WRITE_SECONDS - 5).api.tries == []


@pytest.mark.parametrize("is_refused", [True, False], ids=["its write was refused", "its cell had no room left"])
def test_next_leader_does_not_carry_out_a_claim_that_was_given_up(*, is_refused: bool) -> None:
    """The cell is full by then: what has taken it waits in no queue."""
    first, second = (bench(queue_pod("a"), identity=name) for name in ("one", "two"))
    second.api = first.api

    def fill() -> None:
        first.change(PODS, queue_pod("z", gated=False, node="n1"))

    if is_refused:
        first.api.refuse = lambda _name, _place: Invalid("patch", status=422)
    else:
        first.during_plan = lambda: setattr(first.api, "before_ledger", fill)

    async def main() -> None:
        async with first.running():
            await asyncio.sleep(1)
            fill()
            await asyncio.sleep(LATE_WRITE_SECONDS)
            written = ledger_of(first)["generation"]
            first.loop.wake()
            await asyncio.sleep(5)
            assert ledger_of(first)["generation"] == written, "that is written once"
        assert is_gated(first, "a")
        first.api.refuse = lambda _name, _place: None
        for name in ("a", "z"):
            second.show(PODS, name)
        async with second.running():
            await asyncio.sleep(5)

    virtual_time.run(main())
    assert is_gated(first, "a")
    assert ledger_of(first)["claims"] == {}


def test_claim_of_another_leader_that_was_given_up_leaves_the_ledger() -> None:
    full = queue_pod("z", gated=False, node="n1")
    admission_bench = bench(queue_pod("a"), full, ledger=LedgerContent(claims={"uid-a": CLAIM}))
    admission_bench.api.refuse = lambda _name, _place: Invalid("patch", status=422)
    assert ledger_of(play(admission_bench, 2 * LATE_WRITE_SECONDS))["claims"] == {}


def test_cell_that_shrinks_after_the_decision_is_not_given_beside_a_claim_of_another_leader() -> None:
    admission_bench = bench(queue_pod("a"), nodes=(node("n1", 2),), ledger=LedgerContent(claims={"uid-a": CLAIM}))
    arrives = hold_write(admission_bench, "a")

    def shrink() -> None:
        admission_bench.api.before_ledger = lambda: None
        smaller = node("n1", 1)
        smaller["metadata"]["resourceVersion"] = "2"
        admission_bench.known.put(NODES, smaller)

    def shrink_later() -> None:
        admission_bench.during_plan = lambda: None
        admission_bench.api.before_ledger = shrink

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(1)
            admission_bench.during_plan = shrink_later
            show_vip(admission_bench)
            await asyncio.sleep(5)
            arrives.set()
            await asyncio.sleep(5)

    virtual_time.run(main())
    assert (admission_bench.api.tries, "stale" in admission_bench.outcomes) == ([("a", "n1")], True)


def test_claim_takes_no_room_from_its_own_unit() -> None:
    """Its write waits for a slot while another round is planned."""
    claims, cell = OpenClaims(), queue_units.node("n1", 1)
    unit, other = (queue_units.pod(f"uid-{name}", key=UnitKey("pod", "team", name)) for name in "ab")
    claims.add({"uid-a": CLAIM})
    claims.reserve([cell], [unit])
    assert [claims.has_room(candidate, ["node/n1"], lambda _name: cell) for candidate in (unit, other)] == [True, False]
