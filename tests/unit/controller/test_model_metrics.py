"""The series of services, engines and node agents, by the events of a store."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from controller.model_metrics import ModelMetrics, find_pod_load_seconds
from controller.services.traffic import TokenSource
from crds.meta import LABEL_SERVICE, PROXY_CONTAINER
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, METAL_PROCESSES, NODE_FITNESSES, PODS, ObjectKey
from kube.store import Store
from tests.support import api_objects
from tests.support.api_objects import process, service

CHAT = ObjectKey("team", "chat")


class Followed:
    """Metrics that follow a store."""

    def __init__(self, prefix: str = "pomona") -> None:
        self.registry = CollectorRegistry()
        self.now = 10_000.0
        self.metrics = ModelMetrics(self.registry, prefix, read_now=lambda: self.now)
        self.store: Store = api_objects.store()
        self.metrics.follow_store(self.store)
        self._versions = 1000

    def put(self, resource: Any, obj: Obj) -> None:
        self._versions += 1
        obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self._versions)}}
        assert self.store.put(resource, self.store.keep_part(resource, obj))

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(sample.labels.values()): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name
        }


@pytest.fixture
def followed() -> Followed:
    return Followed()


def pod(started_at: str = "2026-11-21T11:00:00Z", *, ready: str = "True", node: str = "gpu-1", name: str = "p") -> Obj:
    return {
        "metadata": {"name": name, "namespace": "team", "uid": name, "labels": {LABEL_SERVICE: "chat"}},
        "spec": {"nodeName": node},
        "status": {
            "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": "2026-11-21T11:00:40Z"}],
            "containerStatuses": [
                {"name": "engine", "state": {"running": {"startedAt": started_at}}},
                {"name": "mesh", "state": {"running": {"startedAt": "2026-11-21T10:59:00Z"}}},
                {"name": PROXY_CONTAINER, "state": {"running": {"startedAt": "2026-11-21T11:00:39Z"}}},
            ],
        },
    }


def test_load_of_a_pod_is_from_the_start_of_its_engine_until_it_was_ready(followed: Followed) -> None:
    followed.put(INFERENCE_SERVICES, service("chat", modelRef="qwen"))
    followed.put(PODS, pod())
    assert followed.series("pomona_model_load_seconds") == {("team", "qwen", "gpu-1"): 40}
    followed.put(PODS, pod(ready="False"))
    assert followed.series("pomona_model_load_seconds") == {}


def test_pod_that_is_known_before_its_service_has_a_load(followed: Followed) -> None:
    followed.put(PODS, pod())
    assert followed.series("pomona_model_load_seconds") == {}
    followed.put(INFERENCE_SERVICES, service("chat", modelRef="qwen"))
    assert followed.series("pomona_model_load_seconds") == {("team", "qwen", "gpu-1"): 40}


def test_load_of_a_model_on_a_node_is_the_longest_of_those_that_are_there(followed: Followed) -> None:
    followed.put(INFERENCE_SERVICES, service("chat", modelRef="qwen"))
    followed.put(PODS, pod())
    followed.put(PODS, pod("2026-11-21T11:00:30Z", name="other"))
    assert followed.series("pomona_model_load_seconds") == {("team", "qwen", "gpu-1"): 40}
    followed.store.remove(PODS, "team", "p")
    assert followed.series("pomona_model_load_seconds") == {("team", "qwen", "gpu-1"): 10}
    followed.store.remove(PODS, "team", "other")
    assert followed.series("pomona_model_load_seconds") == {}


@pytest.mark.parametrize("started_at", ["soon", "2026-11-21T11:00:41Z", "9999-12-31T23:59:59+99:99"])
def test_load_that_cannot_be_is_unknown(started_at: str) -> None:
    assert find_pod_load_seconds(pod(started_at)) is None


def test_load_of_a_process_is_that_which_its_host_reports(followed: Followed) -> None:
    loaded = process("chat-0", host="studio-1", phase="Ready")
    loaded["status"] |= {"startedAt": "2026-11-21T11:00:00Z", "readyAt": "2026-11-21T11:00:07Z"}
    followed.put(METAL_PROCESSES, loaded)
    namespace, model = loaded["metadata"]["namespace"], loaded["spec"]["modelName"]
    assert followed.series("pomona_model_load_seconds") == {(namespace, model, "studio-1"): 7}
    loaded["status"] = {**loaded["status"], "readyAt": "a while ago"}
    followed.put(METAL_PROCESSES, loaded)
    assert followed.series("pomona_model_load_seconds") == {}


def test_service_is_ready_or_not_and_absent_while_it_shall_not_run(followed: Followed) -> None:
    def readiness() -> dict[tuple[str, ...], float]:
        return followed.series("pomona_service_ready")

    def state(phase: str, *, ready: bool) -> Obj:
        return {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready), "reason": "Serving"}]}

    followed.put(INFERENCE_SERVICES, service("chat", status={"phase": "Pending"}))
    assert readiness() == {("team", "chat", "normal"): 0}
    followed.put(INFERENCE_SERVICES, service("chat", status=state("Ready", ready=True), priority="high"))
    assert readiness() == {("team", "chat", "high"): 1}
    for phase in ("Progressing", "Degraded"):
        followed.put(INFERENCE_SERVICES, service("chat", status=state(phase, ready=True)))
        assert readiness() == {("team", "chat", "normal"): 1}, "it serves while a rollout lasts"
    followed.put(INFERENCE_SERVICES, service("chat", status=state("Failed", ready=False)))
    assert readiness() == {("team", "chat", "normal"): 0}
    followed.put(INFERENCE_SERVICES, service("chat", status={"phase": "Suspended"}))
    assert readiness() == {}


def test_report_of_a_node_agent_has_its_time(followed: Followed) -> None:
    fitness = {"metadata": {"name": "gpu-1", "uid": "u"}, "status": {"observedAt": "1970-01-01T00:01:00Z"}}
    followed.put(NODE_FITNESSES, fitness)
    assert followed.series("pomona_node_observed_timestamp_seconds") == {("gpu-1",): 60}
    followed.store.remove(NODE_FITNESSES, None, "gpu-1")
    assert followed.series("pomona_node_observed_timestamp_seconds") == {}


@pytest.mark.parametrize("observed_at", ["1970-01-01T00:00:00Z", "2030-01-01T00:00:00Z", "no time"])
def test_age_of_reports_does_not_follow_the_clock_of_a_node(followed: Followed, observed_at: str) -> None:
    metadata, name = {"name": "gpu-1", "uid": "u"}, "pomona_node_observed_timestamp_seconds"
    followed.put(NODE_FITNESSES, {"metadata": metadata, "status": {"observedAt": observed_at}})
    assert all(value <= followed.now for value in followed.series(name).values())
    followed.now += 60
    followed.put(NODE_FITNESSES, {"metadata": metadata, "status": {"observedAt": f"{observed_at}!"}})
    assert followed.series(name) == {("gpu-1",): 10_060}
    followed.now += 60
    followed.put(
        NODE_FITNESSES, {"metadata": {**metadata, "labels": {"a": "b"}}, "status": {"observedAt": f"{observed_at}!"}}
    )
    assert followed.series(name) == {("gpu-1",): 10_060}, "an edit is no report"


def test_tokens_of_services_that_share_a_model_are_added_up(followed: Followed) -> None:
    source = TokenSource("team", "qwen", "vllm", "gpu-1")
    followed.metrics.set_tokens(CHAT, {source: 5})
    followed.metrics.set_tokens(ObjectKey("team", "other"), {source: 7, source._replace(node="gpu-2"): 1})
    name = "pomona_tokens_per_second"
    assert followed.series(name) == {("team", "qwen", "vllm", "gpu-1"): 12, ("team", "qwen", "vllm", "gpu-2"): 1}
    followed.metrics.set_tokens(CHAT, {})
    assert followed.series(name)["team", "qwen", "vllm", "gpu-1"] == 7
    followed.metrics.clear_tokens()
    assert followed.series(name) == {}


def test_degraded_service_has_a_series_for_each_condition_that_is_true(followed: Followed) -> None:
    conditions = [{"type": "SpeedDegraded", "status": "True"}, {"type": "FitDegraded", "status": "False"}]
    followed.put(INFERENCE_SERVICES, service("chat", status={"conditions": conditions}))
    assert followed.series("pomona_service_degraded") == {("team", "chat", "SpeedDegraded"): 1}
    followed.put(INFERENCE_SERVICES, service("chat", status={"conditions": conditions[1:]}))
    assert followed.series("pomona_service_degraded") == {}


def test_prefix_is_that_of_the_names_that_another_project_has() -> None:
    followed = Followed("flexinfer")
    names = {family.name for family in followed.registry.collect()}
    assert names == {
        "flexinfer_tokens_per_second",
        "flexinfer_model_load_seconds",
        "pomona_service_ready",
        "pomona_service_degraded",
        "pomona_node_observed_timestamp_seconds",
    }
