"""Models that services use are measured on devices that say what they are and that nobody has measured."""

from typing import Any

import pytest

from controller.benchmarks.benchmark_plan import WantedBenchmark
from controller.benchmarks.wanted_benchmarks import open_scope, prepare_benchmarks
from controller.placement.units import Cell
from controller.pod_settings import PodSettings
from controller.services.endpoints import Endpoint
from fitness.performance import MeasuredPerformance
from fitness.performance_store import PerformanceTable, RecordKey, build_config_map, put_record
from fitness.serving_devices import describe_devices
from kube.client import Obj
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES, MODELS, NODES, PODS, ObjectKey, Resource
from tests.support.api_objects import model, service, store

SETTINGS = PodSettings("pomona:test")
GIB = 2**30


def node(name: str, product: str = "NVIDIA-L4", **more: str) -> tuple[Resource, Obj]:
    labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": "23034"} | more
    metadata = {"name": name, "uid": name, "resourceVersion": "1", "labels": labels}
    return NODES, {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": "8", "memory": "64Gi"}}}


def cell(of: tuple[Resource, Obj], free: int = 8, **more: Any) -> Cell:
    metadata = of[1]["metadata"]
    return Cell(
        name=metadata["name"],
        kind="node",
        pool="nvidia",
        total={"nvidia.com/gpu": 8},
        free={"nvidia.com/gpu": free, "memory": 64 * GIB},
        node={"metadata": {"labels": metadata["labels"]}, "spec": {}},
        **more,
    )


def list_wanted(
    *nodes: tuple[Resource, Obj],
    free: int = 8,
    table: PerformanceTable | None = None,
    of: Obj | None = None,
    closed: str = "",
    **spec: Any,
) -> list[WantedBenchmark]:
    chat = service(**({"hardware": {"accelerator": "nvidia"}} | spec))
    stored = store(*nodes, (MODELS, of or model()), (INFERENCE_SERVICES, chat))
    cells = [cell(node, free, closed=closed) for node in nodes]
    scope = open_scope(stored, SETTINGS, table or PerformanceTable(), cells)
    return [benchmark.wanted for benchmark in prepare_benchmarks(scope, chat)]


def classes(found: list[WantedBenchmark]) -> list[tuple[str, tuple[str, ...]]]:
    return [(benchmark.key.device_class, benchmark.nodes) for benchmark in found]


def test_each_class_that_a_replica_could_be_on_is_wanted() -> None:
    nodes = [node("n1"), node("n2", "NVIDIA-H100"), node("n3")]
    assert classes(list_wanted(*nodes)) == [("nvidia-h100x1", ("n2",)), ("nvidia-l4x1", ("n1", "n3"))]
    two = list_wanted(*nodes, hardware={"accelerator": "nvidia", "count": 2})
    assert [benchmark.key.device_class for benchmark in two] == ["nvidia-h100x2", "nvidia-l4x2"]
    (auto,) = list_wanted(nodes[0], hardware={"accelerator": "auto"})
    assert (auto.accelerator, auto.service) == ("nvidia", ObjectKey("team", "chat"))


def test_class_without_an_idle_device_is_wanted_and_has_no_node() -> None:
    assert classes(list_wanted(node("n1"), free=0)) == [("nvidia-l4x1", ())]
    assert classes(list_wanted(node("n1"), closed="Cordoned")) == [("nvidia-l4x1", ())]


def test_class_that_a_replica_may_not_use_is_not_wanted() -> None:
    there = [node("n1", team="a"), node("n2", "NVIDIA-H100")]
    assert classes(list_wanted(*there, nodeSelector={"team": "a"})) == [("nvidia-l4x1", ("n1",))]
    assert list_wanted(node("n1", **{"nvidia.com/gpu.product": ""})) == []


def test_what_is_measured_is_not_wanted() -> None:
    (wanted,) = list_wanted(node("n1"))
    table = PerformanceTable()
    record = MeasuredPerformance(tokens_per_second=1)
    for namespace, is_known in (("other", False), ("team", True), ("", True)):
        data = put_record({}, RecordKey("nvidia-l4x1", namespace), record).data
        table.update(build_config_map(wanted.key.model_hash, data))
        assert (list_wanted(node("n1"), table=table) == []) == is_known


def test_service_that_is_not_its_model_alone_is_left_out() -> None:
    for spec in ({"suspend": True}, {"mode": "embeddings"}, {"adapters": [{"modelRef": "lora"}]}):
        assert list_wanted(node("n1"), **spec) == []
    assert list_wanted(node("n1"), hardware={"accelerator": "cpu"}) == []
    assert list_wanted(node("n1"), of=model(cached=False)) == []


def test_arguments_of_a_tenant_are_not_measured() -> None:
    chat = service(hardware={"accelerator": "nvidia"}, extraArgs=["-t", "1"], image="team/llama:1")
    n1 = node("n1")
    stored = store(n1, (MODELS, model()), (INFERENCE_SERVICES, chat))
    (benchmark,) = prepare_benchmarks(open_scope(stored, SETTINGS, PerformanceTable(), [cell(n1)]), chat)
    assert (benchmark.service.spec.extra_args, benchmark.service.spec.image) == ([], None)
    assert benchmark.describe_engine([]).image.startswith("ghcr.io/ggml-org/llama.cpp")


def test_estimate_that_no_hardware_reaches_is_unknown() -> None:
    n1, chat = node("n1"), service(hardware={"accelerator": "nvidia"})
    l4 = describe_devices("nvidia", "NVIDIA-L4", memory_bytes=24 * GIB)
    forged = model()
    forged["status"]["layout"] = forged["status"]["layout"] | {"tensorBytes": 1, "layers": []}
    for stated, is_known in ((model(), True), (forged, False)):
        stored = store(n1, (MODELS, stated), (INFERENCE_SERVICES, chat))
        (benchmark,) = prepare_benchmarks(open_scope(stored, SETTINGS, PerformanceTable(), [cell(n1)]), chat)
        assert (benchmark.describe_engine([l4]).estimated_tokens_per_second is not None) == is_known
        assert benchmark.describe_engine([]).estimated_tokens_per_second is None


@pytest.mark.parametrize(
    ("status", "is_measured"),
    [({"phase": "Ready"}, True), ({"phase": "Ready", "requestsPerMinute": 1}, False), ({"phase": "Degraded"}, False)],
)
def test_replica_is_measured_itself_if_its_service_is_ready_and_idle(status: Obj, *, is_measured: bool) -> None:
    n1, chat = node("n1"), service(hardware={"accelerator": "nvidia"}, status=status)
    named = {"namespace": "team", "resourceVersion": "1"}
    of_pod = named | {"name": "chat-1", "uid": "p", "labels": {"inference.pomona.dev/service": "chat"}}
    serving = {"metadata": of_pod, "spec": {"nodeName": "n1"}, "status": {"podIPs": [{"ip": "10.0.0.1"}]}}
    endpoints = [{"addresses": [address], "nodeName": "n1"} for address in ("10.0.0.1", "10.0.0.66")]
    of_slice = named | {"name": "chat-x", "uid": "s", "labels": {"kubernetes.io/service-name": "chat"}}
    ports = [{"name": "http", "port": 8080}]
    offered = {"metadata": of_slice, "endpoints": endpoints, "ports": ports}
    stored = store(n1, (MODELS, model()), (INFERENCE_SERVICES, chat), (PODS, serving), (ENDPOINT_SLICES, offered))
    scope = open_scope(stored, SETTINGS, PerformanceTable(), [cell(n1, free=0)])
    (found,) = [benchmark.wanted for benchmark in prepare_benchmarks(scope, chat)]
    expected = Endpoint("10.0.0.1", 8080, node="n1") if is_measured else None
    assert (found.replica, found.nodes, found.is_ready) == (expected, (), status["phase"] == "Ready")
