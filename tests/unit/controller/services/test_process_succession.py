"""Succession of MetalProcesses: the place in the queue, and the memory that a process leaves to its successor."""

from controller.placement.actions import Admit
from controller.placement.cell_registry import CellRegistry
from controller.placement.observed_units import encode_nomination, observe_units
from controller.placement.planner import PlanRules, plan
from controller.placement.queue_places import find_own_place, format_place
from controller.placement.units import Nomination
from controller.services.rollout import (
    MetalProcessSteps,
)
from crds.meta import ENQUEUED_AT, NOMINATED
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES
from tests.support.api_objects import (
    GIB,
    NOW,
    host,
    process,
    service,
    store,
)
from tests.support.process_steps import LEAVING, NAME, deleted, steps


def enqueued(done: MetalProcessSteps) -> list[str | None]:
    return [obj["metadata"].get("annotations", {}).get(ENQUEUED_AT) for _, obj in done.create]


def own_place(observed: Obj) -> str:
    return format_place(find_own_place(observed))


def test_successor_inherits_the_place_in_time_of_its_predecessor() -> None:
    early, later = "2026-11-20T08:00:00Z", "2026-11-21T09:00:00Z"
    old = process("chat-00000000-0", host="studio-1", phase="Ready", gib=4, creationTimestamp=early)
    done = steps(1, old)
    assert enqueued(done) == [own_place(old)]
    ((_, made_for_edit),) = done.create
    new = process(f"{NAME}-0", gib=5, annotations=made_for_edit["metadata"]["annotations"])
    small = host("studio-1", 2 * GIB, processes=[{"uid": old["metadata"]["uid"]}])
    assert deleted(steps(1, old, new, hosts=[small])) == {"chat-00000000-0"}
    other = process("mail-00000000-0", gib=4, creationTimestamp=later)
    freed = store((METAL_HOSTS, host("studio-1", 6 * GIB)), (METAL_PROCESSES, new), (METAL_PROCESSES, other))
    freed.put(INFERENCE_SERVICES, service())
    cells = CellRegistry(freed, VENDORS, lambda _host: True).list_cells()
    first, *_ = plan(cells, observe_units(freed, VENDORS, NOW).units, PlanRules(), NOW.timestamp()).actions
    assert isinstance(first, Admit)
    assert first.unit.key.name == f"{NAME}-0", "the room that its predecessor gave up is not another's"


def test_each_place_in_time_is_inherited_once() -> None:
    old = [
        process("chat-00000000-0", host="studio-1", phase="Ready", creationTimestamp="2026-11-20T09:00:00Z"),
        process("chat-00000000-1", host="studio-1", phase="Ready", creationTimestamp="2026-11-20T08:00:00Z"),
    ]
    second, first = map(own_place, old)
    assert enqueued(steps(3, *old)) == [first, second, None], "the third replica is new"
    heir = process(f"{NAME}-0", annotations={ENQUEUED_AT: first})
    assert enqueued(steps(2, *old, heir)) == [second]
    again = process("chat-00000000-0", host="studio-1", phase="Ready", annotations={ENQUEUED_AT: first})
    assert enqueued(steps(1, again)) == [first], "it is handed on by each edit"
    rejected = process(f"{NAME}-0", host="studio-1", phase="Rejected", annotations={ENQUEUED_AT: first})
    assert enqueued(steps(1, rejected)) == [first]


def test_places_of_one_second_are_told_apart() -> None:
    old = [process(f"chat-00000000-{number}", host="studio-1", phase="Ready") for number in range(2)]
    places = sorted(map(own_place, old))
    assert places[0] != places[1]
    assert enqueued(steps(2, *old)) == places
    heir = process(f"{NAME}-0", annotations={ENQUEUED_AT: places[1]})
    assert enqueued(steps(2, *old, heir)) == [places[0]]


def test_place_that_people_have_moved_ahead_is_that_of_the_process_itself() -> None:
    old = process("chat-00000000-0", host="studio-1", phase="Ready", annotations={ENQUEUED_AT: "2030-01-01T00:00:00Z"})
    assert enqueued(steps(1, old)) == [own_place(old)]


def promised(name: str, *victims: str, gib: int = 4) -> Obj:
    value = encode_nomination(Nomination(("host/studio-1",), frozenset(f"uid-{victim}" for victim in victims)))
    return process(name, gib=gib, annotations={NOMINATED: value})


def test_process_whose_memory_the_queue_holds_for_its_successor_ends_though_there_seems_to_be_room() -> None:
    """The queue holds the other memory for those that wait before it."""
    old = process("chat-00000000-0", host="studio-1", phase="Ready", gib=4)
    assert deleted(steps(1, old, process(f"{NAME}-0", gib=4))) == set()
    assert deleted(steps(1, old, promised(f"{NAME}-0", "chat-00000000-0"))) == {"chat-00000000-0"}


def test_process_stays_while_its_successor_waits_for_the_victims_of_others() -> None:
    old = process("chat-00000000-0", host="studio-1", phase="Ready", gib=4)
    full = host("studio-1", 0, processes=[{"uid": "uid-chat-00000000-0"}])
    assert deleted(steps(1, old, process(f"{NAME}-0", gib=4), hosts=[full])) == {"chat-00000000-0"}
    assert deleted(steps(1, old, promised(f"{NAME}-0", "other-1-0"), hosts=[full])) == set()


def test_two_promised_successors_end_one_process_at_a_time() -> None:
    old = [process(f"chat-00000000-{number}", host="studio-1", phase="Ready", gib=4) for number in range(2)]
    new = [promised(f"{NAME}-{number}", f"chat-00000000-{number}") for number in range(2)]
    assert len(deleted(steps(2, *old, *new))) == 1
    old[0]["metadata"] |= LEAVING
    assert deleted(steps(2, *old, *new)) == set()


def test_waiting_process_of_an_earlier_spec_is_deleted_at_once() -> None:
    waiting = process("chat-00000000-0", creationTimestamp="2026-11-20T08:00:00Z")
    done = steps(1, waiting)
    assert deleted(done) == {"chat-00000000-0"}, "it would be bound in place of its replacement"
    assert enqueued(done) == [own_place(waiting)]
