"""The first choice of `auto` waits for measurements: once, for 3 minutes at most, and never in vain."""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.models.served import Served
from controller.placement.candidate_room import CandidateRoom
from controller.reconcile.plan import Snapshot
from controller.services.accelerator_choice import ChosenAccelerators, choose_accelerators
from controller.services.probe_wait import (
    PROBE_SECONDS,
    ProbeSource,
    ProbeWait,
    find_basis,
    list_unmeasured,
    wait_for_probes,
)
from crds.inferenceservice import InferenceService
from crds.placement import ClassSpeed
from fitness.performance import MeasuredPerformance
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, MODELS, ObjectKey, Resource
from kube.time import rfc3339
from tests.support.api_objects import NOW, as_service, model, planned_condition, service, store
from tests.support.queue_objects import deployment_of
from tests.support.service_decisions import KEY, SETTINGS, decide_chat, list_applied, ready_outcome
from tests.unit.controller.services.test_accelerator_choice import AUTO, StatedRooms

L4 = ClassSpeed(device_class="nvidia-l4x1", tokens_per_second="24", source="Estimated", fit="perfect")
H100 = ClassSpeed(device_class="nvidia-h100x1", tokens_per_second="120", source="Estimated", fit="perfect")
MEASURED = msgspec.structs.replace(L4, source="Measured")
USABLE = frozenset({"nvidia-l4x1", "nvidia-h100x1"})


class StatedProbes(ProbeSource):
    """Says that these classes are being measured."""

    def __init__(self, *classes: str, is_known: bool = True) -> None:
        self.answer: Collection[str] | None = classes if is_known else None
        self.asked: list[tuple[Collection[str], datetime]] = []

    def request_probes(self, service: ObjectKey, classes: Collection[str], until: datetime) -> Collection[str] | None:
        assert service == KEY
        self.asked.append((classes, until))
        return self.answer

    def forget(self, service: ObjectKey) -> None:
        pass

    def restart(self) -> None:
        pass


def replace(speed: ClassSpeed, **changes: Any) -> ClassSpeed:
    return msgspec.structs.replace(speed, **changes)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ((L4, H100), {"nvidia-l4x1", "nvidia-h100x1"}),
        ((MEASURED, H100), {"nvidia-h100x1"}),
        ((MEASURED, replace(H100, source="Measured")), set()),
        ((L4, replace(H100, fit="too_tight")), {"nvidia-l4x1"}),
        ((L4, replace(H100, refusal="TooSlow")), {"nvidia-l4x1"}),
        ((L4, replace(H100, device_class="nvidia-otherx1")), {"nvidia-l4x1"}),
        ((L4, replace(H100, source=None, tokens_per_second=None)), {"nvidia-l4x1", "nvidia-h100x1"}),
    ],
)
def test_classes_that_could_run_it_and_were_not_measured_are_worth_a_probe(
    speeds: tuple[ClassSpeed, ...], expected: set[str]
) -> None:
    assert list_unmeasured(speeds, USABLE) == expected


def test_nothing_is_worth_a_probe_if_one_class_alone_could_run_it() -> None:
    assert list_unmeasured([L4, H100], {"nvidia-l4x1"}) == frozenset()
    assert list_unmeasured([L4, H100], ()) == frozenset()


def test_class_of_several_devices_is_that_of_its_cells() -> None:
    two = replace(L4, device_class="nvidia-l4x2")
    assert list_unmeasured([two, H100], USABLE) == {"nvidia-l4x2", "nvidia-h100x1"}


def wait(began: str, now: datetime, probes: ProbeSource, *classes: str) -> ProbeWait | None:
    return wait_for_probes(KEY, classes, began, now, probes)


def test_wait_names_the_classes_and_its_end() -> None:
    probe_wait = wait("", NOW, StatedProbes("b", "a"), "a", "b", "c")
    assert probe_wait is not None
    assert (probe_wait.classes, probe_wait.since, probe_wait.until) == (("a", "b"), NOW, NOW + timedelta(seconds=180))
    assert probe_wait.message.startswith(
        f"measuring the speed on a, b; the accelerator is chosen by {rfc3339(probe_wait.until)} at the latest"
    )


def test_wait_goes_on_where_another_leader_left_it() -> None:
    began = rfc3339(NOW - timedelta(seconds=100))
    unknown = wait(began, NOW, StatedProbes(is_known=False))
    assert unknown is not None
    assert (unknown.since, unknown.classes) == (NOW - timedelta(seconds=100), ())
    assert unknown.message.startswith("looking for idle devices; the accelerator is chosen by ")
    later = wait(began, NOW + timedelta(seconds=79), StatedProbes("a"))
    assert later is not None
    assert later.until == unknown.until


@pytest.mark.parametrize("began", [NOW - timedelta(seconds=PROBE_SECONDS), NOW - timedelta(days=1)])
def test_wait_that_is_over_never_begins_anew(began: datetime) -> None:
    probes = StatedProbes("a")
    assert wait(rfc3339(began), NOW, probes, "a") is None
    assert probes.asked == []


def test_wait_ends_when_nothing_is_being_measured() -> None:
    assert wait("", NOW, StatedProbes(), "a") is None
    assert wait(rfc3339(NOW), NOW, StatedProbes()) is None


def test_wait_lasts_until_what_was_measured_has_left_its_device() -> None:
    assert wait(rfc3339(NOW), NOW, StatedProbes("a")) is not None, "though nothing is left to be measured"


