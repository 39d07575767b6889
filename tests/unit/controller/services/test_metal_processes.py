"""MetalProcesses of a service: creation, deletion and release, in every order of events."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.models.served import Served
from controller.reconcile.plan import Plan, Snapshot
from controller.services.metal_processes import build_process_spec, decide_release
from controller.services.rollout import (
    AVOID_SECONDS,
    AVOID_STOPPED_SECONDS,
    MetalProcessSteps,
    process_prefix,
    sort_processes,
)
from crds.meta import LABEL_SERVICE, PROCESS_FINALIZER
from crds.metalprocess import MetalProcess
from kube.client import Obj
from kube.resources import METAL_PROCESSES, ObjectKey
from tests.support.api_objects import (
    GIB,
    NOW,
    as_model,
    as_process,
    as_service,
    condition,
    host,
    model,
    process,
    service,
    store,
)
from tests.support.process_steps import LEAVING, NAME, SPEC, deleted, made, steps

DISPLACED: Obj = {"conditions": [condition("DisruptionTarget", "True", "MemoryPressure")]}


def test_a_new_process_is_complete_unbound_and_without_a_secret() -> None:
    ((resource, obj),) = steps(1).create
    assert resource == METAL_PROCESSES
    assert obj["metadata"]["name"] == f"{NAME}-0"
    assert obj["metadata"]["finalizers"] == [PROCESS_FINALIZER]
    assert obj["metadata"]["labels"][LABEL_SERVICE] == "chat"
    assert obj["metadata"]["ownerReferences"][0]["uid"] == "uid-chat"
    assert obj["spec"] == {
        "serviceName": "chat",
        "modelName": "tiny",
        "runtime": "llama.cpp",
        "artifact": {
            "source": "http://models.example/tiny.gguf",
            "revision": "r1",
            "sha256": "a" * 64,
            "sizeBytes": GIB,
        },
        "memoryBytes": 2 * GIB,
        "tokenSecret": "chat-token",
    }


def test_edited_spec_changes_the_process_names_and_scaling_does_not() -> None:
    def named(**spec: Any) -> str:
        return process_prefix(
            "chat", build_process_spec(as_service(service(**spec)), Served(as_model(model()), "llama.cpp"), 2 * GIB)
        )

    assert named(replicas=5, suspend=True) == NAME
    assert named(mode="chat", cacheTypeK="".join("f16")) == NAME, "said, or left to the default"
    edits: list[Obj] = [{"contextLength": 8192}, {"parallel": 2}, {"promptCache": "1Gi"}, {"extraArgs": ["-fa"]}]
    assert len({NAME, *(named(**edit) for edit in edits)}) == 5
    assert named(priority="low", evictionProtection=True, drainSeconds=30) == NAME, "these are patched in place"


@pytest.mark.parametrize(
    ("edit", "written"),
    [
        ({"priority": "high"}, {"priority": "high"}),
        ({"drainSeconds": 30}, {"drainSeconds": 30}),
        ({"evictionProtection": True}, {"protected": True}),
    ],
)
def test_edit_that_starts_no_engine_anew_is_patched_in_place(edit: Obj, written: Obj) -> None:
    serving = process(f"{NAME}-0", host="studio-1", phase="Ready", gib=2)
    done = steps(1, serving, edit=edit)
    assert (made(done), deleted(done)) == ([], set())
    (patch,) = done.patch
    assert patch.ref.name == f"{NAME}-0"
    test, *operations = patch.operations
    assert test["path"] == "/metadata/resourceVersion"
    assert [(operation["path"], operation["value"]) for operation in operations] == [
        (f"/spec/{n}", v) for n, v in written.items()
    ]
    serving["spec"] |= written
    assert steps(1, serving, edit=edit) == MetalProcessSteps(), "it is written once"


def test_scale_up_takes_free_numbers_only() -> None:
    terminating = process(f"{NAME}-1", host="studio-1", **LEAVING)
    assert made(steps(3, process(f"{NAME}-0"), terminating)) == [f"{NAME}-2", f"{NAME}-3"]


def test_scale_down_keeps_ready_processes() -> None:
    observed = [
        process(f"{NAME}-0", host="studio-1", phase="Starting"),
        process(f"{NAME}-1", host="studio-1", phase="Ready"),
        process(f"{NAME}-2"),
    ]
    assert deleted(steps(1, *observed)) == {f"{NAME}-0", f"{NAME}-2"}
    assert deleted(steps(0, *observed)) == {f"{NAME}-0", f"{NAME}-1", f"{NAME}-2"}


def test_edit_creates_new_processes_before_it_deletes_old_ones() -> None:
    old = process("chat-00000000-0", host="studio-1", phase="Ready")
    assert (made(steps(1, old)), deleted(steps(1, old))) == ([f"{NAME}-0"], set())
    starting = process(f"{NAME}-0", host="studio-1", phase="Starting", gib=2)
    assert steps(1, old, starting) == MetalProcessSteps()
    ready = process(f"{NAME}-0", host="studio-1", phase="Ready", gib=2)
    assert deleted(steps(1, old, ready)) == {"chat-00000000-0"}


def test_old_process_stays_until_clients_reach_the_new_one() -> None:
    # A Ready process gets no request before the API server has accepted the endpoint of its host.
    hosts = [host("studio-1"), host("studio-2")]
    old = process("chat-00000000-0", host="studio-1", phase="Ready")
    ready = process(f"{NAME}-0", host="studio-2", phase="Ready", gib=2)
    assert steps(1, old, ready, hosts=hosts, unexposed=["studio-2"]) == MetalProcessSteps()
    assert deleted(steps(1, old, ready, hosts=hosts)) == {"chat-00000000-0"}


def test_edit_deletes_first_if_only_the_memory_of_the_old_process_suffices() -> None:
    old = process("chat-00000000-0", host="studio-1", phase="Ready", gib=4)
    new = process(f"{NAME}-0", gib=5)
    small = host("studio-1", 2 * GIB, processes=[{"uid": "uid-chat-00000000-0"}])
    assert deleted(steps(1, old, new, hosts=[small])) == {"chat-00000000-0"}
    assert steps(1, old, new, hosts=[small, host("studio-2")]) == MetalProcessSteps(), "it fits beside it elsewhere"
    assert steps(1, old, process(f"{NAME}-0", gib=99), hosts=[small]) == MetalProcessSteps(), "it would not help"


def test_edit_frees_memory_for_one_process_at_a_time() -> None:
    hosts = [
        host(name, 0, processes=[{"uid": f"uid-chat-00000000-{number}"}])
        for number, name in enumerate(("studio-1", "studio-2"))
    ]
    old = [
        process(f"chat-00000000-{number}", host=name, phase="Ready", gib=4)
        for number, name in enumerate(("studio-1", "studio-2"))
    ]
    new = [process(f"{NAME}-0", gib=4), process(f"{NAME}-1", gib=4)]
    (first,) = deleted(steps(2, *old, *new, hosts=hosts))
    for replica in old:
        if replica["metadata"]["name"] == first:
            replica["metadata"] |= LEAVING
    assert steps(2, *old, *new, hosts=hosts) == MetalProcessSteps()


def test_process_of_a_lost_host_stays_until_its_replacement_is_ready() -> None:
    lost, other = host("studio-1", ready="False"), host("studio-2")
    there = process(f"{NAME}-0", host="studio-1", phase="Ready")
    assert made(steps(1, there, hosts=[lost, other])) == [f"{NAME}-1"]
    assert deleted(steps(1, there, hosts=[lost, other])) == set()
    ready = process(f"{NAME}-1", host="studio-2", phase="Ready")
    assert deleted(steps(1, there, ready, hosts=[lost, other])) == {f"{NAME}-0"}
    assert made(steps(1, there, hosts=[other])) == [f"{NAME}-1"], "a host that is not registered any more is lost too"


def test_evicted_process_that_fits_nowhere_else_is_kept() -> None:
    evicted = process(f"{NAME}-0", host="studio-1", phase="Pending", **DISPLACED)
    waiting = process(f"{NAME}-1")
    assert steps(1, evicted, waiting) == MetalProcessSteps()
    returned = process(f"{NAME}-0", host="studio-1", phase="Starting")
    assert deleted(steps(1, returned, waiting)) == {f"{NAME}-1"}


def test_starting_replacement_is_preferred_to_the_evicted_process() -> None:
    hosts = [host("studio-1"), host("studio-2")]
    returning = process(f"{NAME}-0", host="studio-1", phase="Pending")
    assert deleted(steps(1, returning, process(f"{NAME}-1", host="studio-2", phase="Starting"), hosts=hosts)) == {
        f"{NAME}-0"
    }
    answers = process(f"{NAME}-0", host="studio-1", phase="Ready")
    assert deleted(steps(1, answers, process(f"{NAME}-1", host="studio-2", phase="Starting"), hosts=hosts)) == {
        f"{NAME}-1"
    }


def test_displacing_one_replica_leaves_the_other_alone() -> None:
    both = [process(f"{NAME}-{number}", host=f"studio-{number}", phase="Ready") for number in (1, 2)]
    both[0]["status"] |= DISPLACED
    hosts = [host("studio-1"), host("studio-2")]
    assert (made(steps(2, *both, hosts=hosts)), deleted(steps(2, *both, hosts=hosts))) == (
        [f"{NAME}-0"],
        set(),
    )
    assert deleted(steps(1, *both, hosts=hosts)) == {f"{NAME}-1"}, "scaled down, it is the one to go"


def test_no_process_is_deleted_to_make_room_on_the_displacing_host() -> None:
    there = process(f"{NAME}-0", host="studio-1", phase="Ready", gib=2, **DISPLACED)
    full = host("studio-1", 0, processes=[{"uid": f"uid-{NAME}-0"}])
    assert steps(1, there, process(f"{NAME}-1", gib=2), hosts=[full]) == MetalProcessSteps()


def test_failed_process_stays_on_its_host() -> None:
    assert steps(1, process(f"{NAME}-0", host="studio-1", phase="Failed")) == MetalProcessSteps()


def test_rejected_process_is_replaced_and_kept_for_a_while() -> None:
    rejected = process(f"{NAME}-0", host="studio-1", phase="Rejected")
    done = steps(1, rejected)
    assert (made(done), deleted(done)) == ([f"{NAME}-1"], set())
    assert done.again_seconds == AVOID_SECONDS - 60
    assert deleted(steps(1, rejected, process(f"{NAME}-1"), later=AVOID_SECONDS)) == {f"{NAME}-0"}
    answers = process(f"{NAME}-1", host="studio-2", phase="Ready")
    assert deleted(steps(1, rejected, answers, hosts=[host("studio-1"), host("studio-2")])) == {f"{NAME}-0"}


def test_rejection_is_remembered_from_the_time_of_its_report() -> None:
    rejected = process(f"{NAME}-0", host="studio-1", phase="Rejected", creationTimestamp="2026-11-20T12:00:00Z")
    rejected["metadata"]["managedFields"] = [
        {"manager": "pomona-controller", "time": "2026-11-20T12:00:00Z"},
        {"manager": "pomona-metal-agent", "subresource": "status", "time": "2026-11-21T11:59:00Z"},
    ]
    assert deleted(steps(1, rejected, process(f"{NAME}-1"))) == set()
    assert steps(1, rejected, process(f"{NAME}-1")).again_seconds == AVOID_SECONDS - 60


@pytest.mark.parametrize("phase", ["Rejected", "Stopped"])
def test_stopped_or_rejected_process_of_an_earlier_spec_is_deleted(phase: str) -> None:
    old = process("chat-00000000-0", host="studio-1", phase=phase)
    assert (deleted(steps(1, old)), made(steps(1, old))) == ({"chat-00000000-0"}, [f"{NAME}-0"])


def test_stopped_process_is_replaced_and_kept_for_a_moment() -> None:
    """A host that stops whatever it gets would else make the controller create processes without end."""
    stopped = process(f"{NAME}-0", host="studio-1", phase="Stopped", creationTimestamp="2026-11-21T11:59:50Z")
    done = steps(1, stopped)
    assert (made(done), deleted(done), done.again_seconds) == ([f"{NAME}-1"], set(), AVOID_STOPPED_SECONDS - 10)
    assert deleted(steps(1, stopped, process(f"{NAME}-1"), later=AVOID_STOPPED_SECONDS)) == {f"{NAME}-0"}


def test_unknown_spec_creates_nothing_and_keeps_serving_processes() -> None:
    old = process("chat-00000000-0", host="studio-1", phase="Ready")
    assert steps(2, old, known=False) == MetalProcessSteps()
    assert deleted(steps(0, old, known=False)) == {"chat-00000000-0"}


PHASES = st.sampled_from(["Pending", "Fetching", "Starting", "Ready", "Stopping", "Stopped", "Failed", "Rejected"])


@st.composite
def populations(draw: st.DrawFn) -> list[Obj]:
    observed = []
    for number in range(draw(st.integers(0, 6))):
        prefix = draw(st.sampled_from([NAME, "chat-00000000"]))
        place = draw(st.sampled_from([None, "studio-1", "lost", "gone"]))
        phase = draw(PHASES) if place else "Pending"
        fields = draw(st.sampled_from([{}, LEAVING, DISPLACED if place else {}]))
        observed.append(process(f"{prefix}-{number}", host=place, phase=phase, **fields))
    return observed


@given(populations(), st.integers(0, 4))
def test_steps_converge_and_never_reuse_a_name(observed: list[Obj], wanted: int) -> None:
    hosts = [host("studio-1"), host("lost", ready="False")]
    first = steps(wanted, *observed, hosts=hosts)
    names = [replica["metadata"]["name"] for replica in observed]
    assert not set(made(first)) & set(names)
    after = [*observed, *(process(name) for name in made(first))]
    for replica in after:
        if replica["metadata"]["name"] in deleted(first):
            assert "deletionTimestamp" not in replica["metadata"], "deleted once is enough"
            replica["metadata"] = replica["metadata"] | LEAVING
    second = steps(wanted, *after, hosts=hosts)
    assert (second.create, second.delete) == ((), ())
    standing = sort_processes(NAME, wanted, [as_process(replica) for replica in after], {}, exposed=())
    assert len(standing.kept) <= wanted


def test_process_that_was_orphaned_is_deleted() -> None:
    ((_, made),) = steps(1).create
    made["metadata"] |= {"uid": "a", "resourceVersion": "1"}
    key = ObjectKey(made["metadata"]["namespace"], made["metadata"]["name"])
    assert decide_release(Snapshot(store((METAL_PROCESSES, made)), NOW), key) == Plan()
    del made["metadata"]["ownerReferences"]
    (orphan,) = decide_release(Snapshot(store((METAL_PROCESSES, made)), NOW), key).delete
    assert (orphan.name, orphan.uid) == (key.name, "a")
    made["metadata"]["labels"] = {}
    assert decide_release(Snapshot(store((METAL_PROCESSES, made)), NOW), key) == Plan(), "an administrator made it"


def test_spec_is_valid_for_the_schema() -> None:
    ((_, obj),) = steps(1).create
    assert msgspec.convert(obj, MetalProcess).spec == SPEC


def drained(name: str = "studio-1") -> Obj:
    return host(name) | {"spec": {"unschedulable": True, "drain": True}}


@pytest.mark.parametrize(("first", "status"), [(drained(), {}), (host("studio-1"), DISPLACED)])
def test_process_that_must_leave_its_host_is_replaced_before_it_is_deleted(first: Obj, status: Obj) -> None:
    hosts = [first, host("studio-2")]
    old = process(f"{NAME}-0", host="studio-1", phase="Ready", gib=2, **status)
    assert (made(steps(1, old, hosts=hosts)), deleted(steps(1, old, hosts=hosts))) == (
        [f"{NAME}-1"],
        set(),
    )
    for phase in ("Pending", "Starting"):
        moving = process(f"{NAME}-1", host="studio-2", phase=phase, gib=2)
        assert steps(1, old, moving, hosts=hosts) == MetalProcessSteps()
    moved = process(f"{NAME}-1", host="studio-2", phase="Ready", gib=2)
    assert deleted(steps(1, old, moved, hosts=hosts, unexposed={"studio-2"})) == set(), "no client reaches it yet"
    assert deleted(steps(1, old, moved, hosts=hosts)) == {f"{NAME}-0"}


def test_process_on_a_drained_host_that_fits_nowhere_else_stays() -> None:
    old = process(f"{NAME}-0", host="studio-1", phase="Ready", gib=2)
    waiting = process(f"{NAME}-1", gib=2)
    assert steps(1, old, waiting, hosts=[drained()]) == MetalProcessSteps()
    assert steps(1, old, waiting, hosts=[drained(), host("studio-2", GIB)]) == MetalProcessSteps()


@pytest.mark.parametrize("closed", [{"drain": True}, {"unschedulable": True}])
def test_process_that_a_cordoned_host_rejected_is_deleted_since_the_host_would_take_it_once_memory_is_free(
    closed: Obj,
) -> None:
    rejected = process(f"{NAME}-0", host="studio-1", phase="Rejected", gib=2)
    done = steps(1, rejected, hosts=[host("studio-1") | {"spec": closed}, host("studio-2")])
    assert (made(done), deleted(done)) == ([f"{NAME}-1"], {f"{NAME}-0"})


@pytest.mark.parametrize("replacement", [{}, {"host": "studio-2"}, {"host": "studio-2", "phase": "Ready"}])
def test_end_of_a_drain_keeps_what_was_not_replaced_yet(replacement: dict[str, Any]) -> None:
    old = process(f"{NAME}-0", host="studio-1", phase="Ready", gib=2)
    late = process(f"{NAME}-1", gib=2, creationTimestamp="2026-11-21T11:59:30Z", **replacement)
    done = steps(1, old, late, hosts=[host("studio-1"), host("studio-2")])
    assert (made(done), deleted(done)) == ([], {f"{NAME}-1"})


def test_of_two_ready_replicas_the_one_that_clients_reach_is_kept() -> None:
    """A host whose address is refused, or that has just returned, has no endpoint yet, or never gets one."""
    both = [process(f"{NAME}-{number}", host=f"studio-{number}", phase="Ready") for number in (1, 2)]
    hosts = [host("studio-1"), host("studio-2")]
    for unexposed, gone in (("studio-1", f"{NAME}-1"), ("studio-2", f"{NAME}-2")):
        assert deleted(steps(1, *both, hosts=hosts, unexposed=[unexposed])) == {gone}
    fails, starts = (process(f"{NAME}-{number}", host=f"studio-{number}", phase="Failed") for number in (1, 2))
    starts["status"]["phase"] = "Starting"
    assert deleted(steps(1, fails, starts, hosts=hosts, unexposed=["studio-2"])) == {f"{NAME}-1"}, "neither is reached"


def test_process_of_a_lost_host_is_deleted_before_one_that_answers_on_a_drained_host() -> None:
    """A lost host answers nobody, although it reported Ready last: the replica that answers stays."""
    hosts = [host("lost", ready="False"), drained("studio-1"), host("studio-2")]
    lost = process(f"{NAME}-0", host="lost", phase="Ready", gib=2, creationTimestamp="2026-11-20T12:00:00Z")
    answers = process(f"{NAME}-1", host="studio-1", phase="Ready", gib=2)
    replacement = process(f"{NAME}-2", host="studio-2", phase="Ready", gib=2)
    assert deleted(steps(2, lost, answers, replacement, process(f"{NAME}-3"), hosts=hosts)) == {f"{NAME}-0"}


@given(st.lists(st.sampled_from(["Ready", "Starting", "Pending"]), min_size=1, max_size=3), st.booleans())
def test_drain_never_deletes_the_last_processes_that_answer(phases: list[str], has_room: bool) -> None:
    """Whatever the state of the replacements is, as many processes answer after the steps as are wanted."""
    wanted = len(phases)
    hosts = [drained(), host("studio-2", 64 * GIB if has_room else 0)]
    old = [process(f"{NAME}-{number}", host="studio-1", phase="Ready", gib=2) for number in range(wanted)]
    new = [
        process(f"{NAME}-{wanted + number}", host=None if phase == "Pending" else "studio-2", phase=phase, gib=2)
        for number, phase in enumerate(phases)
    ]
    gone = deleted(steps(wanted, *old, *new, hosts=hosts))
    answering = [replica["metadata"]["name"] for replica in (*old, *new) if replica["status"]["phase"] == "Ready"]
    assert len(set(answering) - gone) >= wanted
