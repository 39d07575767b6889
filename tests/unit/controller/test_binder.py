import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller import binder
from controller.binder import Binder, Room, Waiting, bind, rooms, waiting
from controller.plan import Key, Leading, readable
from crds.meta import Priority
from crds.metalprocess import MetalProcess
from kube.client import Client, Obj
from kube.errors import Conflict, Forbidden, Unreachable
from kube.resources import METAL_HOSTS, METAL_PROCESSES, Resource
from kube.store import Store
from tests.background import running
from tests.eventually import eventually
from tests.serving import GIB, as_host, as_process, condition, host, process, store

LLAMA = frozenset({"llama.cpp"})
PRIORITIES: tuple[Priority, ...] = ("critical", "high", "normal", "low", "batch")


def wants(name: str, gib: int, priority: Priority = "normal", created: str = "2026-01-01T00:00:00Z") -> Waiting:
    return Waiting(Key("team", name), name, "1", priority, created, "llama.cpp", gib * GIB, frozenset())


def room(name: str, gib: int) -> Room:
    return Room(name, LLAMA, gib * GIB)


def placed(among: list[Waiting], hosts: list[Room]) -> dict[str, str]:
    return {each.process.uid: each.host for each in bind(among, hosts)}


def test_most_free_memory_first() -> None:
    assert placed([wants("a", 4)], [room("small", 8), room("large", 16)]) == {"a": "large"}


def test_each_binding_counts_for_the_next() -> None:
    assert placed([wants("a", 6), wants("b", 6)], [room("one", 8), room("two", 7)]) == {"a": "one", "b": "two"}
    assert placed([wants("a", 6), wants("b", 6)], [room("one", 8)]) == {"a": "one"}


def test_priority_goes_before_age_and_age_before_chance() -> None:
    early, late = wants("z", 6, created="2026-01-01T00:00:00Z"), wants("a", 6, created="2026-01-02T00:00:00Z")
    assert placed([late, early], [room("one", 8)]) == {"z": "one"}
    assert placed([early, late._replace(priority="high")], [room("one", 8)]) == {"a": "one"}


def test_what_fits_nowhere_holds_nobody_back() -> None:
    assert placed([wants("huge", 99, "critical"), wants("b", 2)], [room("one", 8)]) == {"b": "one"}


def test_engine_and_rejection_rule_a_host_out() -> None:
    assert placed([wants("a", 1)], [Room("one", frozenset({"mlx"}), GIB * 9)]) == {}
    refused = wants("a", 1)._replace(avoid=frozenset({"one"}))
    assert placed([refused], [room("one", 9), room("two", 3)]) == {"a": "two"}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Waiting], list[Room]]:
    hosts = [room(f"host-{number}", draw(st.integers(0, 40))) for number in range(draw(st.integers(0, 5)))]
    names = st.frozensets(st.sampled_from([each.host for each in hosts] or ["none"]))
    waits = [
        wants(f"p{number}", draw(st.integers(1, 30)), draw(st.sampled_from(PRIORITIES)))._replace(avoid=draw(names))
        for number in range(draw(st.integers(0, 10)))
    ]
    return waits, hosts


@given(worlds(), st.randoms())
def test_bind(world: tuple[list[Waiting], list[Room]], shuffler: random.Random) -> None:
    waits, hosts = world
    bindings = bind(waits, hosts)
    left = {each.host: each.free_bytes for each in hosts}
    for waited, chosen in bindings:
        able = {name: free for name, free in left.items() if name not in waited.avoid}
        assert chosen in able, "a host that rejected it is avoided"
        assert able[chosen] == max(able.values()), "most free first"
        left[chosen] -= waited.memory_bytes
        assert left[chosen] >= 0, "never over-committed"
    assert [each.process.order for each in bindings] == sorted(each.process.order for each in bindings)
    bound = {each.process.uid for each in bindings}
    for waited in (each for each in waits if each.uid not in bound):
        able = {name: free for name, free in left.items() if name not in waited.avoid}
        assert all(free < waited.memory_bytes for free in able.values()), "whoever fits is bound"
    shuffler.shuffle(waits)
    shuffler.shuffle(hosts)
    assert bind(waits, hosts) == bindings, "the order of what is observed decides nothing"


