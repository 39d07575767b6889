"""Manifests in a copy of the cluster: the replicas that services would get, and what becomes of the present ones."""

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from controller.placement.cluster_copy import ClusterCopy, QueueSettings
from controller.placement.queued_service import read_template_mark
from controller.placement.units import Unit
from controller.pod_settings import PodSettings
from controller.reconcile.plan import Snapshot
from controller.services.class_speeds import SpeedAssessor
from controller.services.planned_models import is_header_missing
from controller.services.planned_services import PlannedService, plan_services
from controller.services.service_view import build_view
from crds.inferenceservice import InferenceService
from crds.meta import API_VERSION, ENQUEUED_AT, POD_TEMPLATE, without_defaults
from crds.model import Model, ModelFacts
from crds.placement import MOST_CLASSES
from fitness.performance import MeasuredPerformance, hash_model
from fitness.performance_store import build_config_map, encode_record
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, MODELS, NODES, PODS, ObjectKey
from tests.support.api_objects import GIB, NAMESPACE, NOW, host, library_model, model, process
from tests.support.queue_objects import queue_pod, queued_service
from tests.support.service_decisions import SETTINGS, chat_deployment, manage

KEY = ObjectKey(NAMESPACE, "chat")
DEVICE_BYTES = 1008730112
"""Memory of a device that a replica of the Model takes."""


def make_copy(*objects: tuple[Any, Obj], settings: QueueSettings = QueueSettings(SETTINGS)) -> ClusterCopy:  # noqa: B008
    made = ClusterCopy(settings)
    for resource, obj in ((MODELS, library_model()), (NODES, make_node()), *objects):
        made.store.put(resource, obj)
    return made


def make_node(name: str = "a", devices: int = 8, **labels: str) -> Obj:
    allocatable = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(devices)}
    conditions = [{"type": "Ready", "status": "True"}]
    status = {"allocatable": allocatable, "conditions": conditions}
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", "labels": labels}
    return {"metadata": metadata, "spec": {}, "status": status}


def manifest(kind: str = "InferenceService", name: str = "chat", **spec: Any) -> Obj:
    chosen = {"modelRef": "tiny", "hardware": {"accelerator": "nvidia", "count": 2}} if kind != "Model" else {}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": {**chosen, **spec}}


def plan_one(copy: ClusterCopy, *manifests: Obj, now: datetime = NOW) -> PlannedService:
    (planned,) = plan_services(copy, manifests, now)
    return planned


UNKNOWN = "contextLength 4096: that of the model, or its memory, is not known"
UNKNOWN_MEMORY = f"{UNKNOWN}; parallel 1: its memory is not known"
"""The note on the serving options of a model of Ollama's library, whose header nobody reads."""


def list_chat(copy: ClusterCopy) -> list[Unit]:
    return sorted((unit for unit in copy.list_units(NOW) if unit.service == KEY), key=lambda unit: unit.order)


def test_new_service_gets_pods_that_wait() -> None:
    copy = make_copy()
    assert plan_one(copy, manifest(replicas=3, priority="high")) == PlannedService(KEY, notes=(UNKNOWN_MEMORY,))
    units = list_chat(copy)
    assert [(unit.state, unit.priority, unit.pools) for unit in units] == [("waiting", "high", ("nvidia",))] * 3
    assert {unit.parts[0]["nvidia.com/gpu"] for unit in units} == {2}


def test_new_service_on_hosts_gets_processes_that_wait() -> None:
    copy = make_copy((MODELS, model()), (METAL_HOSTS, host()))
    copy.store.remove(MODELS, NAMESPACE, "tiny")
    copy.store.put(MODELS, model())
    planned = plan_one(copy, manifest(replicas=2, hardware={"accelerator": "metal"}))
    assert planned == PlannedService(KEY, notes=(f"{UNKNOWN}; parallel 4: so many whole contexts fit",))
    units = list_chat(copy)
    assert [(unit.key.kind, unit.state, unit.pools) for unit in units] == [("process", "waiting", ("metal",))] * 2
    assert all(unit.parts[0]["memory"] > GIB for unit in units)


