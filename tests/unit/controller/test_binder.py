import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from controller import binder
from controller.binder import Room, Waiting, bind, rooms, waiting
from controller.plan import Key
from crds.meta import Priority
from kube.resources import METAL_HOSTS, METAL_PROCESSES
from tests.serving import GIB, as_host, as_process, host, process, store

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
    return rooms([observed], [as_process(each) for each in processes])[0].free_bytes // GIB


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
    assert [each.key.name for each in waiting([(each, as_process(each)) for each in objects])] == ["chat-1234abcd-0"]


def test_a_host_that_rejected_a_sibling_is_avoided_but_not_by_another_spec() -> None:
    objects = [
        process("chat-1234abcd-0", host="one", phase="Rejected"),
        process("chat-1234abcd-1"),
        process("chat-ffffffff-0"),
    ]
    found = {each.key.name: each.avoid for each in waiting([(each, as_process(each)) for each in objects])}
    assert found == {"chat-1234abcd-1": {"one"}, "chat-ffffffff-0": frozenset()}


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
