"""Admission of pods: gates and pins, evictions that are refused, pods that no scheduler takes, and a new leader."""

import asyncio
import json
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from controller.placement import admission, ledger
from controller.placement.device_need import DeviceNeed, encode_need
from controller.placement.ledger import LEDGER, Claim, LedgerContent
from controller.placement.planner import PlanRules
from controller.placement.pool_limits import PoolRules
from controller.placement.queue_places import find_own_place, format_place
from controller.placement.unscheduled_pods import PINNED_SECONDS, UNPINNED_SECONDS, UnscheduledPods
from crds.meta import CONTROLLER_NAMESPACE, DEVICE_NEED, ENQUEUED_AT, NOMINATED
from kube.client import Obj
from kube.errors import ApiError, Invalid, Unreachable
from kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
)
from tests.support import queue_units, virtual_time
from tests.support.admission_api import AdmissionBench
from tests.support.api_objects import store
from tests.support.device_slices import DRIVER
from tests.support.queue_objects import deployment_of, pinned, queue_pod, queued_service

LONG_AGO = datetime.fromisoformat("2026-01-01T00:00:00Z")
TOO_MANY = ApiError("create", status=429, reason="TooManyRequests", message="a budget")


def node(name: str, gpus: int = 1) -> Obj:
    status = {
        "allocatable": {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "512Gi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", "labels": {}}
    return {"metadata": metadata, "spec": {}, "status": status}


def bench(
    *pods: Obj, nodes: tuple[Obj, ...] = (), ledger: LedgerContent | None = None, **options: Any
) -> AdmissionBench:
    """Return the loop with pods and their services; those of service `vip` are critical, those of `low` are low."""
    names = {pod["metadata"]["labels"]["inference.pomona.dev/service"] for pod in pods}
    priorities = {"vip": "critical", "low": "low", "low-2": "low"}
    services = [queued_service(name, created=LONG_AGO, priority=priorities.get(name, "normal")) for name in names]
    objects = [
        *((INFERENCE_SERVICES, service) for service in services),
        *((DEPLOYMENTS, deployment_of(name)) for name in names),
        *((NODES, machine) for machine in nodes or (node("n1"),)),
        *((PODS, replica) for replica in pods),
    ]
    admission_bench = AdmissionBench(store(), *objects, **options)
    if ledger is not None:
        admission_bench.api.put(CONFIG_MAPS, written(ledger))
    return admission_bench


def written(content: LedgerContent) -> Obj:
    metadata = {"name": LEDGER, "namespace": CONTROLLER_NAMESPACE}
    return {"metadata": metadata, "data": {"ledger.json": msgspec.json.encode(content).decode()}}


def ledger_of(found: AdmissionBench) -> Any:
    return json.loads(found.api.find(CONFIG_MAPS, LEDGER, CONTROLLER_NAMESPACE)["data"]["ledger.json"])


def is_gated(found: AdmissionBench, name: str) -> bool:
    return bool(found.api.find(PODS, name)["spec"].get("schedulingGates"))


def play(found: AdmissionBench, seconds: float = 5.0) -> AdmissionBench:
    """Run the loop for some time of a virtual clock; the watch shows nothing but its own writes."""

    async def main() -> None:
        async with found.running():
            await asyncio.sleep(seconds)

    virtual_time.run(main())
    return found


def victim(name: str, service: str, minute: int = 0) -> Obj:
    return queue_pod(name, service=service, gated=False, node="n1", created=LONG_AGO + timedelta(minutes=minute))


def test_pod_is_pinned_and_loses_its_gate() -> None:
    admission_bench = play(bench(queue_pod("a")))
    assert (admission_bench.api.tries, is_gated(admission_bench, "a")) == ([("a", "n1")], False)
    assert ledger_of(admission_bench)["claims"]["uid-a"]["cells"] == ["node/n1"], "the ledger comes first"


def test_no_more_is_claimed_at_once_than_the_ledger_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MOST_CLAIMED", 2)
    admission_bench = play(bench(*(queue_pod(name) for name in "abcde"), nodes=(node("n1", 5),)))
    assert sorted(name for name, _ in admission_bench.api.tries) == ["a", "b", "c", "d", "e"]
    assert len(ledger_of(admission_bench)["claims"]) <= 2


IN_POOL = [{"key": "team", "operator": "In", "values": ["a"]}]


def expressions_of(found: AdmissionBench, name: str) -> Any:
    affinity = found.api.find(PODS, name)["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return term["matchExpressions"]


def test_pod_for_an_autoscaler_keeps_to_its_pool_also_by_the_ledger() -> None:
    rules = PlanRules(pools={"nvidia": PoolRules(elastic=1, node_labels=(("team", "a"),))})
    admission_bench = play(bench(queue_pod("a"), nodes=(node("n1", 0),), rules=rules))
    assert (admission_bench.api.tries, is_gated(admission_bench, "a"), expressions_of(admission_bench, "a")) == (
        [("a", "")],
        False,
        IN_POOL,
    )
    claim = ledger_of(admission_bench)["claims"]["uid-a"]
    assert (claim.get("cells", []), claim["node_labels"]) == ([], [["team", "a"]])
    content = msgspec.convert({"leader": "other", "claims": {"uid-a": claim}}, LedgerContent)
    successor = play(bench(queue_pod("a"), nodes=(node("n1", 0),), ledger=content))
    assert (is_gated(successor, "a"), expressions_of(successor, "a")) == (False, IN_POOL)


def test_pod_that_was_seen_before_its_deployment_is_admitted_when_that_is_seen() -> None:
    admission_bench = bench(queue_pod("a"))
    admission_bench.known.remove(DEPLOYMENTS, "team", "chat", uid="uid-deployment-chat")

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(5)
            assert admission_bench.api.tries == []
            admission_bench.known.put(
                DEPLOYMENTS, deployment_of() | {"metadata": deployment_of()["metadata"] | {"uid": "seen"}}
            )
            await asyncio.sleep(5)

    virtual_time.run(main())
    assert admission_bench.api.tries == [("a", "n1")]


def test_one_that_could_fit_holds_back_later_ones_and_those_of_other_priorities_pass() -> None:
    large = queue_pod("large", service="chat", devices=2)
    later = queue_pod("later", service="mail", created=LONG_AGO + timedelta(days=300))
    low = queue_pod("low", service="low", created=LONG_AGO + timedelta(days=300))
    holder = queue_pod("holder", service="vip", gated=False, node="n1", created=LONG_AGO)
    large["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
    admission_bench = play(bench(holder, large, later, nodes=(node("n1", 2),)))
    assert admission_bench.api.tries == []
    admission_bench = play(bench(holder, large, later, low, nodes=(node("n1", 2),)))
    assert [name for name, _ in admission_bench.api.tries] == ["low"]
    holder_of_one = queue_pod("vip-2", service="vip")
    admission_bench = play(bench(holder, large, holder_of_one, nodes=(node("n1", 2),)))
    assert [name for name, _ in admission_bench.api.tries] == ["vip-2"], "one of a higher priority comes first"


def test_one_that_fits_nowhere_in_all_holds_back_nobody() -> None:
    huge = queue_pod("huge", devices=8, created=LONG_AGO)
    assert play(bench(huge, queue_pod("a", service="mail"))).api.tries == [("a", "n1")]


def test_victim_is_evicted_once_its_place_is_written_and_its_cell_is_promised() -> None:
    admission_bench = play(bench(victim("v", "low"), queue_pod("p", service="vip")), 1.0)
    assert admission_bench.api.evictions == ["v"]
    assert json.loads(admission_bench.api.find(PODS, "p")["metadata"]["annotations"][NOMINATED])["victims"] == ["uid-v"]
    (freed,) = ledger_of(admission_bench)["freed"]
    place = format_place(find_own_place(victim("v", "low")))
    assert (freed["unit"], freed["service"], freed["enqueued_at"]) == ("uid-v", "uid-low", place)


def test_nothing_is_evicted_for_one_that_could_not_be_nominated() -> None:
    admission_bench = bench(victim("v", "low"), queue_pod("p", service="vip"))
    admission_bench.api.objects = {
        place: obj for place, obj in admission_bench.api.objects.items() if place[1].name != "p"
    }
    assert play(admission_bench).api.evictions == []


def test_eviction_that_a_budget_refuses_is_retried_and_then_overruled_without_another_victim() -> None:
    admission_bench = bench(
        victim("v1", "low"), victim("v2", "low-2", 5), queue_pod("p", service="vip"), nodes=(node("n1", 2),)
    )
    admission_bench.api.refuse_eviction = lambda _name: TOO_MANY

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(50)
            assert 5 < len(admission_bench.api.evictions) < 20
            assert len(set(admission_bench.api.evictions)) == 1, "no other victim is chosen meanwhile"
            assert admission_bench.api.deleted == []
            await asyncio.sleep(25)

    virtual_time.run(main())
    assert admission_bench.api.deleted[:1] == admission_bench.api.evictions[:1]
    assert [entry["name"] for entry in ledger_of(admission_bench)["freed"]] == admission_bench.api.evictions[:1], (
        "it keeps its place"
    )
    assert NOMINATED in admission_bench.api.find(PODS, "p")["metadata"]["annotations"]


def budget(owner: str) -> Obj:
    """Return a PodDisruptionBudget of service `low`, which an object of kind `owner` controls."""
    reference = {"kind": owner, "name": "low", "uid": "uid-low", "controller": True}
    metadata = {"name": "low", "namespace": "team", "uid": "uid-budget", "resourceVersion": "1"}
    return {"metadata": {**metadata, "ownerReferences": [reference]}, "spec": {"maxUnavailable": 1}}


@pytest.mark.parametrize(
    ("owner", "status", "named", "is_overruled"),
    [
        ("InferenceService", 429, "low", True),
        ("Deployment", 429, "low", False),
        ("InferenceService", 429, "other", False),
        ("InferenceService", 500, "low", False),
    ],
    ids=["ours", "of another controller", "a person's", "two budgets"],
)
def test_own_budget_that_refuses_the_second_eviction_of_a_service_is_overruled_at_once(
    owner: str, status: int, named: str, *, is_overruled: bool
) -> None:
    pods = (victim("v1", "low"), victim("v2", "low"), queue_pod("p", service="vip", devices=2))
    admission_bench = bench(*pods, nodes=(node("n1", 2),))
    admission_bench.known.put(POD_DISRUPTION_BUDGETS, budget(owner))
    cause = ("", f"The disruption budget {named} needs 1 healthy pods and has 1 currently")
    refusal = ApiError("create", status=status, causes=(cause,))
    admission_bench.api.refuse_eviction = lambda name: refusal if name == "v2" else None
    play(admission_bench)
    assert (set(admission_bench.api.evictions), admission_bench.api.deleted) == (
        {"v1", "v2"},
        ["v2"] if is_overruled else [],
    )


@pytest.mark.parametrize("status", [429, 500], ids=["a budget", "two budgets"])
def test_eviction_that_was_given_up_is_refused_for_the_whole_time_again(status: int) -> None:
    admission_bench = bench(victim("v", "low"), queue_pod("p", service="vip"))
    admission_bench.api.refuse_eviction = lambda _name: ApiError("create", status=status)

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(50)
            admission_bench.remove(PODS, "p")
            await asyncio.sleep(100)
            admission_bench.change(PODS, queue_pod("p2", service="vip"))
            await asyncio.sleep(50)
            assert admission_bench.api.deleted == []
            await asyncio.sleep(30)

    virtual_time.run(main())
    assert admission_bench.api.deleted[:1] == ["v"]


def unschedulable(pod: Obj) -> Obj:
    refusal = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "1 Insufficient port"}
    return {**pod, "status": {**pod["status"], "conditions": [refusal]}}


def admitted(name: str, *nodes: str, service: str = "chat") -> Obj:
    place = {ENQUEUED_AT: "2026-01-01T00:00:00.000000Z"}
    pod = queue_pod(name, service=service, gated=False, created=LONG_AGO, annotations={} if nodes else place)
    return pinned(pod, *nodes) if nodes else pod


def test_pod_that_the_scheduler_refuses_goes_back_with_its_place_and_avoids_the_cell() -> None:
    admission_bench = bench(unschedulable(admitted("a", "n1")))

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(PINNED_SECONDS - 5)
            assert admission_bench.api.deleted == []
            await asyncio.sleep(10)
            cell = admission_bench.registry.find_cell("node/n1")
            assert cell is not None
            assert cell.closed == "", "one tenant closes no cell to others"
            assert admission_bench.api.deleted == ["a"]
            assert ledger_of(admission_bench)["freed"][0]["unit"] == "uid-a"
            admission_bench.remove(PODS, "a")
            admission_bench.change(PODS, queue_pod("b"))
            await asyncio.sleep(PINNED_SECONDS - 20)
            assert admission_bench.api.tries == []
            await asyncio.sleep(30)

    virtual_time.run(main())
    assert admission_bench.api.tries == [("b", "n1")]
    assert admission_bench.api.find(PODS, "b")["metadata"]["annotations"][ENQUEUED_AT] == format_place(
        find_own_place(admitted("a"))
    )


@pytest.mark.parametrize(("namespace", "is_closed"), [("team", False), ("bank", True)])
def test_cell_is_closed_once_it_refuses_pods_of_two_namespaces(namespace: str, is_closed: bool) -> None:
    pods = UnscheduledPods()
    first = queue_units.pod("a", namespace="team", service="chat", cells=("node/n1",))
    assert pods.note_refusal(first, 0.0) == []
    assert pods.list_avoided(first.service, PINNED_SECONDS - 1) == {"node/n1"}
    second = queue_units.pod("b", namespace=namespace, service="mail", cells=("node/n1",))
    assert pods.list_avoided(second.service, 0.0) == frozenset()
    assert pods.note_refusal(second, 2 * PINNED_SECONDS) == (["node/n1"] if is_closed else [])
    assert pods.list_avoided(first.service, 2 * PINNED_SECONDS) == frozenset()
    assert pods.note_refusal(second, 9 * PINNED_SECONDS) == [], "long ago"


def test_pod_that_the_scheduler_takes_in_time_stays() -> None:
    admission_bench = bench(unschedulable(admitted("a", "n1")))

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(PINNED_SECONDS - 5)
            admission_bench.change(PODS, queue_pod("a", gated=False, node="n1"))
            await asyncio.sleep(100)

    virtual_time.run(main())
    assert admission_bench.api.deleted == []


@pytest.mark.parametrize(
    ("elastic", "seconds", "deleted"),
    [(1, UNPINNED_SECONDS - 5, []), (1, UNPINNED_SECONDS + 5, ["a"]), (0, 2 * UNPINNED_SECONDS, [])],
    ids=["young", "overdue", "was never gated"],
)
def test_pod_without_a_pin_goes_back_later_and_only_to_an_elastic_pool(
    elastic: int, seconds: float, deleted: list[str]
) -> None:
    rules = PlanRules(pools={"nvidia": PoolRules(elastic=elastic)})
    admission_bench = play(bench(unschedulable(admitted("a")), rules=rules), seconds)
    assert admission_bench.api.deleted[:1] == deleted


@pytest.mark.parametrize(
    ("elastic", "seconds", "deleted"),
    [(1, PINNED_SECONDS - 5, []), (1, PINNED_SECONDS + 5, ["a"]), (0, 2 * UNPINNED_SECONDS, [])],
    ids=["young", "overdue", "was never gated"],
)
def test_pod_without_a_pin_that_no_scheduler_looks_at_goes_back_soon(
    elastic: int, seconds: float, deleted: list[str]
) -> None:
    """It names a scheduler that nobody runs, and keeps room on each node of the pool meanwhile."""
    rules = PlanRules(pools={"nvidia": PoolRules(elastic=elastic)})
    assert play(bench(admitted("a"), rules=rules), seconds).api.deleted[:1] == deleted


@pytest.mark.parametrize(
    ("claims", "seconds", "deleted"),
    [(True, PINNED_SECONDS - 5, []), (True, PINNED_SECONDS + 5, ["a"]), (False, 2 * PINNED_SECONDS, [])],
)
def test_pinned_pod_whose_devices_no_scheduler_chooses_goes_back(
    claims: bool, seconds: float, deleted: list[str]
) -> None:
    """Until its devices are chosen, its node gives none to other needs: for ever, for a scheduler that nobody runs."""
    pod = admitted("a", "n1")
    if claims:
        pod["metadata"]["annotations"][DEVICE_NEED] = encode_need(DeviceNeed(driver=DRIVER, device_class=DRIVER))
    assert play(bench(pod), seconds).api.deleted[:1] == deleted


def test_pod_without_a_pin_that_is_bound_in_the_last_moment_stays() -> None:
    admission_bench = bench(admitted("a"), rules=PlanRules(pools={"nvidia": PoolRules(elastic=1)}))

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(PINNED_SECONDS - 1)
            admission_bench.api.before_ledger = lambda: admission_bench.change(
                PODS, queue_pod("a", gated=False, node="n1")
            )
            await asyncio.sleep(5)

    virtual_time.run(main())
    assert admission_bench.api.deleted == []


def test_pod_that_the_queue_did_not_admit_is_left_to_the_scheduler() -> None:
    rules = PlanRules(pools={"nvidia": PoolRules(elastic=1)})
    never_gated = unschedulable(queue_pod("a", gated=False, created=LONG_AGO))
    assert play(bench(never_gated, rules=rules), 2 * UNPINNED_SECONDS).api.deleted == []


def test_admitted_pod_that_is_not_bound_makes_room_at_once() -> None:
    """It has loaded nothing; and a second gate, or the name of a scheduler that nobody runs, could hold it for ever."""
    admission_bench = play(bench(admitted("v", "n1", service="low"), queue_pod("p", service="vip")))
    assert (admission_bench.api.evictions, admission_bench.api.tries) == (["v"], [])


CLAIM = Claim(kind="pod", namespace="team", names=("a",), cells=("node/n1",), service="chat")


def test_new_leader_finishes_what_the_last_one_began() -> None:
    ledger = LedgerContent(leader="other", claims={"uid-a": CLAIM})
    pods = (queue_pod("a"), queue_pod("b", service="vip"))
    admission_bench = play(bench(*pods, ledger=ledger))
    assert admission_bench.api.tries == [("a", "n1")], "the last leader may still send its write"


def test_claim_whose_unit_is_gone_reserves_nothing() -> None:
    claim = Claim(kind="pod", namespace="team", names=("gone",), cells=("node/n1",))
    ledger = LedgerContent(leader="other", claims={"uid-gone": claim})
    assert play(bench(queue_pod("a"), ledger=ledger)).api.tries == [("a", "n1")]


def test_claim_on_a_node_that_is_gone_is_finished_before_another_node_has_its_name() -> None:
    # Without that, the last leader's late write would put "a" beside "b" on the node that comes back.
    claim = Claim(kind="pod", namespace="team", names=("a",), cells=("node/n2",), service="chat")
    full = queue_pod("full", service="vip", gated=False, node="n1")
    admission_bench = bench(full, queue_pod("a"), ledger=LedgerContent(leader="other", claims={"uid-a": claim}))

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(5)
            admission_bench.change(NODES, node("n2"))
            admission_bench.change(PODS, queue_pod("b", service="vip"))
            await asyncio.sleep(5)

    virtual_time.run(main())
    assert admission_bench.api.tries == [("a", "n2")]


def test_claim_that_is_refused_for_ever_keeps_its_cell_while_a_late_write_may_arrive_and_delays_no_start() -> None:
    other = queue_pod("b", service="mail")
    admission_bench = bench(queue_pod("a"), other, ledger=LedgerContent(leader="other", claims={"uid-a": CLAIM}))
    admission_bench.api.refuse = lambda name, _place: Invalid("patch", status=422) if name == "a" else None

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(admission.LATE_WRITE_SECONDS - 5)
            assert {name for name, _ in admission_bench.api.tries} == {"a"}
            # The last pause may begin just before the end, and is twelve seconds at most.
            await asyncio.sleep(30)

    virtual_time.run(main())
    assert ("b", "n1") in admission_bench.api.tries


def test_claim_of_unknown_outcome_keeps_its_cell_from_those_that_come_first() -> None:
    first = queue_pod("b", service="vip")
    ledger = LedgerContent(leader="other", claims={"uid-a": CLAIM})
    admission_bench = bench(queue_pod("a"), first, nodes=tuple(map(node, ("n1", "n2", "n3"))), ledger=ledger)
    admission_bench.api.refuse = lambda name, _place: Unreachable("patch: cut") if name == "a" else None
    admission_bench.api.refused_reads = 1_000_000
    tries = play(admission_bench, 60.0).api.tries
    assert [place for name, place in tries if name == "a"] == [], "nor is it given another one"
    assert [place for name, place in tries if name == "b"] in (["n2"], ["n3"])


def test_others_have_their_turn_while_the_units_of_many_services_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "STEP_SECONDS", 0.0)
    services, turns = 50, 0
    admission_bench = bench(
        *(queue_pod(f"pod-{number}", service=f"s{number}", devices=9) for number in range(services))
    )

    async def main() -> None:
        nonlocal turns
        planned = asyncio.Event()
        admission_bench.during_plan = planned.set
        async with admission_bench.running():
            while not planned.is_set():
                turns += 1
                await asyncio.sleep(0)

    virtual_time.run(main())
    assert turns > services
