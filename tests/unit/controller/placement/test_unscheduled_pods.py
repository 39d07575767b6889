"""Refusals of the scheduler are found by cell and by service, however many there are."""

import msgspec

from controller.placement.units import Unit
from controller.placement.unscheduled_pods import BLAME_SECONDS, PINNED_SECONDS, UnscheduledPods
from kube.resources import ObjectKey
from tests.support import queue_units

NUMBER = 50


class CountedKey(ObjectKey):
    """A service that counts how often it is compared with another one."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedKey.compared += 1
        return super().__eq__(other)

    __hash__ = ObjectKey.__hash__


def refused(number: int, *cells: str, namespace: str = "team") -> Unit:
    unit = queue_units.pod(f"pod-{number}", cells=cells or (f"node/n{number}",))
    return msgspec.structs.replace(unit, service=CountedKey(namespace, f"service-{number}"))


def test_refusals_of_others_are_not_looked_at() -> None:
    pods = UnscheduledPods()
    units = [refused(number) for number in range(NUMBER)]
    CountedKey.compared = 0
    for unit in units:
        assert pods.note_refusal(unit, 0.0) == []
    for number, unit in enumerate(units):
        assert pods.list_avoided(unit.service, 1.0) == {f"node/n{number}"}
    assert CountedKey.compared < NUMBER


def test_old_refusals_are_forgotten_and_a_repeated_one_is_not() -> None:
    pods = UnscheduledPods()
    pods.note_refusal(refused(1, "node/a", "node/b"), 0.0)
    pods.note_refusal(refused(2, "node/a", namespace="bank"), 1.0)
    assert pods.note_refusal(refused(1, "node/a"), BLAME_SECONDS - 1) == ["node/a"]
    assert pods.list_avoided(refused(1).service, BLAME_SECONDS) == {"node/a"}
    assert pods.note_refusal(refused(3, "node/a"), BLAME_SECONDS + PINNED_SECONDS) == []
    assert pods.list_avoided(refused(1).service, BLAME_SECONDS) == {"node/a"}
    other = refused(4, "node/a", namespace="bank")
    assert pods.note_refusal(other, 2 * BLAME_SECONDS - 1) == ["node/a"]
    assert pods.note_refusal(other, 3 * BLAME_SECONDS) == []
