"""The replacement of slow replicas, with the facts of the cluster: what is reported, begun and remembered."""

import asyncio
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, cast

import pytest

from controller.placement.candidate_room import BestPlace, CandidateRooms, ProspectiveReplica
from controller.placement.replacement import ReplacementRules
from controller.reconcile.plan import Snapshot
from controller.services.endpoints import Endpoint
from controller.services.reconciler import build_view
from controller.services.speed_replacer import (
    DEGRADED,
    ReplacementReport,
    SpeedReplacer,
    list_expected,
    report_without_replacer,
)
from controller.services.speed_watch import CHECKS, SpeedWatch
from crds.meta import without_defaults
from crds.placement import ClassSpeed, SpeedReplacement
from kube.client import Client, Obj
from kube.errors import ApiError, NotFound
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES, MODELS, NODES, PODS, Resource
from kube.time import rfc3339
from tests.support.api_objects import ADDRESS, NOW, as_service, library_model, service, slice_of, store
from tests.support.service_decisions import KEY, SETTINGS, chat_pod
from tests.support.waiting_units import GPU, gpu_cell

NVIDIA: dict[str, Any] = {"hardware": {"accelerator": "nvidia"}}
CLASSES = (ClassSpeed(device_class="nvidia-h100x1", tokens_per_second="140", source="Measured", fit="perfect"),)
RULES = ReplacementRules()


class Budgets(Client):
    """An API that answers evictions that are only tried."""

    def __init__(self) -> None:
        self.refusal: ApiError | None = None
        self.asked: list[str] = []

    async def try_subresource(
        self, resource: Resource, name: str, namespace: str | None, subresource: str, obj: Mapping[str, Any]
    ) -> None:
        assert (resource, namespace, subresource) == (PODS, "team", "eviction")
        assert obj["metadata"]["name"] == name
        self.asked.append(name)
        if self.refusal is not None:
            raise self.refusal


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
        self.client, self.rooms = Budgets(), FreePlaces()
        self.status: Obj = {"observedGeneration": 1, "conditions": []}
        self.spec: Obj = NVIDIA
        self.model = library_model()
        self.now = NOW
        self.outcomes: list[str] = []
        self.start()

    def start(self) -> None:
        """Start anew: only what is in the API is known."""
        self.watch = SpeedWatch(RULES, lambda _key: None)
        rooms = cast("CandidateRooms", self.rooms)
        self.replacer = SpeedReplacer(self.watch, rooms, SETTINGS, lambda *_: CLASSES, self.outcomes.append)

    def report(self) -> ReplacementReport:
        """Reconcile, and write the status."""
        node = gpu_node("gpu-a")
        serving = slice_of("chat", "") | {"endpoints": [{"addresses": [ADDRESS], "nodeName": "gpu-a"}]}
        chat = service(status=self.status, **self.spec)
        pod = chat_pod() | {"spec": {"nodeName": "gpu-a"}}
        objects = [(INFERENCE_SERVICES, chat), (MODELS, self.model), (NODES, node), (PODS, pod)]
        snapshot = Snapshot(store(*objects, (ENDPOINT_SLICES, serving)), self.now)
        view = build_view(snapshot, KEY, as_service(chat), SETTINGS)
        self.expected = list_expected(snapshot, view, CLASSES, SETTINGS)
        found = asyncio.run(self.replacer.report(self.client, snapshot, KEY, view, CLASSES))
        status = found.add_to({"conditions": []})
        since = [each | {"lastTransitionTime": rfc3339(self.now)} for each in status["conditions"]]
        self.status = {"observedGeneration": 1, **status, "conditions": since}
        return found

    def become_slow(self, speed: float = 40.0) -> None:
        """Read the metrics as often as a decision needs."""
        self.report()
        for number in range(CHECKS):
            self.watch.take(KEY, dict.fromkeys(self.expected, speed), 30.0 * number)

    def reason(self) -> str:
        """Reconcile, and return the reason of the condition; empty if there is none."""
        found = self.report().condition
        assert found is None or (found["type"], found["status"]) == (DEGRADED, "True")
        return "" if found is None else str(found["reason"])


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
    found = chat.report()
    assert found.condition is not None
    assert (found.condition["reason"], chat.client.asked) == ("Replacing", ["chat-1"])
    assert found.condition["message"] == (
        "replica chat-1 on node/gpu-a gives a single request 40.0 of 140 tokens/s: a replica for a better place, such "
        "as node/gpu-b, is being started, and this one ends when that is ready"
    )
    (event,) = found.list_events(None)
    assert (event.reason, found.list_events(found.replacement)) == ("ReplicaSlow", ())
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
        (lambda chat: setattr(chat.rooms, "answer", None), "RoomUnknown"),
        (lambda chat: setattr(chat.client, "refusal", ApiError("create", status=429)), "BudgetForbids"),
        (lambda chat: setattr(chat.client, "refusal", NotFound("create", status=404)), "NotReady"),
        (lambda chat: setattr(chat, "spec", NVIDIA | {"evictionProtection": True}), "Protected"),
        (lambda chat: setattr(chat, "spec", NVIDIA | {"scheduling": {"mode": "Native"}}), "NotMovable"),
        (lambda chat: chat.model["spec"].update(source="http://models.example/tiny.gguf"), "NotMovable"),
    ],
)
def test_slow_replica_that_stays_says_why(chat: ReplacerOfChat, change: Any, reason: str) -> None:
    chat.become_slow()
    change(chat)
    found = chat.report()
    assert found.condition is not None
    assert (found.condition["reason"], found.replacement) == (reason, None)
    assert "chat-1 on node/gpu-a gives a single request 40.0 of 140 tokens/s; it stays: " in found.condition["message"]


def test_replica_of_usual_speed_has_no_condition(chat: ReplacerOfChat) -> None:
    chat.become_slow(110.0)
    assert chat.reason() == ""


def test_cool_down_and_condition_outlive_the_controller(chat: ReplacerOfChat) -> None:
    chat.become_slow()
    chat.report()
    chat.now += timedelta(minutes=3)
    assert chat.reason() == "CoolDown", "no pod came, so it was given up"
    assert (chat.outcomes, chat.status["replacement"]["outcome"]) == (["GivenUp"], "GivenUp")
    chat.start()
    assert chat.reason() == "CoolDown", "this leader has read nothing yet"
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
    assert (chat.reason(), chat.outcomes) == ("CoolDown", ["GivenUp"])


def test_controller_without_the_option_ends_what_goes_on_and_keeps_what_is_over() -> None:
    going = SpeedReplacement(
        uid="u",
        from_place="node/a",
        observed="40.0",
        expected="140",
        least_tokens_per_second="57.1",
        started_at=rfc3339(NOW),
    )
    active = as_service(service(status={"replacement": without_defaults(going)}))
    assert report_without_replacer(active).add_to({"conditions": []}) == {"conditions": []}
    over = without_defaults(going) | {"endedAt": rfc3339(NOW), "outcome": "GivenUp"}
    kept = report_without_replacer(as_service(service(status={"replacement": over})))
    assert kept.add_to({"conditions": []})["replacement"] == over