def free(host_name: str, *processes: dict[str, object], listed: tuple[str, ...] = ()) -> int:
    observed = as_host(host(host_name, 10 * GIB, processes=[{"uid": uid} for uid in listed]))
    return rooms([observed], processes)[0].free_bytes // GIB


def test_room_is_what_the_host_reports_less_what_it_does_not_know_yet() -> None:
    assert free("one") == 10
    assert free("one", process("a", host="one", gib=3)) == 7
    assert free("one", process("a", host="one", gib=3), listed=("uid-a",)) == 10
    assert free("one", process("a", host="two", gib=3), process("b", gib=3)) == 10
    assert free("one", process("a", host="one", gib=99)) == 0


def test_a_process_on_its_way_out_holds_its_memory_until_its_host_says_stopped() -> None:
    leaving = {"host": "one", "gib": 4, "deletionTimestamp": "2026-11-21T12:00:00Z"}
    assert free("one", process("a", phase="Stopping", **leaving)) == 6  # type: ignore[arg-type] # fields of one object
    assert free("one", process("a", phase="Stopped", **leaving)) == 10  # type: ignore[arg-type] # fields of one object
    assert free("one", process("a", host="one", gib=4, phase="Rejected")) == 10


def test_memory_that_is_not_known_is_not_given() -> None:
    assert rooms([as_host(host("one", None))], [])[0].free_bytes == 0


def test_waiting_is_what_has_no_host_and_is_not_deleted() -> None:
    objects = [
        process("chat-1234abcd-0"),
        process("chat-1234abcd-1", host="one"),
        process("chat-1234abcd-2", deletionTimestamp="2026-11-21T12:00:00Z"),
    ]
    assert [each.key.name for each in waiting(list(map(as_process, objects)))] == ["chat-1234abcd-0"]


def test_a_host_that_rejected_a_sibling_is_avoided_but_not_by_another_spec() -> None:
    objects = [
        process("chat-1234abcd-0", host="one", phase="Rejected"),
        process("chat-1234abcd-1"),
        process("chat-ffffffff-0"),
    ]
    found = {each.key.name: each.avoid for each in waiting(list(map(as_process, objects)))}
    assert found == {"chat-1234abcd-1": {"one"}, "chat-ffffffff-0": frozenset()}


def test_a_host_that_asks_for_another_place_is_avoided_before_it_is_known_why() -> None:
    asks = process("chat-1", host="studio-1", phase="Ready")
    asks["status"]["conditions"] = [condition("DisruptionTarget", "True", "MemoryPressure")]
    (waits,) = waiting(readable([asks, process("chat-2")], MetalProcess))
    assert waits.avoid == {"studio-1"}


@pytest.mark.parametrize(("status", "placed_on"), [("True", {}), ("False", {"a": "one"}), ("Unknown", {"a": "one"})])
def test_a_host_that_is_short_of_memory_is_given_nothing(status: str, placed_on: dict[str, str]) -> None:
    short = host("one", conditions=[condition("Ready", "True"), condition("MemoryPressure", status)])
    assert placed([wants("a", 1)], rooms([as_host(short)], [])) == placed_on


def test_only_hosts_that_are_alive_now_are_bound_whatever_their_object_says() -> None:
    known = store((METAL_HOSTS, host("one")), (METAL_HOSTS, host("two", GIB * 2)), (METAL_PROCESSES, process("a-b-0")))
    assert [each.host for each in binder.decide(known, lambda name: name == "two")] == ["two"]
    assert binder.decide(known, lambda _: False) == []


