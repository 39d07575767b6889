"""Places in the queue outlive the pods of a replica: each is inherited once, and none is lost or made up."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controller.placement.observed_units import ObservedUnits, observe_units
from controller.placement.queue_places import (
    ReplicaUnit,
    assign_places,
    find_own_place,
    format_place,
    parse_seconds,
)
from controller.placement.units import UnitKey
from crds.meta import ENQUEUED_AT, POD_TEMPLATE
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, METAL_PROCESSES, PODS
from tests.support.api_objects import NAMESPACE, NOW, process, store
from tests.support.queue_objects import BORN, deployment_of, queue_pod, queued_service, timestamp

SOON = NOW + timedelta(hours=1)


def observe(
    pods: Sequence[Obj], freed: Sequence[str] = (), replicas: int = 3, created: datetime = BORN
) -> ObservedUnits:
    service = queued_service(replicas=replicas, created=created)
    cluster = store((INFERENCE_SERVICES, service), (DEPLOYMENTS, deployment_of()), *((PODS, pod) for pod in pods))
    return observe_units(cluster, VENDORS, NOW, {"uid-chat": freed})


def places(pods: Sequence[Obj], freed: Sequence[str] = (), replicas: int = 3) -> Mapping[str, str]:
    return {key.name: place for key, place in observe(pods, freed, replicas).places.items()}


def own(pod: Obj) -> str:
    return format_place(find_own_place(pod))


OLD = queue_pod("old", gated=False, node="n1", created=NOW - timedelta(hours=2))
ENDS = queue_pod("old", gated=False, node="n1", created=NOW - timedelta(hours=2), deleted=SOON)
NEW = queue_pod("new")


@given(st.integers(0, 2**33 * 10**6))
def test_place_is_read_as_it_was_written(microseconds: int) -> None:
    place = (datetime.fromtimestamp(0, UTC) + timedelta(microseconds=microseconds)).timestamp()
    assert parse_seconds(format_place(place)) == place


def test_pods_of_one_second_have_different_places() -> None:
    places = [find_own_place(queue_pod(f"pod-{number}")) for number in range(100)]
    assert len(set(places)) == len(places)


def test_pod_without_predecessor_keeps_its_own_place() -> None:
    assert places([NEW]) == {}
    assert places([queue_pod("old", created=NOW - timedelta(hours=2)), NEW]) == {}


def test_successor_of_an_evicted_pod_inherits_its_place() -> None:
    units = observe([ENDS, NEW])
    assert units.places == {UnitKey("pod", NAMESPACE, "new"): own(OLD)}
    assert {unit.enqueued_at for unit in units.units} == {find_own_place(OLD)}


def test_pod_that_has_ended_has_its_place_until_it_vanishes() -> None:
    ended = {**ENDS, "status": {**ENDS["status"], "phase": "Succeeded"}}
    units = observe([ended, NEW])
    assert units.places == {UnitKey("pod", NAMESPACE, "new"): own(OLD)}
    assert [unit.cells for unit in units.units] == [(), ()]


def test_successor_inherits_the_place_that_was_inherited() -> None:
    earlier = timestamp(NOW - timedelta(hours=4))
    second = queue_pod("old", gated=False, node="n1", deleted=SOON, annotations={ENQUEUED_AT: earlier})
    newer = queue_pod("new", created=NOW + timedelta(minutes=1))
    assert places([second, newer]) == {"new": earlier.replace("Z", ".000000Z")}


def test_pod_of_a_changed_template_inherits_the_place() -> None:
    assert places([OLD, queue_pod("new", template="bbb")]) == {"new": own(OLD)}


def test_place_is_inherited_by_one() -> None:
    heir = queue_pod("new", template="bbb", annotations={ENQUEUED_AT: own(OLD)})
    assert places([OLD, heir, queue_pod("next", template="bbb")]) == {}
    assert places([ENDS, queue_pod("new", annotations={ENQUEUED_AT: own(OLD)}), queue_pod("next")]) == {}
    # The first heir ends while its predecessor is still there: that is one place, not two.
    ended = queue_pod("new", annotations={ENQUEUED_AT: own(OLD)}, deleted=SOON)
    later = [queue_pod(name, created=NOW + timedelta(minutes=1)) for name in ("a", "b")]
    assert places([ENDS, ended, *later]) == {"a": own(OLD)}


def test_places_of_one_second_are_not_confused() -> None:
    pair = [
        queue_pod(name, gated=False, node="n1", created=NOW - timedelta(hours=2), deleted=SOON) for name in ("x", "y")
    ]
    heir = queue_pod("new", annotations={ENQUEUED_AT: own(pair[0])})
    # The predecessor of the heir is gone, and its twin of the same second was evicted later.
    assert places([pair[1], heir, queue_pod("next", created=NOW + timedelta(minutes=1))]) == {"next": own(pair[1])}


def test_place_of_a_pod_that_ends_goes_before_that_of_one_that_stays() -> None:
    ends = queue_pod("ends", gated=False, node="n2", created=NOW - timedelta(hours=1), deleted=SOON)
    assert places([OLD, ends, queue_pod("new", template="bbb")]) == {"new": own(ends)}


def test_pod_that_is_evicted_during_a_change_comes_back_at_its_place() -> None:
    present = queue_pod("new", template="bbb", created=NOW - timedelta(minutes=5), annotations={ENQUEUED_AT: "x"})
    back = queue_pod("back")
    assert places([ENDS, present, back]) == {"new": own(OLD)}
    stamped = queue_pod("new", template="bbb", gated=False, created=NOW - timedelta(minutes=5))
    assert places([ENDS, stamped, back]) == {"back": own(OLD)}
    back["metadata"]["annotations"][ENQUEUED_AT] = own(OLD)
    assert places([ENDS, stamped, back, queue_pod("next")]) == {}


def test_freed_place_is_inherited_and_then_spent() -> None:
    units = observe([NEW], [own(OLD)])
    assert units.places == {UnitKey("pod", NAMESPACE, "new"): own(OLD)}
    assert units.open_places == {"uid-chat": (own(OLD),)}
    assert observe([NEW], [own(OLD)], replicas=1).open_places == units.open_places
    stamped = queue_pod("new", annotations={ENQUEUED_AT: own(OLD)})
    assert observe([stamped], [own(OLD)]).open_places == {}


def test_freed_place_waits_for_a_replica_that_is_missing() -> None:
    other = queue_pod("other", gated=False, node="n1", created=NOW - timedelta(hours=3))
    assert observe([other], [own(OLD)], replicas=2).open_places == {"uid-chat": (own(OLD),)}
    assert observe([other], [own(OLD)], replicas=1).open_places == {}
    assert observe([other], ["damaged"], replicas=2).open_places == {}
    assert observe([], [own(OLD)], replicas=1).open_places == {"uid-chat": (own(OLD),)}
    assert observe([], [own(OLD)], replicas=0).open_places == {}
    assert observe_units(store(), VENDORS, NOW, {"uid-chat": [own(OLD)]}).open_places == {}


def test_no_more_freed_places_are_kept_than_replicas_are_missing() -> None:
    """Pods that are deleted faster than they inherit their places would fill the ledger of all."""
    freed = [own(queue_pod(f"gone-{number}", created=NOW - timedelta(hours=3))) for number in range(9)]
    first = tuple(sorted(freed)[:2])
    assert observe([], freed, replicas=2).open_places == {"uid-chat": first}
    units = observe([NEW], freed, replicas=2)
    assert units.places == {UnitKey("pod", NAMESPACE, "new"): min(freed)}
    assert units.open_places == {"uid-chat": first}


def test_thousands_of_pods_of_one_service_take_no_square_of_time() -> None:
    """They are made by hand: comparisons are counted, not seconds."""
    counted = [_count_comparisons(number) for number in (50, 400)]
    assert counted[1] < 16 * counted[0]


def _count_comparisons(number: int) -> int:
    count = 0

    class Counted(float):
        def __lt__(self, other: float) -> bool:
            nonlocal count
            count += 1
            return float(self) < float(other)

    unit = observe([queue_pod("new")], []).units[0]
    heirs = [
        ReplicaUnit(msgspec.structs.replace(unit, uid=f"{index}", enqueued_at=1e9 + index), "chat", "a", 1e9 + index)
        for index in range(number)
    ]
    assert len(assign_places(heirs, [Counted(index) for index in range(number)], number)) == number
    return count


def test_place_of_an_earlier_service_is_not_inherited() -> None:
    units = observe([ENDS, NEW], created=NOW - timedelta(hours=1))
    assert units.places == {}
    assert observe([NEW], ["1970-01-01T00:00:00Z"]).places == {
        UnitKey("pod", NAMESPACE, "new"): format_place(BORN.timestamp())
    }


def test_process_that_was_made_without_a_place_inherits_as_a_pod_does() -> None:
    ends = process("chat-1-0", host="mac-1", creationTimestamp=timestamp(NOW - timedelta(hours=2)))
    ends["metadata"]["deletionTimestamp"] = timestamp(NOW)
    heir = process("chat-1-1", creationTimestamp=timestamp(NOW))
    assert observe_all([], [ends, heir], 2) == {"chat-1-1": own(ends)}
    heir["metadata"]["annotations"] = {ENQUEUED_AT: own(ends)}
    assert observe_all([], [ends, heir], 2) == {}
    assert observe_all([], [ends, heir, process("chat-1-2", creationTimestamp=timestamp(NOW))], 2) == {}


def observe_all(
    pods: Sequence[Obj], processes: Sequence[Obj], replicas: int, freed: Sequence[str] = ()
) -> Mapping[str, str]:
    """Return the places that pods, of one Deployment for each accelerator, and processes inherit."""
    service = queued_service(replicas=replicas, hardware={"accelerator": "auto"})
    cluster = store(
        (INFERENCE_SERVICES, service),
        *((DEPLOYMENTS, deployment_of(name=name)) for name in ("chat", "chat-amd")),
        *((PODS, pod) for pod in pods),
        *((METAL_PROCESSES, process) for process in processes),
    )
    units = observe_units(cluster, VENDORS, NOW, {"uid-chat": freed})
    return {key.name: place for key, place in units.places.items()}


def on_amd(pod: Obj) -> Obj:
    """Return a pod of the Deployment for another accelerator."""
    pod["metadata"]["ownerReferences"][0]["name"] = "chat-amd-aaa"
    return pod


ELSEWHERE = process("chat-1-0", creationTimestamp=timestamp(NOW))
"""A process that was just made, without a place."""


@pytest.mark.parametrize("is_waiting", [True, False])
def test_replica_that_goes_to_another_accelerator_keeps_its_place(is_waiting: bool) -> None:
    earlier = queue_pod("old", gated=is_waiting, node="" if is_waiting else "n1", created=NOW - timedelta(hours=2))
    assert observe_all([earlier], [ELSEWHERE], 1) == {"chat-1-0": own(OLD)}
    assert observe_all([earlier, on_amd(queue_pod("new"))], [], 1) == {"new": own(OLD)}
    assert observe_all([earlier], [ELSEWHERE], 2) == {}, "it is a further replica"
    assert observe_all([earlier, NEW], [], 1) == {}, "one of both ends, and they are of one Deployment"


def test_pod_inherits_the_place_of_a_process_that_waits() -> None:
    waits = process("chat-1-0", creationTimestamp=timestamp(NOW - timedelta(hours=2)))
    assert observe_all([NEW], [waits], 1) == {"new": own(waits)}
    runs = process("chat-1-1", host="mac-1", creationTimestamp=timestamp(NOW - timedelta(hours=1)))
    assert observe_all([NEW], [waits, runs], 2) == {"new": own(waits)}, "those that run stay"
    runs = on_amd(queue_pod("runs", gated=False, node="n1", created=NOW - timedelta(hours=1)))
    assert observe_all([NEW, runs], [waits], 2) == {"new": own(waits)}, "also on a third accelerator"


def test_replica_on_another_accelerator_has_no_better_place_than_any_that_may_end() -> None:
    waiting = [queue_pod(name, created=NOW - timedelta(hours=age)) for name, age in (("first", 3), ("second", 2))]
    assert observe_all(waiting, [ELSEWHERE], 2) == {"chat-1-0": own(waiting[1])}
    second = process("chat-1-1", creationTimestamp=timestamp(NOW + timedelta(minutes=1)))
    places = observe_all(waiting, [ELSEWHERE, second], 2)
    assert places == {"chat-1-1": own(waiting[1]), "chat-1-0": own(waiting[0])}
    later = queue_pod("later", created=NOW + timedelta(minutes=2))
    assert observe_all([later], [ELSEWHERE], 1) == {"later": own(ELSEWHERE)}
    runs = queue_pod("later", gated=False, node="n1", created=NOW + timedelta(minutes=2))
    assert observe_all([runs], [ELSEWHERE], 1) == {}


def test_place_of_a_replica_that_is_gone_is_inherited_before_that_of_another_accelerator() -> None:
    waits = queue_pod("old", created=NOW - timedelta(minutes=1), annotations={ENQUEUED_AT: own(OLD)})
    freed = own(queue_pod("gone", created=NOW - timedelta(hours=1)))
    assert observe_all([waits], [ELSEWHERE], 1, [freed]) == {"chat-1-0": freed}


def test_place_is_handed_to_one_replica_elsewhere() -> None:
    heir = process("chat-1-1", creationTimestamp=timestamp(NOW), annotations={ENQUEUED_AT: own(OLD)})
    assert observe_all([OLD], [heir, ELSEWHERE], 1) == {}


def test_place_that_an_heir_leaves_goes_to_the_next() -> None:
    """After a rollback, pods of the earlier template share their places with successors that end."""
    first, second = (queue_pod(name, created=NOW - timedelta(hours=age)) for name, age in (("first", 3), ("second", 2)))
    third = queue_pod("third", created=NOW - timedelta(hours=1))
    heirs = [
        queue_pod(f"heir-{name}", template="bbb", annotations={ENQUEUED_AT: own(pod)}, deleted=SOON)
        for name, pod in (("1", first), ("2", second))
    ]
    first["metadata"]["deletionTimestamp"] = timestamp(SOON)
    assert places([first, second, third, *heirs]) == {"second": own(first), "third": own(second)}
    units = observe([second], [own(first), own(second)], replicas=2)
    assert units.places == {UnitKey("pod", NAMESPACE, "second"): own(first)}
    assert units.open_places == {"uid-chat": (own(first), own(second))}


@pytest.mark.parametrize("present", ["one", "two"])
def test_deployment_tells_which_of_two_templates_of_one_second_is_present(present: str) -> None:
    """A rollback in the midst of a rollout makes the first template the present one again."""
    deployment = deployment_of(mark=present)
    pods = [
        queue_pod(f"{mark}-{state}", template=mark, gated=not node, node=node, annotations={POD_TEMPLATE: mark})
        for mark in ("one", "two")
        for state, node in (("waits", ""), ("runs", "n1"))
    ]
    cluster = store((INFERENCE_SERVICES, queued_service()), (DEPLOYMENTS, deployment), *((PODS, pod) for pod in pods))
    units = {unit.key.name: unit for unit in observe_units(cluster, VENDORS, NOW).units}
    other = "two" if present == "one" else "one"
    assert units[f"{present}-waits"].replaces == {f"uid-{other}-runs"}
    assert units[f"{other}-waits"].replaces == frozenset()
    assert [name for name, unit in units.items() if unit.is_superseded] == [f"{other}-waits"]


def test_pod_without_a_mark_is_of_an_earlier_template_once_the_deployment_has_one() -> None:
    old, new = queue_pod("old", template="one", gated=False, node="n1"), queue_pod("new", template="two")
    new["metadata"]["annotations"][POD_TEMPLATE] = "two"
    cluster = store(
        (INFERENCE_SERVICES, queued_service()), (DEPLOYMENTS, deployment_of(mark="two")), (PODS, old), (PODS, new)
    )
    units = {unit.key.name: unit for unit in observe_units(cluster, VENDORS, NOW).units}
    assert units["new"].replaces == {"uid-old"}


class QueueOfOneService(RuleBasedStateMachine):
    """Pods of a service come, end and vanish, at any moment before or after their places are stamped."""

    def __init__(self) -> None:
        super().__init__()
        self.pods: dict[str, Obj] = {}
        self.freed: list[str] = []
        self.made = self.template = 0
        self.origins: set[float] = set()

    @property
    def found(self) -> ObservedUnits:
        return observe(list(self.pods.values()), self.freed, replicas=99)

    def _place(self, name: str) -> float:
        return next(unit.enqueued_at for unit in self.found.units if unit.key.name == name)

    @rule(same_second=st.booleans(), earlier=st.booleans())
    def make(self, same_second: bool, earlier: bool) -> None:
        self.made += 1
        name = f"pod-{self.made}"
        created = NOW + timedelta(seconds=0 if same_second and self.made < 3 else self.made)
        template = f"t{max(0, self.template - earlier)}"
        self.pods[name] = queue_pod(name, template=template, created=created)
        self.origins.add(find_own_place(self.pods[name]))

    @rule()
    def edit(self) -> None:
        self.template += 1

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        pod = self.pods[data.draw(st.sampled_from(sorted(self.pods)))]
        pod["metadata"]["deletionTimestamp"] = timestamp(SOON)

    @precondition(lambda self: any("deletionTimestamp" in pod["metadata"] for pod in self.pods.values()))
    @rule(data=st.data())
    def vanish_with_a_record(self, data: st.DataObject) -> None:
        ended = [name for name, pod in self.pods.items() if "deletionTimestamp" in pod["metadata"]]
        name = data.draw(st.sampled_from(sorted(ended)))
        self.freed.append(format_place(self._place(name)))
        del self.pods[name]

    @rule()
    def stamp(self) -> None:
        observed = self.found
        for key, place in observed.places.items():
            self.pods[key.name]["metadata"]["annotations"][ENQUEUED_AT] = place
        self.freed = [place for place in self.freed if place in observed.open_places.get("uid-chat", ())]
        assert self.found.places == {}

    @invariant()
    def no_place_is_made_up_lost_or_given_twice(self) -> None:
        observed = self.found
        living = [unit for unit in observed.units if unit.state == "waiting"]
        assert {unit.enqueued_at for unit in observed.units} <= self.origins
        by_template: dict[str, list[float]] = {}
        for unit in living:
            template = self.pods[unit.key.name]["metadata"]["labels"]["pod-template-hash"]
            by_template.setdefault(template, []).append(unit.enqueued_at)
        # A place may be that of one pod and of its successor of the next template, and of no two pods of one.
        assert all(len(set(places)) == len(places) for places in by_template.values())
        held = {unit.enqueued_at for unit in living}
        left = {unit.enqueued_at for unit in observed.units if unit.state == "ending"} - held
        left |= {place for text in self.freed if (place := parse_seconds(text)) is not None} - held
        without = [unit for unit in living if unit.enqueued_at == find_own_place(self.pods[unit.key.name])]
        assert not any(unit.enqueued_at > place for unit in without for place in left)
        kept = {*observed.open_places.get("uid-chat", ()), *(format_place(unit.enqueued_at) for unit in observed.units)}
        assert kept.issuperset(self.freed)


TestQueueOfOneService = QueueOfOneService.TestCase
TestQueueOfOneService.settings = settings(stateful_step_count=25)
