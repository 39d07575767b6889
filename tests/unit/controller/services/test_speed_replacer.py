"""The replacement of slow replicas, with the facts of the cluster: what is reported, begun and remembered."""

from datetime import datetime, timedelta
from typing import Any, cast

import pytest
from msgspec.structs import replace

from controller.placement.candidate_room import BestPlace, CandidateRooms, ProspectiveReplica
from controller.placement.replacement import ReplacementRules
from controller.reconcile.plan import Snapshot
from controller.services.endpoints import Endpoint
from controller.services.service_view import build_view
from controller.services.speed_replacer import (
    FIT_DEGRADED,
    SPEED_DEGRADED,
    ReplacementReport,
    SpeedReplacer,
    list_expected,
    report_without_replacer,
)
from controller.services.speed_watch import SpeedWatch
from crds.meta import without_defaults
from crds.placement import ClassSpeed, SpeedReplacement
from kube.client import Obj
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES, MODELS, NODES, PODS, ObjectKey
from kube.time import rfc3339
from tests.support.api_objects import ADDRESS, NOW, as_service, library_model, service, slice_of, store
from tests.support.service_decisions import KEY, SETTINGS, chat_pod
from tests.support.waiting_units import GPU, gpu_cell

NVIDIA: dict[str, Any] = {"hardware": {"accelerator": "nvidia"}}
CLASSES = (ClassSpeed(device_class="nvidia-h100x1", tokens_per_second="140", source="Measured", fit="perfect"),)
RULES = ReplacementRules(is_on=True)


class FreePlaces:
    """The room of the queue."""

    def __init__(self) -> None:
        self.answer: BestPlace | None = BestPlace(gpu_cell("gpu-b"))
        self.asked: list[ProspectiveReplica] = []

    def find_best(self, prospect: ProspectiveReplica) -> BestPlace | None:
        self.asked.append(prospect)
        return self.answer


class ReplacerOfChat:
    """A controller that leads, as far as it replaces replicas of `chat`."""

    def __init__(self) -> None:
        self.rooms, self.rules, self.classes = FreePlaces(), RULES, CLASSES
        self.status: Obj = {"observedGeneration": 1, "conditions": []}
        self.spec: Obj = NVIDIA
        self.model = library_model()
        self.now = NOW
        self.outcomes: list[str] = []
        self.start()

    def start(self) -> None:
        """Start anew: only what is in the API is known."""
        self.watch = SpeedWatch(self.rules, lambda _key: None)
        rooms = cast("CandidateRooms", self.rooms)
        self.replacer = SpeedReplacer(self.watch, rooms, SETTINGS, lambda *_: self.classes, self.outcomes.append)

    def report(self) -> ReplacementReport:
        """Reconcile, and write the status."""
        node = gpu_node("gpu-a")
        serving = slice_of("chat", "") | {"endpoints": [{"addresses": [ADDRESS], "nodeName": "gpu-a"}]}
        chat = service(status=self.status, **self.spec)
        pod = chat_pod() | {"spec": {"nodeName": "gpu-a"}}
        objects = [(INFERENCE_SERVICES, chat), (MODELS, self.model), (NODES, node), (PODS, pod)]
        snapshot = Snapshot(store(*objects, (ENDPOINT_SLICES, serving)), self.now)
        view = build_view(snapshot, KEY, as_service(chat), SETTINGS)
        self.expected = list_expected(snapshot, view, self.classes, SETTINGS)
        replacement_report = self.replacer.report(snapshot, KEY, view, self.classes)
        status = replacement_report.add_to({"conditions": []})
        since = [condition | {"lastTransitionTime": rfc3339(self.now)} for condition in status["conditions"]]
        self.status = {"observedGeneration": 1, **status, "conditions": since}
        return replacement_report

    def become_slow(self, speed: float = 40.0) -> None:
        """Read the metrics."""
        self.report()
        self.watch.add_readings(KEY, dict.fromkeys(self.expected, speed), 300.0)

    def reason(self) -> str:
        """Reconcile, and return the reason of the condition; empty if there is none."""
        conditions = self.report().conditions
        assert all((condition["type"], condition["status"]) == (SPEED_DEGRADED, "True") for condition in conditions)
        return ",".join(condition["reason"] for condition in conditions)


@pytest.fixture
def chat() -> ReplacerOfChat:
    return ReplacerOfChat()


def gpu_node(name: str) -> Obj:
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100"}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", "labels": labels},
        "spec": {},
        "status": {"allocatable": {GPU: "1"}, "capacity": {GPU: "1"}, "conditions": []},
    }