def test_model_that_is_not_inspected_leaves_the_memory_unknown() -> None:
    copy = make_copy()
    new = manifest("Model", "large", source="http://models.example/large.gguf")
    planned = plan_one(copy, manifest(modelRef="large"), new)
    assert planned.problem is not None
    assert planned.problem.reason == "ModelNotReady"
    assert "memory of its replicas is unknown until then" in planned.problem.message
    assert list_chat(copy) == []


def test_weights_that_are_not_fetched_yet_are_assumed() -> None:
    copy = ClusterCopy()
    copy.store.put(NODES, make_node())
    copy.store.put(MODELS, model(cached=False))
    planned = plan_one(copy, manifest())
    assert planned.problem is None
    assert planned.notes == ("after the weights of Model tiny have been fetched", UNKNOWN)
    assert len(list_chat(copy)) == 1


def test_pods_that_kueue_admits_are_named() -> None:
    planned = plan_one(make_copy(), manifest(scheduling={"mode": "Kueue", "queueName": "gpus"}))
    assert planned.notes == (UNKNOWN_MEMORY, "Kueue admits its pods: the queue gives them nothing")


def test_pods_that_the_scheduler_places_are_named() -> None:
    copy = make_copy(settings=QueueSettings(PodSettings("pomona:test", scheduling_mode="Native")))
    planned = plan_one(copy, manifest())
    assert planned.problem is None
    assert planned.notes == (UNKNOWN_MEMORY, "Kubernetes' scheduler places its pods: the queue gives them nothing")


def test_service_that_may_use_several_accelerators_is_split_by_their_room() -> None:
    copy = ClusterCopy(QueueSettings(SETTINGS))
    for resource, obj in (
        (MODELS, library_model()),
        (NODES, make_node(devices=1)),
        (METAL_HOSTS, host(free_bytes=2 * GIB, runtimes=["ollama"])),
    ):
        copy.store.put(resource, obj)
    planned = plan_one(copy, manifest(replicas=4, hardware={}, scheduling={"pools": ["metal", "nvidia", "amd"]}))
    assert planned.problem is None
    assert planned.notes == ("3 on metal, 1 on nvidia; amd: no node has amd.com/gpu", UNKNOWN_MEMORY)
    assert sorted(unit.pools for unit in list_chat(copy)) == [("metal",)] * 3 + [("nvidia",)]


def make_served(settings: QueueSettings) -> ClusterCopy:
    """Return a copy with the service chat, of whose two pods one runs and one waits."""
    spec: Obj = {"hardware": {"accelerator": "nvidia", "count": 2}, "replicas": 2}
    service = queued_service("chat", **spec)
    service["status"] = {"deviceMemoryBytes": DEVICE_BYTES, "observedGeneration": service["metadata"]["generation"]}
    copy = make_copy((INFERENCE_SERVICES, service), settings=settings)
    objects = (INFERENCE_SERVICES, service), (MODELS, library_model())
    deployment = chat_deployment(*objects, replicas=2)
    copy.store.put(DEPLOYMENTS, deployment)
    mark = {POD_TEMPLATE: read_template_mark(deployment["spec"]["template"])}
    earlier = NOW - timedelta(hours=2)
    copy.store.put(PODS, queue_pod("chat-aaa-1", gated=False, node="a", devices=2, created=earlier, annotations=mark))
    copy.store.put(PODS, queue_pod("chat-aaa-2", devices=2, created=earlier + timedelta(hours=1), annotations=mark))
    return copy


@pytest.fixture
def served() -> ClusterCopy:
    return make_served(QueueSettings(SETTINGS))


def test_pods_stay_although_the_image_of_the_controller_is_not_known() -> None:
    copy = make_served(QueueSettings())
    before = list_chat(copy)
    plan_one(copy, manifest(replicas=2))
    assert list_chat(copy) == before


def test_same_manifest_changes_nothing(served: ClusterCopy) -> None:
    before = list_chat(served)
    assert plan_one(served, manifest(replicas=2)) == PlannedService(KEY, notes=(UNKNOWN_MEMORY,))
    assert list_chat(served) == before


