"""The feed keeps the table equal to the cluster, ages silent agents, and answers for pods by their service."""

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
import structlog

from crds.inferenceservice import InferenceService
from crds.meta import LABEL_SERVICE
from crds.model import Model
from crds.nodefitness import STALE_SECONDS
from devices.vendors import VENDORS
from extender.feed import ExtenderFeed, open_view
from extender.score import ScoreWeights
from extender.speed_table import ScoreBoard, SpeedTable
from fitness.performance import hash_model
from fitness.performance_store import LABEL_MODEL_HASH
from kube.client import Obj
from kube.resources import CONFIG_MAPS, INFERENCE_SERVICES, MODELS, NODE_FITNESSES, NODES
from tests.support import api_objects
from tests.unit.extender.extender_objects import H100, H100_LABELS, HASH, L4_LABELS, fitness, measured, pod

SERVICE = api_objects.service(status={"runtime": "vllm", "accelerator": "nvidia"})
MODEL = api_objects.model()
MODEL_HASH = hash_model(msgspec.convert(MODEL, Model), "vllm", msgspec.convert(SERVICE, InferenceService).spec)


PREFIX = "inference.pomona.dev"
MORNING = datetime(2026, 11, 26, 8, tzinfo=UTC)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def feed(clock: Clock) -> ExtenderFeed:
    view = open_view(VENDORS, PREFIX, clock=clock, read_time=lambda: MORNING)
    table = SpeedTable(VENDORS, ScoreWeights(), lambda _served, _devices, _corrections: None, view.measured)
    feed = ExtenderFeed(table, view, PREFIX)
    put_node(feed, "slow", L4_LABELS)
    put_node(feed, "fast", H100_LABELS)
    feed.view.store.put(MODELS, MODEL)
    feed.view.store.put(INFERENCE_SERVICES, SERVICE)
    speeds = measured(MODEL_HASH, nvidia_l4x1=20, nvidia_h100_80gb_hbm3x1=100)
    feed.view.store.put(CONFIG_MAPS, stored(speeds, 1))
    return feed


def stored(obj: Obj, version: int) -> Obj:
    return obj | {"metadata": obj["metadata"] | {"uid": obj["metadata"]["name"], "resourceVersion": str(version)}}


def put_node(feed: ExtenderFeed, name: str, labels: dict[str, str], version: int = 1, **annotations: str) -> None:
    node: Obj = {
        "metadata": {
            "name": name,
            "labels": labels | {"kubernetes.io/hostname": name},
            "annotations": {f"{PREFIX}/{key.replace('_', '.')}": value for key, value in annotations.items()},
        },
        "status": {"images": [{"names": ["x"] * 50}]},
    }
    feed.view.store.put(NODES, stored(node, version))


def put_fitness(feed: ExtenderFeed, name: str, observed_at: str, version: int = 1, **device: Any) -> None:
    status = msgspec.to_builtins(fitness(**device)) | {"observedAt": observed_at}
    feed.view.store.put(NODE_FITNESSES, stored({"metadata": {"name": name}, "status": status}, version))


def scores(board: ScoreBoard | None, *names: str) -> list[int]:
    assert board is not None
    return [json.loads(board.pieces[name])["Score"] for name in names]


CHAT = pod({LABEL_SERVICE: "chat"}, nvidia=1)


def test_pod_of_a_service_is_scored_by_its_model(feed: ExtenderFeed) -> None:
    assert scores(feed.find_board(CHAT), "slow", "fast") == [4, 10]


def test_pod_of_others_is_scored_by_the_hash_that_it_states(feed: ExtenderFeed) -> None:
    assert scores(feed.find_board(pod({LABEL_MODEL_HASH: MODEL_HASH}, nvidia=1)), "slow", "fast") == [4, 10]
    assert scores(feed.find_board(pod({LABEL_MODEL_HASH: HASH}, nvidia=1)), "slow", "fast") == [3, 3]


def test_service_of_another_namespace_is_not_found(feed: ExtenderFeed) -> None:
    # A Model of that name is there, so that only the service is missing.
    feed.view.store.put(MODELS, MODEL | {"metadata": MODEL["metadata"] | {"namespace": "rogue", "uid": "uid-rogue"}})
    assert feed.find_board(CHAT._replace(namespace="rogue")) is None
    assert feed.find_board(CHAT._replace(namespace="")) is None