def test_a_host_that_is_being_deleted_is_not_bound() -> None:
    leaving = host("one")
    leaving["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    known = store((METAL_HOSTS, leaving), (METAL_PROCESSES, process("a-b-0")))
    assert binder.decide(known, lambda _: True) == []


def test_structs_read_what_the_api_sends() -> None:
    assert msgspec.to_builtins(as_process(process("a", host="one")))["spec"]["hostName"] == "one"


def test_what_cannot_be_read_stops_nobody_and_holds_its_memory() -> None:
    strange = process("new-0", host="one", gib=7, phase="Hibernating", priority="cosmic")
    odd_host = host("odd", runtimes="all")
    waits = [process("a-b-0", gib=2), process("a-b-1", gib=2), process("odd-0", priority="cosmic")]
    known = store(
        (METAL_HOSTS, host("one", 10 * GIB)),
        (METAL_HOSTS, odd_host),
        *((METAL_PROCESSES, each) for each in (strange, *waits)),
    )
    assert [(each.process.uid, each.host) for each in binder.decide(known, lambda _: True)] == [("uid-a-b-0", "one")]


def test_a_status_in_unknown_words_counts_as_none() -> None:
    (found,) = readable([process("a", host="one", phase="Hibernating")], MetalProcess)
    assert (found.spec.host_name, found.status.phase) == ("one", "Pending")


class Api(Client):
    """Binds as the API server does, and loses answers while it is told to; reads are refused as often as it is told."""

    def __init__(self, *objects: Obj) -> None:
        self.forbidden: set[str] = set()
        self.objects = {each["metadata"]["name"]: each for each in objects}
        self.lose_answers = False
        self.refuse_reads = 0
        self.reads = 0

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
        if name in self.forbidden:
            raise Forbidden("patch: a policy has something against it", status=403)
        test, add = operations
        observed = self.objects[name]
        if test["value"] != observed["metadata"]["resourceVersion"]:
            raise Conflict("patch", status=409)
        version = str(int(test["value"]) + 1)
        self.objects[name] = observed | {
            "metadata": observed["metadata"] | {"resourceVersion": version},
            "spec": observed["spec"] | {"hostName": add["value"]},
        }
        if self.lose_answers:
            raise Unreachable("patch: cut")
        return self.objects[name]

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        del resource, namespace
        self.reads += 1
        if self.reads <= self.refuse_reads:
            raise Unreachable("get: cut")
        return self.objects[name]


def leading(api: Api, known: Store) -> Leading:
    recorder: Any = None
    return Leading(api, known, recorder, lambda _resource, _key: None)


@pytest.mark.parametrize("refuse_reads", [0, 2])
async def test_a_lost_answer_never_promises_the_same_memory_twice(
    refuse_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binder, "RETRY_SECONDS", 0)
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


async def test_what_changed_meanwhile_is_read_again_and_bound() -> None:
    api = Api(process("a-b-0") | {"metadata": process("a-b-0")["metadata"] | {"resourceVersion": "9"}})
    known = store((METAL_HOSTS, host("one")), (METAL_PROCESSES, process("a-b-0")))
    async with running(Binder(lambda _: True).run(leading(api, known))):
        await eventually(lambda: api.objects["a-b-0"]["spec"].get("hostName") == "one")


async def test_one_that_may_not_be_bound_holds_nobody_up_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binder, "REFUSED_SECONDS", 0.2)
    first, second = process("a-b-0", creationTimestamp="2026-11-21T11:00:00Z"), process("a-b-1")
    api = Api(first, second)
    api.forbidden = {"a-b-0"}
    known = store((METAL_HOSTS, host("one")), (METAL_PROCESSES, first), (METAL_PROCESSES, second))
    async with running(Binder(lambda _: True).run(leading(api, known))):
        await eventually(lambda: "hostName" in api.objects["a-b-1"]["spec"])
        api.forbidden.clear()
        await eventually(lambda: "hostName" in api.objects["a-b-0"]["spec"])


async def test_a_host_that_comes_alive_is_bound_when_the_binder_is_told() -> None:
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
