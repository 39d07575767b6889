"""`status.placement` says where a replica is and why, as long as it is there."""

import msgspec

from controller.placement.actions import Admit
from controller.placement.alternatives import Alternative
from controller.placement.placement_notes import PlacementNote, PlacementNotes
from controller.placement.score import score_cell
from controller.placement.units import SpeedProfile
from controller.services.speed_report import SpeedReport, report_placement
from crds.placement import ClassSpeed, PlacementStatus
from kube.resources import ObjectKey
from tests.support.queue_units import gpus, node, pod
from tests.support.service_decisions import chat_service, decide_chat

UNIT = pod("a", 2, service="chat", speeds=SpeedProfile((("nvidia-h100x1", 120.0), ("nvidia-l4x1", 24.0))))
H100, L4 = node("h", device_class="nvidia-h100x1"), node("l", device_class="nvidia-l4x1")
SPEEDS = (
    ClassSpeed(device_class="nvidia-h100x2", tokens_per_second="120", source="Estimated", fit="perfect"),
    ClassSpeed(device_class="nvidia-l4x2", tokens_per_second="24.0", source="Measured", fit="good"),
)
NOTE = PlacementNote(
    "node/h",
    "nvidia-h100x1",
    score_cell(UNIT, gpus(2), H100, H100.free, 0),
    (
        Alternative("nvidia-l4x1", "node/l", score_cell(UNIT, gpus(2), L4, L4.free, 0)),
        Alternative("nvidia-oldx1", refusal="NoRoom"),
    ),
)


def test_placement_names_the_place_its_speed_and_the_best_others() -> None:
    status = report_placement(NOTE, None, SPEEDS, {"h"})
    assert status is not None
    assert (status.place, status.device_class, status.score) == ("node/h", "nvidia-h100x2", 72)
    assert (status.tokens_per_second, status.source, status.fit) == ("120", "Estimated", "perfect")
    assert status.reason.startswith("no replica of the service there, 72 points, 120 tokens/s")
    assert [(other.place, other.device_class, other.tokens_per_second) for other in status.others] == [
        ("node/l", "nvidia-l4x2", "24.0"),
        ("", "nvidia-oldx1", None),
    ]
    assert status.others[1].reason == "too little is free there"


def test_class_that_was_no_better_than_a_slow_replica_names_no_demand_of_the_service() -> None:
    status = report_placement(NOTE._replace(others=(Alternative("nvidia-t4x1", refusal="NotFaster"),)), None, (), {"h"})
    assert status is not None
    assert status.others[0].reason == "not known to be faster than the slow replica that was replaced"


def test_place_that_others_made_room_for_has_no_score() -> None:
    status = report_placement(NOTE._replace(score=None), None, (), {"h"})
    assert status is not None
    assert (status.score, status.reason) == (None, "others ended to make room for it there")


def test_placement_goes_with_the_replica_and_outlives_the_leader() -> None:
    reported = PlacementStatus(place="node/h")
    assert report_placement(NOTE, reported, SPEEDS, {"other"}) is None
    assert report_placement(None, reported, SPEEDS, {"h"}) is reported
    assert report_placement(None, reported, SPEEDS, {"other"}) is None
    assert report_placement(None, None, SPEEDS, {"h"}) is None


def test_note_is_that_of_the_last_admission_of_a_service() -> None:
    told = list[ObjectKey]()
    notes = PlacementNotes({"node/h": H100, "node/l": L4}.get, told.append)
    notes.note(Admit(UNIT, ("node/h",), (), others=NOTE.others))
    notes.note(Admit(UNIT, ()))  # an autoscaler adds its node
    notes.note(Admit(UNIT, ("node/l",)))
    assert notes.find(UNIT.service) == PlacementNote("node/l", "nvidia-l4x1", None, ())
    assert told == [UNIT.service] * 2
    notes.restart()
    assert notes.find(UNIT.service) is None


def test_speeds_and_placement_are_in_the_status() -> None:
    status = report_placement(NOTE, None, SPEEDS, {"h"})
    plan = decide_chat(chat_service(), speed=SpeedReport(SPEEDS, status))
    assert plan.status is not None
    assert [each["deviceClass"] for each in plan.status["speeds"]] == ["nvidia-h100x2", "nvidia-l4x2"]
    assert plan.status["placement"]["others"][0]["place"] == "node/l"
    assert msgspec.convert(plan.status["placement"], PlacementStatus) == status
    assert "speeds" not in (decide_chat(chat_service()).status or {})
