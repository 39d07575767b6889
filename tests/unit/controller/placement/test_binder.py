"""Binding of MetalProcesses to hosts: order, memory, hosts to avoid, and answers that are lost or refused."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.placement import binder
from controller.placement.binder import REPORTED_TRIES, Binder, WaitingProcess, bind, decide_bindings, list_waiting
from controller.placement.capacity import HostCapacity, stored_capacities
from controller.reconcile.plan import Leading, readable
from crds.meta import Priority
from crds.metalprocess import MetalProcess
from kube.client import Client, Obj
from kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound, Unreachable
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, ObjectKey, Resource
from kube.store import Store
from tests.support import virtual_time
from tests.support.api_objects import GIB, as_host, as_process, condition, host, process, service, store
from tests.support.background import running
from tests.support.eventually import eventually

LLAMA = frozenset({"llama.cpp"})
PRIORITIES: tuple[Priority, ...] = ("critical", "high", "normal", "low", "batch")


def wants(name: str, gib: int, priority: Priority = "normal", enqueued: str = "2026-01-01T00:00:00Z") -> WaitingProcess:
    return WaitingProcess(ObjectKey("team", name), name, "1", priority, enqueued, "llama.cpp", gib * GIB, frozenset())


def capacity(name: str, gib: int) -> HostCapacity:
    return HostCapacity(name, LLAMA, gib * GIB)


def placed(among: list[WaitingProcess], hosts: list[HostCapacity]) -> dict[str, str]:
    return {each.process.uid: each.host for each in bind(among, hosts)}


def test_host_with_most_free_memory_is_picked() -> None:
    assert placed([wants("a", 4)], [capacity("small", 8), capacity("large", 16)]) == {"a": "large"}


def test_host_is_given_to_namespaces() -> None:
    large = capacity("large", 16)._replace(namespaces=frozenset({"other"}))
    assert placed([wants("a", 4)], [capacity("small", 8), large]) == {"a": "small"}
    assert placed([wants("a", 4)], [large]) == {}
    assert placed([wants("a", 4)], [large._replace(namespaces=frozenset({"other", "team"}))]) == {"a": "large"}


@pytest.mark.parametrize(
    "closed",
    [
        {"address_problem": "it is that of a node"},
        {"short_of_memory": True},
        {"pause": "quiet hours"},
        {"is_cordoned": True},
    ],
)
def test_host_that_takes_no_process_gets_none(closed: dict[str, Any]) -> None:
    large = capacity("large", 16)._replace(**closed)
    assert placed([wants("a", 1)], [large]) == {}
    assert placed([wants("a", 1)], [large, capacity("small", 2)]) == {"a": "small"}


def test_each_binding_counts_for_the_next() -> None:
    assert placed([wants("a", 6), wants("b", 6)], [capacity("one", 8), capacity("two", 7)]) == {"a": "one", "b": "two"}
    assert placed([wants("a", 6), wants("b", 6)], [capacity("one", 8)]) == {"a": "one"}


def test_order_is_by_priority_then_age_then_name() -> None:
    early, late = wants("z", 6, enqueued="2026-01-01T00:00:00Z"), wants("a", 6, enqueued="2026-01-02T00:00:00Z")
    assert placed([late, early], [capacity("one", 8)]) == {"z": "one"}
    assert placed([early, late._replace(priority="high")], [capacity("one", 8)]) == {"a": "one"}


def test_process_that_fits_nowhere_does_not_block_others() -> None:
    assert placed([wants("huge", 99, "critical"), wants("b", 2)], [capacity("one", 8)]) == {"b": "one"}


def test_host_without_the_engine_or_that_rejected_is_excluded() -> None:
    assert placed([wants("a", 1)], [HostCapacity("one", frozenset({"mlx"}), GIB * 9)]) == {}
    refused = wants("a", 1)._replace(avoid=frozenset({"one"}))
    assert placed([refused], [capacity("one", 9), capacity("two", 3)]) == {"a": "two"}


def test_process_is_bound_only_to_a_host_whose_agent_knows_what_it_needs() -> None:
    large, small = capacity("large", 16), capacity("small", 8)
    needs = wants("a", 4)._replace(features=frozenset({"Inspection", "Tomorrow"}))
    assert placed([needs], [large, small]) == {}
    assert placed([needs], [large._replace(features=frozenset({"Tomorrow"})), small]) == {}
    knows = small._replace(features=frozenset({"Inspection", "Later", "Tomorrow"}))
    assert placed([needs], [large, knows]) == {"a": "small"}
    assert placed([wants("b", 4), needs], [large, knows]) == {"a": "small", "b": "large"}


def test_process_goes_past_a_larger_host_whose_agent_does_not_know_what_it_needs() -> None:
    """As the objects say it, through the same decision that the binder makes."""
    large, small = host("large", 64 * GIB), host("small", 8 * GIB, features=["Tomorrow"])
    waiting = process("a-1-0", features=["Tomorrow"])
    known = store((METAL_HOSTS, large), (METAL_HOSTS, small), (METAL_PROCESSES, waiting))
    assert [each.host for each in decide_bindings(known, lambda _: True)] == ["small"]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[WaitingProcess], list[HostCapacity]]:
    hosts = [capacity(f"host-{number}", draw(st.integers(0, 40))) for number in range(draw(st.integers(0, 5)))]
    names = st.frozensets(st.sampled_from([each.host for each in hosts] or ["none"]))
    waits = [
        wants(f"p{number}", draw(st.integers(1, 30)), draw(st.sampled_from(PRIORITIES)))._replace(avoid=draw(names))
        for number in range(draw(st.integers(0, 10)))
    ]
    return waits, hosts


@given(worlds(), st.randoms())
def test_bindings_are_ordered_complete_and_never_over_committed(
    world: tuple[list[WaitingProcess], list[HostCapacity]], shuffler: random.Random
) -> None:
    waits, hosts = world
    bindings = bind(waits, hosts)
    left = {each.host: each.free_bytes for each in hosts}
    for waited, chosen in bindings:
        eligible = {name: free for name, free in left.items() if name not in waited.avoid}
        assert chosen in eligible, "a host that rejected it is avoided"
        assert eligible[chosen] == max(eligible.values()), "most free first"
        left[chosen] -= waited.memory_bytes
        assert left[chosen] >= 0, "never over-committed"
    assert [each.process.order for each in bindings] == sorted(each.process.order for each in bindings)
    bound = {each.process.uid for each in bindings}
    for waited in (each for each in waits if each.uid not in bound):
        eligible = {name: free for name, free in left.items() if name not in waited.avoid}
        assert all(free < waited.memory_bytes for free in eligible.values()), "whoever fits is bound"
    shuffler.shuffle(waits)
    shuffler.shuffle(hosts)
    assert bind(waits, hosts) == bindings, "the order of what is observed decides nothing"


def test_waiting_processes_have_no_host_and_are_not_deleted() -> None:
    objects = [
        process("chat-1234abcd-0"),
        process("chat-1234abcd-1", host="one"),
        process("chat-1234abcd-2", deletionTimestamp="2026-11-21T12:00:00Z"),
    ]
    assert [each.key.name for each in list_waiting(list(map(as_process, objects)))] == ["chat-1234abcd-0"]


def test_host_that_rejected_a_sibling_is_avoided_only_for_the_same_spec() -> None:
    objects = [
        process("chat-1234abcd-0", host="one", phase="Rejected"),
        process("chat-1234abcd-1"),
        process("chat-ffffffff-0"),
    ]
    found = {each.key.name: each.avoid for each in list_waiting(list(map(as_process, objects)))}
    assert found == {"chat-1234abcd-1": {"one"}, "chat-ffffffff-0": frozenset()}


def test_displacing_host_is_avoided_before_its_pressure_is_known() -> None:
    asks = process("chat-1", host="studio-1", phase="Ready")
    asks["status"]["conditions"] = [condition("DisruptionTarget", "True", "MemoryPressure")]
    (waits,) = list_waiting(readable([asks, process("chat-2")], MetalProcess))
    assert waits.avoid == {"studio-1"}


def test_expired_host_is_not_bound_even_if_its_status_is_ready() -> None:
    known = store((METAL_HOSTS, host("one")), (METAL_HOSTS, host("two", GIB * 2)), (METAL_PROCESSES, process("a-b-0")))
    assert [each.host for each in binder.decide_bindings(known, lambda name: name == "two")] == ["two"]
    assert binder.decide_bindings(known, lambda _: False) == []


def test_a_host_that_is_being_deleted_is_not_bound() -> None:
    leaving = host("one")
    leaving["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    known = store((METAL_HOSTS, leaving), (METAL_PROCESSES, process("a-b-0")))
    assert binder.decide_bindings(known, lambda _: True) == []


def test_structs_decode_objects_of_the_api() -> None:
    assert msgspec.to_builtins(as_process(process("a", host="one")))["spec"]["hostName"] == "one"


def test_unreadable_process_blocks_no_other_and_keeps_its_memory() -> None:
    strange = process("new-0", host="one", gib=7, phase="Hibernating", priority="cosmic")
    odd_host = host("odd", runtimes="all")
    waits = [process("a-b-0", gib=2), process("a-b-1", gib=2), process("odd-0", priority="cosmic")]
    known = store(
        (METAL_HOSTS, host("one", 10 * GIB)),
        (METAL_HOSTS, odd_host),
        *((METAL_PROCESSES, each) for each in (strange, *waits)),
    )
    assert [(each.process.uid, each.host) for each in binder.decide_bindings(known, lambda _: True)] == [
        ("uid-a-b-0", "one")
    ]


def test_unreadable_status_counts_as_none() -> None:
    (found,) = readable([process("a", host="one", phase="Hibernating")], MetalProcess)
    assert (found.spec.host_name, found.status.phase) == ("one", "Pending")


class Api(Client):
    """An API that binds as the API server does; it can lose answers, refuse, and fail `refuse_reads` reads."""

    def __init__(self, *objects: Obj) -> None:
        self.refuse: Callable[[str, str], ApiError | None] = lambda _name, _host: None
        self.objects = {each["metadata"]["name"]: each for each in objects}
        self.tries: list[tuple[str, str]] = []
        self.before_answer: Callable[[], None] = lambda: None
        self.lose_answers = False
        self.refuse_reads = 0
        self.reads = 0
        self.find: Callable[[str], Obj] = lambda name: self.objects[name]

    async def patch_json(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        operations: Sequence[Mapping[str, Any]],
        *,
        subresource: str = "",
    ) -> Obj:
        del resource, namespace, subresource
        test, add = operations
        self.tries.append((name, add["value"]))
        if refusal := self.refuse(name, add["value"]):
            raise refusal
        observed = self.objects[name]
        if test["value"] != observed["metadata"]["resourceVersion"]:
            raise Conflict("patch", status=409)
        version = str(int(test["value"]) + 1)
        self.objects[name] = observed | {
            "metadata": observed["metadata"] | {"resourceVersion": version},
            "spec": observed["spec"] | {"hostName": add["value"]},
        }
        self.before_answer()
        if self.lose_answers:
            raise Unreachable("patch: cut")
        return self.objects[name]

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        del resource, namespace
        self.reads += 1
        if self.reads <= self.refuse_reads:
            raise Unreachable("get: cut")
        return self.find(name)

    def host_of(self, name: str) -> str:
        host: str = self.objects[name]["spec"].get("hostName", "none")
        return host


def leading(api: Api, known: Store, recorder: Any = None) -> Leading:
    return Leading(api, known, recorder, lambda _resource, _key: None)


def newer(obj: Obj, version: int) -> Obj:
    return obj | {"metadata": obj["metadata"] | {"resourceVersion": str(version)}}


@pytest.mark.parametrize("refuse_reads", [0, 2])
async def test_a_lost_answer_never_promises_the_same_memory_twice(
    refuse_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binder, "READ_AGAIN_SECONDS", 0)
    waits = [process(f"a-b-{number}", gib=6) for number in range(3)]
    api = Api(*waits)
    api.lose_answers, api.refuse_reads = True, refuse_reads
    known = store((METAL_HOSTS, host("one", 8 * GIB)), *((METAL_PROCESSES, each) for each in waits))
    async with running(Binder(lambda _: True).run(leading(api, known))):
        await eventually(lambda: any("hostName" in each["spec"] for each in known.list(METAL_PROCESSES)))
        assert api.reads == refuse_reads + 1
        known.put(METAL_HOSTS, host("two", 8 * GIB))
        await eventually(lambda: len([each for each in api.objects.values() if "hostName" in each["spec"]]) == 2)
    assert sorted(each["spec"].get("hostName", "none") for each in api.objects.values()) == ["none", "one", "two"]


async def test_process_that_changed_in_between_is_read_again_and_bound() -> None:
    api = Api(process("a-b-0") | {"metadata": process("a-b-0")["metadata"] | {"resourceVersion": "9"}})
    known = store((METAL_HOSTS, host("one")), (METAL_PROCESSES, process("a-b-0")))
    async with running(Binder(lambda _: True).run(leading(api, known))):
        await eventually(lambda: api.host_of("a-b-0") == "one")


REFUSALS = [
    ApiError("patch", status=400, reason="BadRequest", message="admission webhook denied the request"),
    Forbidden("patch", status=403, message="a policy has something against it"),
    Invalid("patch", status=422, message="a policy has something against it"),
    ApiError("patch", status=429, message="slow down"),
    ApiError("patch", status=500, message="failed calling webhook"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: str(error.status))
async def test_refused_binding_delays_no_other_and_is_retried_with_backoff(refusal: ApiError) -> None:
    first = [process(f"a-b-{number}", creationTimestamp="2026-11-21T11:00:00Z") for number in range(8)]
    second = process("z-b-0")
    api = Api(*first, second)
    api.refuse = lambda name, _host: refusal if name.startswith("a-") else None
    known = store((METAL_HOSTS, host("one")), *((METAL_PROCESSES, each) for each in (*first, second)))
    async with running(Binder(lambda _: True).run(leading(api, known))):
        await eventually(lambda: api.host_of("z-b-0") == "one")
        assert ("z-b-0", "one") in api.tries[:9], "each is tried once before any is tried again"
        api.refuse = lambda _name, _host: None
        await eventually(lambda: api.host_of("a-b-7") == "one")


def test_a_refused_binding_is_retried_ever_more_rarely() -> None:
    async def main() -> int:
        api = Api(process("a-b-0"))
        api.refuse = lambda _name, _host: ApiError("patch", status=500)
        known = store((METAL_HOSTS, host("one")), (METAL_PROCESSES, process("a-b-0")))
        async with running(Binder(lambda _: True).run(leading(api, known))):
            await asyncio.sleep(1)
            for number in range(100):
                known.put(METAL_HOSTS, newer(host("one", 8 * GIB), number + 2))
                await asyncio.sleep(36)
        return len(api.tries)

    assert 40 < virtual_time.run(main()) < 100, "an hour, with a change of the host every 36 s"


async def test_owner_is_told_of_a_binding_that_fails_again_and_again() -> None:
    notes: list[tuple[str, str]] = []

    class Recorder:
        async def event(self, regarding: Obj, _type: str, _reason: str, note: str, _action: str) -> None:
            notes.append((regarding["kind"], note))

    waiting = process("chat-1-0")
    api = Api(waiting)
    api.refuse = lambda _name, _host: ApiError("patch", status=400, message="a webhook denied it")
    owner = service("chat") | {"kind": "InferenceService"}
    known = store((METAL_HOSTS, host("one")), (METAL_PROCESSES, waiting), (INFERENCE_SERVICES, owner))
    async with running(Binder(lambda _: True).run(leading(api, known, Recorder()))):
        await eventually(lambda: len(api.tries) == REPORTED_TRIES + 1)
    ((kind, note),) = notes
    assert (kind, "team/chat-1-0" in note, "host one" in note) == ("InferenceService", True, True)
    assert "a webhook denied it" in note


async def test_process_that_one_host_refuses_is_bound_to_another() -> None:
    api = Api(process("a-b-0"))
    api.refuse = lambda _name, host: Forbidden("patch", status=403) if host == "large" else None
    known = store(
        (METAL_HOSTS, host("large", 9 * GIB)),
        (METAL_HOSTS, host("small", 2 * GIB)),
        (METAL_PROCESSES, process("a-b-0")),
    )
    async with running(Binder(lambda _: True).run(leading(api, known))):
        await eventually(lambda: api.host_of("a-b-0") == "small")
    assert [host for _name, host in api.tries] == ["large", "small"]


def test_host_that_refused_every_process_is_still_the_last_choice() -> None:
    waits = wants("a", 1)._replace(refused_by=frozenset({"large"}))
    assert placed([waits], [capacity("large", 9), capacity("small", 2)]) == {"a": "small"}
    assert placed([waits], [capacity("large", 9)]) == {"a": "large"}


async def test_host_that_expires_during_a_round_is_not_bound() -> None:
    waits = [process(f"a-b-{number}") for number in range(3)]
    api, alive = Api(*waits), {"one", "two"}
    api.before_answer = lambda: alive.discard("one")
    known = store(
        (METAL_HOSTS, host("one")), (METAL_HOSTS, host("two", 9 * GIB)), *((METAL_PROCESSES, each) for each in waits)
    )
    async with running(Binder(alive.__contains__).run(leading(api, known))):
        await eventually(lambda: api.host_of("a-b-2") != "none")
    assert [api.host_of(f"a-b-{number}") for number in range(3)] == ["one", "two", "two"]


async def test_host_that_loses_its_memory_during_a_round_is_not_bound() -> None:
    waits = [process(f"a-b-{number}") for number in range(3)]
    api = Api(*waits)
    known = store(
        (METAL_HOSTS, host("one")), (METAL_HOSTS, host("two", 9 * GIB)), *((METAL_PROCESSES, each) for each in waits)
    )

    def take_memory() -> None:
        known.put(METAL_HOSTS, newer(host("one", GIB // 2), 2))

    api.before_answer = take_memory
    async with running(Binder(lambda _: True).run(leading(api, known))):
        await eventually(lambda: api.host_of("a-b-2") != "none")
    assert [api.host_of(f"a-b-{number}") for number in range(3)] == ["one", "two", "two"]


async def test_successor_of_a_process_that_is_gone_is_bound() -> None:
    gone = process("a-b-0")
    successor = gone | {"metadata": gone["metadata"] | {"uid": "successor", "resourceVersion": "9"}}
    api = Api(gone)
    known = store((METAL_HOSTS, host("one")), (METAL_PROCESSES, gone))

    def find_nothing() -> Obj:
        known.put(METAL_PROCESSES, successor)  # its event overtakes the answer
        api.objects["a-b-0"] = successor
        api.find = api.objects.__getitem__
        raise NotFound("get", status=404)

    api.find = lambda _name: find_nothing()
    api.refuse = lambda _name, _host: NotFound("patch", status=404) if len(api.tries) == 1 else None
    async with running(Binder(lambda _: True).run(leading(api, known))):
        await eventually(lambda: api.host_of("a-b-0") == "one")


async def test_host_that_comes_alive_is_bound_when_the_binder_is_notified() -> None:
    api = Api(process("a-b-0"))
    known = store((METAL_HOSTS, host("one")), (METAL_PROCESSES, process("a-b-0")))
    alive: set[str] = set()
    loop = Binder(alive.__contains__)
    async with running(loop.run(leading(api, known))):
        known.put(METAL_HOSTS, host("two"))
        assert "hostName" not in api.objects["a-b-0"]["spec"]
        alive.add("one")
        loop.wake()
        await eventually(lambda: api.objects["a-b-0"]["spec"].get("hostName") == "one")


SIZES = st.integers(1, 6)
GIVEN_TO: list[list[str]] = [[], ["team"], ["other"], ["other", "team"]]
PLACES = st.sampled_from([None, "one", "two", "three"])
PHASES = st.sampled_from(["Pending", "Ready", "Rejected", "Stopped"])


@given(
    st.dictionaries(
        st.sampled_from(["one", "two", "three"]), st.tuples(st.integers(0, 12), st.sampled_from(GIVEN_TO)), min_size=1
    ),
    st.lists(st.tuples(st.sampled_from("ab"), SIZES, PLACES, PHASES), max_size=10),
)
def test_decision_by_indexes_is_that_of_a_look_at_everything(
    hosts: dict[str, tuple[int, list[str]]], processes: list[tuple[str, int, str | None, str]]
) -> None:
    objects = [
        process(f"{prefix}-{number}", host=place, phase=phase if place else "Pending", gib=gib)
        for number, (prefix, gib, place, phase) in enumerate(processes)
    ]
    known = store(
        *((METAL_HOSTS, host(name, gib * GIB) | {"spec": {"namespaces": to}}) for name, (gib, to) in hosts.items()),
        *((METAL_PROCESSES, each) for each in objects),
    )
    capacities = stored_capacities(known, map(as_host, known.list(METAL_HOSTS)))
    assert decide_bindings(known, lambda _: True) == bind(list_waiting([*map(as_process, objects)]), capacities)


def test_report_of_a_host_wakes_the_binder_only_if_something_fits() -> None:
    known = store((METAL_HOSTS, host("one", GIB)), (METAL_PROCESSES, process("a-b-0", gib=3)))
    binder_loop = Binder(lambda _: True)
    assert not binder_loop._may_take(known, known.list(METAL_HOSTS)[0])
    known.put(METAL_HOSTS, newer(host("one", 4 * GIB), 2))
    assert binder_loop._may_take(known, known.list(METAL_HOSTS)[0])
    known.put(METAL_PROCESSES, newer(process("a-b-0", gib=5), 8))
    assert not binder_loop._may_take(known, known.list(METAL_HOSTS)[0])
    known.put(METAL_PROCESSES, newer(process("a-b-0", gib=3), 9))
    other = newer(host("one", 4 * GIB), 3) | {"spec": {"namespaces": ["other"]}}
    known.put(METAL_HOSTS, other)
    assert not binder_loop._may_take(known, other), "the host is not given to the namespace"
    given = newer(other, 4) | {"spec": {"namespaces": ["other", "team"]}}
    known.put(METAL_HOSTS, given)
    assert binder_loop._may_take(known, given)
    refused = newer(host("one", 4 * GIB, conditions=[condition("AddressAccepted", "False")]), 5)
    known.put(METAL_HOSTS, refused)
    assert not binder_loop._may_take(known, refused)
    known.put(METAL_PROCESSES, newer(process("a-b-0", gib=3, features=["Tomorrow"]), 10))
    for version, features in ((6, ["Inspection"]), (7, ["Inspection", "Tomorrow"])):
        agent = newer(host("one", 4 * GIB, features=features), version)
        known.put(METAL_HOSTS, agent)
        assert binder_loop._may_take(known, agent) == ("Tomorrow" in features)


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"unschedulable": True}},
        {"spec": {"drain": True}},
        {"status": {"conditions": [condition("Paused", "True", "OwnerActive")]}},
    ],
    ids=["cordoned", "drained", "paused"],
)
def test_host_that_closes_after_the_decision_gets_nothing(change: Obj) -> None:
    waiting = process("a-1-0")
    known = store((METAL_HOSTS, host("studio-1")), (METAL_PROCESSES, waiting))
    (binding,) = decide_bindings(known, lambda _host: True)
    assert binder.still_fits(known, lambda _host: True, binding)
    closed = host("studio-1")
    closed["metadata"]["resourceVersion"] = "2"
    closed["status"] |= change.get("status", {})
    known.put(METAL_HOSTS, closed | ({"spec": change["spec"]} if "spec" in change else {}))
    assert not binder.still_fits(known, lambda _host: True, binding)
    assert decide_bindings(known, lambda _host: True) == []