def test_slow_replica_is_named_and_its_replacement_is_in_the_status(chat: ReplacerOfChat) -> None:
    assert chat.reason() == ""
    assert chat.expected == {Endpoint(ADDRESS, 18000, node="gpu-a"): 140.0}
    chat.become_slow()
    report = chat.report()
    (shown,) = report.conditions
    assert shown["reason"] == "Replacing"
    assert shown["message"] == (
        "replica chat-1 on node/gpu-a gives a single request 40.0 of 140 tokens/s: a replica for a better place, such "
        "as node/gpu-b, is being started, and this one ends when that is ready"
    )
    (event,) = report.list_events(None)
    assert (event.reason, report.list_events(report.replacement)) == ("ReplicaSlow", ())
    (asked,) = chat.rooms.asked
    assert asked.unit.is_last
    assert (sorted(asked.unit.avoid), round(asked.unit.speeds.least, 1)) == (["node/gpu-a"], 57.1)
    assert chat.status["replacement"]["uid"] == "uid-chat-1"
    # A second reconcile begins nothing else.
    assert (chat.reason(), len(chat.rooms.asked)) == ("Replacing", 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda chat: setattr(chat.rooms, "answer", BestPlace(None)), "NoBetterPlace"),
        (lambda chat: setattr(chat.rooms, "answer", None), "NoBetterPlace"),
        (lambda chat: setattr(chat.watch, "rules", ReplacementRules()), "ReplacementOff"),
        (lambda chat: setattr(chat, "spec", NVIDIA | {"evictionProtection": True}), "Protected"),
        (lambda chat: setattr(chat, "spec", NVIDIA | {"scheduling": {"mode": "Native"}}), "NotMovable"),
        (lambda chat: chat.model["spec"].update(source="http://models.example/tiny.gguf"), "NotMovable"),
    ],
)
def test_slow_replica_that_stays_says_why(chat: ReplacerOfChat, change: Any, reason: str) -> None:
    chat.become_slow()
    change(chat)
    report = chat.report()
    (shown,) = report.conditions
    assert (shown["reason"], report.replacement) == (reason, None)
    assert "chat-1 on node/gpu-a gives a single request 40.0 of 140 tokens/s; it stays: " in shown["message"]


def test_replica_that_does_not_fit_any_more_is_named_and_replaced(chat: ReplacerOfChat) -> None:
    chat.classes = (replace(CLASSES[0], refusal="TooTight", fit="marginal"),)
    (shown,) = chat.report().conditions
    assert (shown["type"], shown["reason"]) == (FIT_DEGRADED, "Replacing")
    assert shown["message"] == (
        "replica chat-1 on node/gpu-a does not fit there any more: nvidia-h100x1: the fit is marginal, less than "
        "spec.placement.minFit: a replica for a better place, such as node/gpu-b, is being started, and this one ends "
        "when that is ready"
    )
    (asked,) = chat.rooms.asked
    assert (sorted(asked.unit.avoid), asked.unit.speeds.least) == (["node/gpu-a"], 0.0)
    assert "fromPlace" in chat.status["replacement"]


def test_one_replica_of_the_cluster_is_replaced_at_once(chat: ReplacerOfChat) -> None:
    chat.become_slow()
    chat.replacer._moving.add(ObjectKey("other", "secret"))
    (shown,) = chat.report().conditions
    assert shown["reason"] == "TooManyMoves"
    assert "secret" not in shown["message"], "tenants learn no name of another namespace"
    chat.replacer.forget(ObjectKey("other", "secret"))
    assert chat.reason() == "Replacing"


def test_forged_replacement_keeps_no_other_from_theirs(chat: ReplacerOfChat) -> None:
    chat.report()
    chat.status["replacement"] = going_on(rfc3339(chat.now))
    chat.report()
    assert chat.replacer._moving == set()


def test_replica_of_usual_speed_has_no_condition(chat: ReplacerOfChat) -> None:
    chat.become_slow(110.0)
    assert chat.reason() == ""


def test_cool_down_outlives_the_controller(chat: ReplacerOfChat) -> None:
    chat.become_slow()
    chat.report()
    chat.now += timedelta(minutes=3)
    assert chat.reason() == "CoolDown", "no pod came, so it was given up"
    assert (chat.outcomes, chat.status["replacement"]["outcome"]) == (["GivenUp"], "GivenUp")
    chat.start()
    chat.become_slow()
    assert chat.reason() == "CoolDown"
    ended = datetime.fromisoformat(chat.status["replacement"]["endedAt"])
    chat.now = ended + timedelta(seconds=RULES.cool_down_seconds - 1)
    assert chat.reason() == "CoolDown"
    chat.now = ended + timedelta(seconds=RULES.cool_down_seconds)
    assert chat.reason() == "Replacing"


def test_replacement_that_goes_on_outlives_the_controller(chat: ReplacerOfChat) -> None:
    chat.become_slow()
    chat.report()
    began = chat.status["replacement"]
    chat.start()
    assert (chat.reason(), chat.status["replacement"]) == ("Replacing", began)
    chat.now += timedelta(minutes=3)
    assert (chat.reason(), chat.outcomes) == ("", ["GivenUp"]), "this leader has read no speed yet"


def going_on(started_at: str) -> Obj:
    going = SpeedReplacement(
        uid="u",
        from_place="node/a",
        observed="40.0",
        expected="140",
        least_tokens_per_second="57.1",
        started_at=started_at,
    )
    return without_defaults(going)


def test_controller_without_the_option_ends_what_goes_on_and_keeps_what_is_over(chat: ReplacerOfChat) -> None:
    chat.rules = ReplacementRules()
    chat.start()
    over = going_on(rfc3339(NOW)) | {"endedAt": rfc3339(NOW), "outcome": "GivenUp"}
    for stored, kept in ((going_on(rfc3339(NOW)), None), (over, over)):
        chat.status["replacement"] = stored
        assert chat.report().add_to({"conditions": []}).get("replacement") == kept
        active = as_service(service(status={"replacement": stored}))
        assert report_without_replacer(active).add_to({"conditions": []}).get("replacement") == kept