def test_more_replicas_are_added_to_those_that_are_there(served: ClusterCopy) -> None:
    before = {unit.uid for unit in list_chat(served)}
    plan_one(served, manifest(replicas=4))
    after = list_chat(served)
    assert len(after) == 4
    assert before < {unit.uid for unit in after}
    assert not any(unit.replaces for unit in after)


def test_fewer_replicas_let_those_go_that_wait(served: ClusterCopy) -> None:
    plan_one(served, manifest(replicas=1))
    assert [unit.key.name for unit in list_chat(served)] == ["chat-aaa-1"]


def test_suspended_service_keeps_no_replica(served: ClusterCopy) -> None:
    assert plan_one(served, manifest(replicas=2, suspend=True)).problem is None
    assert list_chat(served) == []


def test_another_spec_replaces_all_pods_and_keeps_their_places(served: ClusterCopy) -> None:
    before = list_chat(served)
    plan_one(served, manifest(replicas=2, hardware={"accelerator": "nvidia", "count": 4}))
    after = list_chat(served)
    running = [unit for unit in after if unit.state == "running"]
    waiting = [unit for unit in after if unit.state == "waiting"]
    assert [unit.key.name for unit in running] == ["chat-aaa-1"]
    assert [unit.parts[0]["nvidia.com/gpu"] for unit in waiting] == [4, 4]
    assert {uid for unit in waiting for uid in unit.replaces} == {running[0].uid}
    assert {unit.enqueued_at for unit in waiting} <= {unit.enqueued_at for unit in before}


def test_another_priority_replaces_no_pod(served: ClusterCopy) -> None:
    plan_one(served, manifest(replicas=2, priority="critical"))
    assert [(unit.key.name, unit.priority) for unit in list_chat(served)] == [
        ("chat-aaa-1", "critical"),
        ("chat-aaa-2", "critical"),
    ]


def test_process_that_a_change_deletes_ends() -> None:
    copy = ClusterCopy()
    metal: Obj = {"hardware": {"accelerator": "metal"}}
    for resource, obj in (
        (MODELS, model()),
        (METAL_HOSTS, host()),
        (INFERENCE_SERVICES, queued_service("chat", **metal)),
        (METAL_PROCESSES, process("chat-old-0", host="studio-1", phase="Ready")),
    ):
        copy.store.put(resource, obj)
    plan_one(copy, manifest(**metal, suspend=True))
    assert [unit.state for unit in list_chat(copy)] == ["ending"]


def test_place_of_a_pod_is_written_as_the_queue_writes_it(served: ClusterCopy) -> None:
    plan_one(served, manifest(replicas=2, hardware={"accelerator": "nvidia", "count": 4}))
    places = [
        pod["metadata"].get("annotations", {}).get(ENQUEUED_AT)
        for pod in served.store.list(PODS)
        if pod["metadata"]["name"].startswith("chat-planned")
    ]
    assert sum(place is not None for place in places) == 1