@pytest.mark.parametrize("name", ["other", "..", "", "a/b", "x" * 10_000])
def test_service_that_does_not_exist_is_neutral(feed: ExtenderFeed, name: str) -> None:
    assert feed.find_board(pod({LABEL_SERVICE: name})) is None


@pytest.mark.parametrize(
    ("resource", "broken"),
    [
        (INFERENCE_SERVICES, {"spec": {"modelRef": "none"}}),
        (INFERENCE_SERVICES, {"spec": {"modelRef": 7}}),
        (INFERENCE_SERVICES, {"spec": {"modelRef": "tiny", "contextLength": "many"}}),
        (INFERENCE_SERVICES, {"status": {}}),
        (MODELS, {"spec": {}}),
    ],
)
def test_object_that_cannot_be_read_is_neutral(feed: ExtenderFeed, resource: Any, broken: Obj) -> None:
    intact = SERVICE if resource is INFERENCE_SERVICES else MODEL
    feed.view.store.put(resource, intact | broken | {"metadata": intact["metadata"] | {"resourceVersion": "2"}})
    assert feed.find_board(CHAT) is None


def test_change_of_the_model_changes_the_answer(feed: ExtenderFeed) -> None:
    assert scores(feed.find_board(CHAT), "slow", "fast") == [4, 10]
    changed = MODEL | {"status": MODEL["status"] | {"revision": "r2"}}
    feed.view.store.put(MODELS, changed | {"metadata": MODEL["metadata"] | {"resourceVersion": "2"}})
    assert scores(feed.find_board(CHAT), "slow", "fast") == [3, 3]


def test_only_the_needed_part_of_a_node_is_kept(feed: ExtenderFeed) -> None:
    (node,) = [node for node in feed.view.store.list(NODES) if node["metadata"]["name"] == "slow"]
    assert node.keys() == {"metadata"}
    assert node["metadata"]["labels"] == L4_LABELS


def test_facts_of_a_silent_agent_count_no_longer(feed: ExtenderFeed, clock: Clock) -> None:
    put_node(feed, "slow", {}, 2)
    put_fitness(feed, "slow", "2026-11-26T08:00:00Z", device_class=H100)
    assert scores(feed.find_board(CHAT), "slow") == [10]
    clock.now = STALE_SECONDS + 1
    feed.update_stale()
    assert scores(feed.find_board(CHAT), "slow") == [3]
    put_fitness(feed, "slow", "2026-11-26T08:00:00Z", 2, device_class=H100, utilization_percent=1)  # no heartbeat
    assert scores(feed.find_board(CHAT), "slow") == [3]
    put_fitness(feed, "slow", "2026-11-26T08:03:00Z", 3, device_class=H100)
    assert scores(feed.find_board(CHAT), "slow") == [10]


def test_agent_that_reports_nothing_or_nonsense_leaves_the_labels(feed: ExtenderFeed) -> None:
    put_fitness(feed, "slow", "", device_class=H100)
    put_fitness(feed, "fast", "2026-11-26T12:00:00Z", device_class="x" * 300)
    assert scores(feed.find_board(CHAT), "slow", "fast") == [4, 10]
    feed.view.store.remove(NODE_FITNESSES, None, "slow")
    assert scores(feed.find_board(CHAT), "slow", "fast") == [4, 10]


def test_node_and_measurement_that_are_gone_are_forgotten(feed: ExtenderFeed) -> None:
    feed.view.store.remove(NODES, None, "fast")
    assert scores(feed.find_board(CHAT), "slow", "fast") == [10, 3]
    feed.view.store.remove(CONFIG_MAPS, "pomona-system", f"bench-{MODEL_HASH}")
    assert scores(feed.find_board(CHAT), "slow") == [3]


def test_bad_annotation_is_named_once(feed: ExtenderFeed) -> None:
    with structlog.testing.capture_logs() as logged:
        put_node(feed, "slow", L4_LABELS, 2, cost="cheap")
        put_node(feed, "slow", L4_LABELS, 3, cost="cheap")
        put_node(feed, "slow", L4_LABELS, 4, cost="cheap", gpu_util="0.5")
    (event,) = logged
    assert (event["node"], event["annotation"], event["value"]) == ("slow", "inference.pomona.dev/cost", "cheap")