@given(
    st.sampled_from(["", "no time", "2026-13-01", "0001-01-01T00:00:00Z"]) | st.datetimes().map(str),
    st.integers(0, 400),
    st.frozensets(st.sampled_from("abc")),
    st.frozensets(st.sampled_from("abc")) | st.none(),
)
def test_no_time_in_a_status_lengthens_a_wait(
    began: str, seconds: int, classes: frozenset[str], answer: frozenset[str] | None
) -> None:
    now = NOW + timedelta(seconds=seconds)
    probe_wait = wait(began, now, StatedProbes(*(answer or ()), is_known=answer is not None), *classes)
    if probe_wait is not None:
        assert probe_wait.since <= now < probe_wait.until <= now + timedelta(seconds=PROBE_SECONDS)
        assert probe_wait.classes == tuple(sorted(answer or ()))
        # What is written is what the next decision reads: it shortens the wait, if anything.
        again = wait(rfc3339(probe_wait.since), now, StatedProbes("a"))
        assert again is None or again.until <= probe_wait.until


def test_basis_says_how_the_speed_is_known() -> None:
    early = MeasuredPerformance(tokens_per_second=1, measured_at=rfc3339(NOW - timedelta(seconds=1)))
    late = MeasuredPerformance(tokens_per_second=1, measured_at=rfc3339(NOW + timedelta(seconds=1)))
    assert find_basis(None, None, "") is None
    assert find_basis(replace(L4, source=None), None, "") is None
    assert find_basis(L4, None, rfc3339(NOW)) == "estimate"
    assert find_basis(replace(L4, source="Corrected"), None, "") == "estimate"
    assert find_basis(MEASURED, early, rfc3339(NOW)) == "cache"
    assert find_basis(MEASURED, late, rfc3339(NOW)) == "probe"
    assert find_basis(MEASURED, late, "") == "cache"
    assert find_basis(MEASURED, replace_record(late, measured_at="?"), rfc3339(NOW)) == "cache"


def replace_record(record: MeasuredPerformance, **changes: Any) -> MeasuredPerformance:
    return msgspec.structs.replace(record, **changes)


ROOM = CandidateRoom(1, could_run=True, tokens_per_second=120.0, device_classes=USABLE)


def find_speeds(
    _key: ObjectKey, _service: InferenceService, accelerator: str | None, _served: Served | None
) -> tuple[ClassSpeed, ...]:
    return (H100, L4) if accelerator == "nvidia" else ()


def choose(
    chat: Obj, probes: ProbeSource | None, *objects: tuple[Resource, Obj], rooms: StatedRooms | None = None
) -> ChosenAccelerators:
    cluster = store((INFERENCE_SERVICES, chat), (MODELS, model()), *objects)
    accelerators = choose_accelerators(
        Snapshot(cluster, NOW),
        as_service(chat),
        SETTINGS,
        rooms or StatedRooms(nvidia=ROOM),
        find_speeds=find_speeds,
        probes=probes,
    )
    assert accelerators is not None
    return accelerators


def test_service_that_waits_has_no_replica_and_says_why() -> None:
    probes, rooms = StatedProbes("nvidia-l4x1"), StatedRooms(nvidia=ROOM)
    chosen = choose(service(**AUTO), probes, rooms=rooms)
    assert (list(chosen.shares), chosen.probing_since, chosen.again_seconds) == ([], rfc3339(NOW), PROBE_SECONDS)
    assert probes.asked == [(USABLE, NOW + timedelta(seconds=PROBE_SECONDS))]
    assert not chosen.watched
    made = decide_chat((INFERENCE_SERVICES, service(**AUTO)), (MODELS, model()), accelerator_choice=chosen)
    assert ready_outcome(made) == ("Progressing", "False", "MeasuringSpeed")
    assert "nvidia-l4x1" in planned_condition(made, "Ready")["message"]
    assert made.status is not None
    assert made.status["choice"] == {"probingSince": rfc3339(NOW)}
    assert list_applied(made, DEPLOYMENTS) == []
    assert made.again_seconds == PROBE_SECONDS


def test_choice_after_the_wait_keeps_when_it_began() -> None:
    began = rfc3339(NOW - timedelta(seconds=20))
    waiting = service(**AUTO) | {"status": {"choice": {"probingSince": began}}}
    chosen = choose(waiting, StatedProbes())
    assert ([share.replicas for share in chosen.shares][:1], chosen.probing_since) == ([1], began)
    assert choose(waiting, StatedProbes("nvidia-l4x1")).probing_since == began


@pytest.mark.parametrize(
    "spec",
    [
        AUTO | {"scheduling": {"pools": ["nvidia", "metal"]}},
        AUTO | {"replicas": 0},
        AUTO | {"suspend": True},
    ],
)
def test_service_whose_place_no_speed_decides_never_waits(spec: Any) -> None:
    probes = StatedProbes("nvidia-l4x1")
    assert choose(service(**spec), probes).problem is None
    assert probes.asked == []


def test_service_with_a_choice_or_with_replicas_is_never_kept_from_them() -> None:
    probes = StatedProbes("nvidia-l4x1")
    chosen = choose(service(**AUTO), None)
    edited = service(**AUTO, contextLength=2048) | {"status": {"choice": msgspec.to_builtins(chosen.status)}}
    assert choose(edited, probes).problem is None
    assert choose(service(**AUTO), probes, (DEPLOYMENTS, deployment_of())).problem is None
    assert probes.asked == []


def test_nothing_waits_where_nothing_is_measured_or_one_class_alone_is_there() -> None:
    assert choose(service(**AUTO), None).problem is None
    probes = StatedProbes("nvidia-l4x1")
    one = StatedRooms(nvidia=ROOM._replace(device_classes=frozenset({"nvidia-l4x1"})))
    assert choose(service(**AUTO), probes, rooms=one).problem is None
    assert probes.asked == []
