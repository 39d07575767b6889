"""Every request gets an answer, which rejects no node without a known reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from crds.meta import LABEL_SERVICE
from devices.vendors import VENDORS
from extender.answers import Answers
from extender.extender_metrics import ExtenderMetrics, Verb
from extender.score import ScoreWeights
from extender.speed_table import ScoreBoard, SpeedTable
from extender.wire import PodFacts
from fitness.performance_store import PerformanceTable
from tests.unit.extender.extender_objects import (
    GIB,
    H100_LABELS,
    L4_LABELS,
    MI300_LABELS,
    SERVED,
    SHARED,
    args_body,
    facts,
    measure,
    measured,
    subject,
)

RECORDED = Path(__file__).with_name("recorded")
CHAT = {LABEL_SERVICE: "chat"}
VERBS: tuple[Verb, ...] = ("filter", "prioritize")


class Boards:
    """A knowledge of the pods of one service of namespace team, which needs 30 GiB."""

    def __init__(self) -> None:
        self.table = SpeedTable(
            VENDORS, ScoreWeights(), lambda _served, _devices, _corrections: None, PerformanceTable()
        )
        self.table.set_node("sim-0", facts(L4_LABELS))
        self.table.set_node("sim-1", facts(H100_LABELS))
        self.table.set_node("sim-2", facts(MI300_LABELS))
        full = facts(H100_LABELS | SHARED, memory_bytes=80 * GIB, free_bytes=GIB, device_class="nvidia-h100x1")
        self.table.set_node("sim-3", full)
        measure(self.table, measured(nvidia_h100_80gb_hbm3x1=100, nvidia_h100_80gb_hbm3x2=150))
        self.asked: list[PodFacts] = []
        self.defect: Exception | None = None

    def find_board(self, pod: PodFacts) -> ScoreBoard | None:
        self.asked.append(pod)
        if self.defect is not None:
            raise self.defect
        count = pod.devices.get("nvidia.com/gpu", 0)
        scoring_subject = subject(need_bytes=30 * GIB, device_count=count)
        return self.table.find_board(scoring_subject, SERVED) if pod.labels == CHAT else None


@pytest.fixture
def boards() -> Boards:
    return Boards()


@pytest.fixture
def metrics(boards: Boards) -> ExtenderMetrics:
    return ExtenderMetrics(boards.table)


@pytest.fixture
def answers(boards: Boards, metrics: ExtenderMetrics) -> Answers:
    return Answers(boards.find_board, ScoreWeights(), metrics)


def ask(answers: Answers, verb: Verb, body: bytes) -> Any:
    answer = answers.answer(verb, body)
    assert answer.status == 200
    return json.loads(answer.body)


def counted(registry: CollectorRegistry, verb: str, outcome: str) -> float | None:
    return registry.get_sample_value("pomona_extender_requests_total", {"verb": verb, "outcome": outcome})


def test_recorded_request_for_a_filter_is_answered(answers: Answers, boards: Boards) -> None:
    answer = ask(answers, "filter", (RECORDED / "filter_names.json").read_bytes())
    assert answer == {
        "Nodes": None,
        "NodeNames": ["sim-1"],
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": {
            "sim-0": "a device has 22.5 GiB of memory, and the model needs 30.0 GiB",
            "sim-2": "its devices are of amd, and the service needs nvidia",
        },
        "Error": "",
    }
    (pod,) = boards.asked
    assert (pod.labels, pod.devices) == (CHAT, {"nvidia.com/gpu": 2})
    assert pod.namespace.startswith("test-")


def test_recorded_request_with_nodes_gets_them_back(answers: Answers) -> None:
    body = (RECORDED / "filter_nodes.json").read_bytes()
    answer = ask(answers, "filter", body)
    sent = json.loads(body)["Nodes"]["items"]
    assert answer["Nodes"]["items"] == [sent[1]]
    assert answer["NodeNames"] is None
    assert set(answer["FailedAndUnresolvableNodes"]) == {"sim-0", "sim-2"}


@pytest.mark.parametrize("form", ["names", "nodes"])
def test_recorded_request_for_scores_is_answered(answers: Answers, form: str) -> None:
    answer = ask(answers, "prioritize", (RECORDED / f"prioritize_{form}.json").read_bytes())
    expected = [{"Host": "sim-0", "Score": 0}, {"Host": "sim-1", "Score": 10}, {"Host": "sim-2", "Score": 0}]
    assert answer == expected


def test_node_without_free_memory_may_fit_later(answers: Answers, metrics: ExtenderMetrics) -> None:
    answer = ask(answers, "filter", args_body(CHAT, ["sim-3", "sim-1", "sim-0", "new"]))
    assert answer["NodeNames"] == ["sim-1", "new"]
    assert answer["FailedNodes"] == {"sim-3": "its shared devices have 1 GiB free, and the model needs 30.0 GiB"}
    assert set(answer["FailedAndUnresolvableNodes"]) == {"sim-0"}
    assert metrics.registry.get_sample_value("pomona_extender_rejected_nodes_total") == 2


@pytest.mark.parametrize("labels", [{}, {LABEL_SERVICE: "other"}])
def test_unknown_pod_fits_every_node_with_the_neutral_score(
    answers: Answers, metrics: ExtenderMetrics, labels: dict[str, str]
) -> None:
    names = ["sim-0", "sim-2", "new", "new"]
    answer = ask(answers, "filter", args_body(labels, names))
    assert (answer["NodeNames"], answer["FailedNodes"], answer["FailedAndUnresolvableNodes"]) == (names, {}, {})
    assert ask(answers, "prioritize", args_body(labels, names)) == [{"Host": name, "Score": 3} for name in names]
    assert [counted(metrics.registry, verb, "neutral") for verb in VERBS] == [1, 1]


def test_defect_rejects_no_node(answers: Answers, boards: Boards, metrics: ExtenderMetrics) -> None:
    boards.defect = RuntimeError("a defect")
    assert ask(answers, "filter", args_body(CHAT, ["sim-0"]))["NodeNames"] == ["sim-0"]
    assert ask(answers, "prioritize", args_body(CHAT, ["sim-0"])) == [{"Host": "sim-0", "Score": 3}]
    assert [counted(metrics.registry, verb, "failed") for verb in VERBS] == [1, 1]


def test_request_that_cannot_be_decoded_is_an_error_in_words(answers: Answers, metrics: ExtenderMetrics) -> None:
    answer = ask(answers, "filter", b'{"NodeNames": 7}')
    assert answer["Error"].startswith("pomona extender: the request is no ExtenderArgs: ")
    assert answer["NodeNames"] is None
    refused = answers.answer("prioritize", b'{"NodeNames": 7}')
    assert (refused.status, b"no ExtenderArgs" in refused.body) == (400, True)
    assert [counted(metrics.registry, verb, "refused") for verb in VERBS] == [1, 1]


def test_durations_are_counted_by_verb(boards: Boards, metrics: ExtenderMetrics) -> None:
    seconds = iter((1.0, 1.25))
    Answers(boards.find_board, ScoreWeights(), metrics, lambda: next(seconds)).answer("filter", args_body(CHAT, []))
    name = "pomona_extender_request_duration_seconds_sum"
    assert metrics.registry.get_sample_value(name, {"verb": "filter"}) == 0.25
    assert REGISTRY.get_sample_value(name, {"verb": "filter"}) is None