def test_running_unit_has_the_rules_of_its_pod() -> None:
    copy = make_copy((INFERENCE_SERVICES, queued_service("chat")))
    copy.store.put(
        DEPLOYMENTS,
        manage(
            {
                "metadata": {
                    "name": "chat",
                    "namespace": NAMESPACE,
                    "ownerReferences": [
                        {"kind": "InferenceService", "name": "chat", "uid": "uid-chat", "controller": True}
                    ],
                },
                "spec": {"replicas": 1, "template": {"metadata": {}, "spec": {"containers": []}}},
            }
        ),
    )
    pod = queue_pod("chat-aaa-1", gated=False, node="a")
    pinned = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["x"]}]}
    required = {"nodeSelectorTerms": [{**zone, **pinned}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    copy.store.put(PODS, {**pod, "spec": {**pod["spec"], "affinity": affinity}})
    (unit,) = list_chat(copy)
    copy.store.put(NODES, make_node("b", zone="x"))
    a, b = copy.list_cells()
    assert unit.requirement.refuse(a) == "NodeRules"
    assert unit.requirement.refuse(b) == "", "the pin to the first node is none of its rules"
    assert required == {"nodeSelectorTerms": [{**zone, **pinned}]}, "the pod itself stays as it was"


L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"}
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}


def list_speeds(copy: ClusterCopy, name: str = "chat") -> dict[str, Obj]:
    stored = copy.store.get(INFERENCE_SERVICES, name, NAMESPACE)
    assert stored is not None
    return {speed["deviceClass"]: speed for speed in stored["status"]["speeds"]}


def make_classes() -> ClusterCopy:
    copy = ClusterCopy(QueueSettings(SETTINGS))
    nodes = [(NODES, make_node(name, 8, **labels)) for name, labels in (("slow", L4), ("fast", H100))]
    for resource, obj in ((MODELS, model()), *nodes):
        copy.store.put(resource, obj)
    return copy


def test_new_service_has_the_speeds_that_the_controller_would_report() -> None:
    copy = make_classes()
    assert plan_one(copy, manifest()).problem is None
    stored = copy.store.get(INFERENCE_SERVICES, "chat", NAMESPACE)
    assert stored is not None
    view = build_view(Snapshot(copy.store, NOW), KEY, msgspec.convert(stored, InferenceService), SETTINGS)
    assessor = SpeedAssessor(copy.registry.list_classes, copy.measured, SETTINGS.vendors)
    expected = assessor.assess(KEY, view.service, view.accelerator, view.served)
    assert [without_defaults(speed) for speed in expected] == list(list_speeds(copy).values())
    assert list(list_speeds(copy)) == ["nvidia-h100-80gb-hbm3x2", "nvidia-l4x2"]
    (unit,) = list_chat(copy)
    assert list(unit.speeds.tokens_per_second) == ["nvidia-h100-80gb-hbm3x1", "nvidia-l4x1"]


def test_new_service_has_as_many_classes_as_its_status_may_have() -> None:
    copy = make_classes()
    for number in range(MOST_CLASSES):
        copy.store.put(
            NODES, make_node(f"more-{number}", 8, **{**L4, "nvidia.com/gpu.product": f"NVIDIA-More-{number}"})
        )
    plan_one(copy, manifest())
    assert len(list_speeds(copy)) == MOST_CLASSES


def test_new_service_that_demands_a_speed_is_refused_by_slow_classes() -> None:
    copy = make_classes()
    slow, fast = (float(list_speeds_of_class(copy, name)["tokensPerSecond"]) for name in ("l4x2", "hbm3x2"))
    assert slow < fast
    plan_one(copy, manifest(placement={"minTokensPerSecond": int(slow) + 1}))
    (unit,) = list_chat(copy)
    assert unit.speeds.refusals == {"nvidia-l4x1": "TooSlow"}


def list_speeds_of_class(copy: ClusterCopy, ending: str) -> Obj:
    plan_one(copy, manifest(name="other"))
    return next(speed for name, speed in list_speeds(copy, "other").items() if name.endswith(ending))


def test_measurement_decides_about_a_new_service() -> None:
    copy = make_classes()
    served = manifest()
    stored = msgspec.convert({**served, "metadata": {**served["metadata"], "generation": 1}}, InferenceService)
    tiny = msgspec.convert(copy.store.get(MODELS, "tiny", NAMESPACE), Model)
    record = encode_record(MeasuredPerformance(tokens_per_second=90_000.0))
    copy.measured.update(build_config_map(hash_model(tiny, "llama.cpp", stored.spec), {"nvidia-l4x2": record}))
    plan_one(copy, served)
    assert next(iter(list_speeds(copy).items())) == (
        "nvidia-l4x2",
        {"deviceClass": "nvidia-l4x2", "tokensPerSecond": "90000", "source": "Measured", "fit": "perfect"},
    )


def test_service_on_a_host_and_one_of_several_accelerators_have_speeds() -> None:
    copy = make_classes()
    mac = host(chip="Apple M4 Max", gpuCores=40, memoryBytes=128 * GIB, budgetBytes=96 * GIB)
    copy.store.put(METAL_HOSTS, mac)
    plan_one(copy, manifest(hardware={"accelerator": "metal"}))
    assert list(list_speeds(copy)) == ["apple-m4-max-40c-128gb"]
    plan_one(copy, manifest(name="any", hardware={"accelerator": "auto"}))
    assert {"apple-m4-max-40c-128gb", "nvidia-l4x1"} <= list_speeds(copy, "any").keys()


def test_model_of_a_known_source_is_planned_with_its_service() -> None:
    copy = make_classes()
    stored = copy.store.get(MODELS, "tiny", NAMESPACE)
    assert stored is not None
    new = manifest("Model", "again", source=stored["spec"]["source"])
    planned = plan_one(copy, manifest(modelRef="again"), new)
    assert planned.problem is None
    assert planned.notes == (
        f"Model again is like {NAMESPACE}/tiny, which has the same source",
        "after the weights of Model again have been fetched",
        f"{UNKNOWN}; parallel 4: so many whole contexts fit",
    )
    assert len(list_chat(copy)) == 1
    assert list(list_speeds(copy)) == ["nvidia-h100-80gb-hbm3x2", "nvidia-l4x2"]


def test_model_whose_header_was_read_is_planned_with_its_service() -> None:
    copy = make_classes()
    new = manifest("Model", "large", source="http://models.example/large.gguf")
    assert is_header_missing(copy, new)
    layout = {**model()["status"]["layout"], "tensorBytes": 30 * GIB}
    facts = {"file": "large.gguf", "sizeBytes": 30 * GIB, "format": "gguf", "layout": layout}
    header = msgspec.convert(facts, ModelFacts)
    (planned,) = plan_services(copy, [manifest(modelRef="large"), new], NOW, {ObjectKey(NAMESPACE, "large"): header})
    assert planned.problem is None
    assert planned.notes[0] == "Model large is as its header says"
    stored = copy.store.get(INFERENCE_SERVICES, "chat", NAMESPACE)
    assert stored is not None
    assert stored["status"]["deviceMemoryBytes"] > 15 * GIB
    assert len(list_chat(copy)) == 1


def test_model_of_stated_memory_is_planned_with_its_service() -> None:
    copy = make_classes()
    new = manifest("Model", "large", source="http://models.example/large.gguf", memoryBytes=8 * GIB)
    assert not is_header_missing(copy, new)
    planned = plan_one(copy, manifest(modelRef="large", hardware={"accelerator": "nvidia", "count": 1}), new)
    assert planned.problem is None
    assert planned.notes[0] == "Model large takes the memory that its spec.memoryBytes states"


def test_model_with_copies_on_nodes_says_that_they_are_not_known() -> None:
    new = manifest("Model", "new", source="http://models.example/a.gguf", memoryBytes=GIB, cache={"scope": "node"})
    planned = plan_one(make_classes(), manifest(modelRef="new"), new)
    assert planned.problem is not None
    assert "apply the Model, and plan again once it has some" in planned.problem.message


def test_model_of_a_library_and_one_of_an_invalid_source_need_no_header() -> None:
    copy = make_classes()
    new = manifest("Model", "pulled", source="ollama://tiny:1b", memoryBytes=GIB)
    assert plan_one(copy, manifest(modelRef="pulled"), new).problem is None
    wrong = manifest("Model", "wrong", source="http://models.example/")
    planned = plan_one(copy, manifest(name="second", modelRef="wrong"), wrong)
    assert planned.problem is not None
    assert planned.problem.reason == "ModelFailed"
    assert "edit spec.source" in planned.problem.message


def test_model_whose_source_stays_is_as_it_was_inspected() -> None:
    copy = make_classes()
    stored = copy.store.get(MODELS, "tiny", NAMESPACE)
    assert stored is not None
    edited = manifest("Model", "tiny", source=stored["spec"]["source"], thinking=True)
    planned = plan_one(copy, manifest(), edited)
    assert planned.problem is None
    assert list_speeds(copy)


def test_edited_source_is_not_taken_for_the_old_one() -> None:
    copy = make_classes()
    planned = plan_one(copy, manifest(), manifest("Model", "tiny", source="http://models.example/other.gguf"))
    assert planned.problem is not None
    assert planned.problem.reason == "ModelNotReady"
