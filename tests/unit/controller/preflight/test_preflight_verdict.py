"""Preflight refuses only a service that certainly fits nowhere, and keeps nobody from editing one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert
from msgspec.structs import replace

from controller.models.served import Served
from controller.placement.device_classes import DeviceClasses
from controller.preflight.preflight_verdict import (
    ALLOWED,
    FitFacts,
    PreflightAnswer,
    find_fit_facts,
    judge_fit,
    judge_service,
)
from controller.reconcile.plan import Snapshot
from controller.services.class_speeds import SpeedAssessor, assess_classes
from controller.services.preconditions import DEVICE_TOO_SMALL, ServiceProblem
from controller.services.speed_report import describe_fit
from crds.inferenceservice import InferenceService
from crds.model import Model
from crds.placement import MOST_CLASSES, ClassSpeed
from devices.vendors import VENDORS
from fitness.performance_store import PerformanceTable
from fitness.serving_devices import ServingDevices, describe_devices
from kube.client import Obj
from kube.resources import MODELS, NODES, Resource
from tests.support.api_objects import GIB, NOW, as_service, model, service, store
from tests.support.service_decisions import SETTINGS

FITTING = ClassSpeed(device_class="nvidia-h100x1", tokens_per_second="120", fit="perfect")
SMALL = ClassSpeed(device_class="nvidia-l4x1", fit="too_tight", shortfall="needs 40 GiB, 22 GiB free on it")
SLOW = ClassSpeed(device_class="nvidia-t4x1", tokens_per_second="9.0", source="Measured", fit="good", refusal="TooSlow")
MAYBE_SLOW = replace(SLOW, source="Estimated", low="6.0", high="14.0")
TIGHT = ClassSpeed(device_class="nvidia-t4x1", fit="marginal", refusal="TooTight")
UNKNOWN_SPEED = ClassSpeed(device_class="nvidia-newx1", fit="good", refusal="SpeedUnknown")
UNKNOWN = ClassSpeed(device_class="nvidia-newx1")
UNKNOWN_FIT = ClassSpeed(device_class="nvidia-newx1", refusal="TooTight")
TOO_SMALL = ServiceProblem(DEVICE_TOO_SMALL, "a replica needs 40 GiB on each of 1 devices", "Pending")
NO_MODEL = ServiceProblem("ModelNotFound", "Model tiny does not exist", "Pending")
INVALID = ServiceProblem("InvalidSpec", "no such engine", "Failed")
UNFIT = FitFacts((SMALL,))
L4 = describe_devices("nvidia", "NVIDIA-L4", memory_bytes=23034 * 2**20)
NEW = ServingDevices("nvidia", "nvidia-newx1", "New")
NVIDIA = {"accelerator": "nvidia"}


def chat(**spec: Any) -> InferenceService:
    return as_service(service(**spec))


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        (FitFacts((FITTING, SMALL)), "fits", ""),
        (FitFacts((SMALL,)), "unfit", "nvidia-l4x1: needs 40 GiB, 22 GiB free on it"),
        (FitFacts((SMALL, SLOW)), "unfit", "fewer than spec.placement.minTokensPerSecond"),
        (
            FitFacts((MAYBE_SLOW,), least_tokens_per_second=10),
            "unknown",
            "fewer than spec.placement.minTokensPerSecond",
        ),
        (FitFacts((MAYBE_SLOW,), least_tokens_per_second=15), "unfit", "fewer than spec.placement.minTokensPerSecond"),
        (FitFacts((TIGHT,)), "unfit", "less than spec.placement.minFit"),
        (FitFacts((SMALL, UNKNOWN)), "unknown", "nvidia-newx1"),
        (FitFacts((SMALL, UNKNOWN_SPEED)), "unknown", "its speed is unknown"),
        (FitFacts((SMALL, UNKNOWN_FIT)), "unknown", "the fit is unknown"),
        (FitFacts(), "unknown", "no node or host says what hardware it has"),
        (FitFacts((), [TOO_SMALL]), "unfit", "a replica needs 40 GiB"),
        (FitFacts((FITTING,), [TOO_SMALL]), "fits", ""),
        (FitFacts((SMALL,), [NO_MODEL]), "unknown", "Model tiny does not exist"),
        (FitFacts((), [NO_MODEL, TOO_SMALL]), "unknown", "Model tiny does not exist"),
        (FitFacts((), [INVALID]), "unknown", "no such engine"),
        (FitFacts((SMALL,), [INVALID]), "unfit", "needs 40 GiB"),
        (FitFacts((SMALL,), expects_nodes=True), "unknown", "needs 40 GiB"),
        (FitFacts((), [TOO_SMALL], expects_nodes=True), "unfit", "a replica needs 40 GiB"),
        (FitFacts((SMALL,), has_unknown_devices=True), "unknown", "do not say what devices they have"),
        (FitFacts((FITTING,), has_unknown_devices=True), "fits", ""),
        (FitFacts((SMALL,) * MOST_CLASSES), "unknown", "needs 40 GiB"),
    ],
)
def test_only_what_certainly_fits_nowhere_is_unfit(facts: FitFacts, state: str, words: str) -> None:
    verdict = judge_fit(facts)
    assert verdict.state == state
    assert words in verdict.message


@given(st.lists(st.sampled_from([FITTING, SMALL, SLOW, TIGHT, UNKNOWN_SPEED, UNKNOWN, UNKNOWN_FIT]), min_size=1))
def test_verdict_never_contradicts_the_condition(classes: list[ClassSpeed]) -> None:
    condition, verdict = describe_fit(classes, 1), judge_fit(FitFacts(tuple(classes)))
    assert (verdict.state == "fits") == (condition["status"] == "True")
    if verdict.state == "unfit":
        assert condition["status"] == "False"


def test_refusal_names_service_model_need_device_and_way_out() -> None:
    answer = judge_service(chat(), None, lambda _service: UNFIT)
    for words in ("team/chat", "Model tiny", "needs 40 GiB", "22 GiB", "nvidia-l4x1", "spec.suspend"):
        assert words in answer.refusal
    assert answer.warning == ""


def test_way_out_stays_behind_a_long_reason() -> None:
    long = ClassSpeed(device_class="nvidia-l4x1", fit="too_tight", shortfall="x" * 512)
    refusal = judge_service(chat(), None, lambda _service: FitFacts((long,) * 9)).refusal
    assert len(refusal) < 2000
    assert refusal.endswith("until the cluster has such devices")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"replicas": 1}, {"replicas": 3}),
        ({"replicas": 0}, {"replicas": 3}),
        ({"suspend": True}, {"suspend": False}),
        ({}, {"suspend": True}),
        ({}, {"priority": "high"}),
        ({}, {"evictionProtection": True}),
        ({}, {"replicas": 0, "contextLength": 9000}),
        ({"contextLength": 8000}, {"contextLength": 4000}),
    ],
)
def test_edit_that_chooses_nothing_anew_or_repairs_is_never_refused(before: Obj, after: Obj) -> None:
    assert judge_service(chat(**after), chat(**before), lambda _service: UNFIT).refusal == ""


def test_edit_of_a_service_that_fits_into_one_that_does_not_is_refused() -> None:
    def find(judged: InferenceService) -> FitFacts:
        return UNFIT if judged.spec.context_tokens == 9000 else FitFacts((FITTING,))

    assert judge_service(chat(contextLength=9000), chat(), find).refusal
    assert judge_service(chat(), chat(contextLength=9000), find) == ALLOWED


def test_service_that_is_suspended_deleted_or_without_replicas_is_not_judged() -> None:
    def find(_service: InferenceService) -> FitFacts:
        raise AssertionError("it is not judged")

    deleted = service()
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for inference_service in (chat(suspend=True), chat(replicas=0), as_service(deleted)):
        assert judge_service(inference_service, None, find) == ALLOWED


def test_controller_that_has_not_read_the_cluster_warns() -> None:
    answer = judge_service(chat(), None, lambda _service: None)
    assert answer.refusal == ""
    assert "still reading the cluster" in answer.warning


def gpu_node(product: str, mib: int | None) -> tuple[Resource, Obj]:
    labels = {"nvidia.com/gpu.product": product} | ({"nvidia.com/gpu.memory": str(mib)} if mib else {})
    amounts = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1"}
    metadata = {"name": product.lower(), "uid": product, "resourceVersion": "1", "labels": labels}
    return NODES, {"metadata": metadata, "spec": {}, "status": {"allocatable": amounts, "capacity": amounts}}


def judge(*objects: tuple[Resource, Obj], classes: tuple[ServingDevices, ...] = (L4,), **spec: Any) -> PreflightAnswer:
    device_classes = DeviceClasses()
    for number, devices in enumerate(classes):
        device_classes.put(f"node/{number}", devices.vendor, devices)
    assessor = SpeedAssessor(device_classes.list_classes, PerformanceTable(), VENDORS)
    snapshot = Snapshot(store(*objects), NOW)
    wanted = chat(**({"hardware": NVIDIA} | spec))
    fit_facts = find_fit_facts(snapshot, wanted, SETTINGS, assessor.assess, device_classes.has_unknown)
    return judge_service(wanted, None, lambda _service: fit_facts)


def big_model(gib: int = 60) -> tuple[Resource, Obj]:
    return MODELS, model(memoryBytes=gib * GIB, status={"sizeBytes": gib * GIB, "layout": None})


def test_model_that_fits_is_allowed_and_a_larger_one_refused() -> None:
    node = gpu_node("NVIDIA-L4", 23034)
    assert judge((MODELS, model()), node) == ALLOWED
    refusal = judge(big_model(), node).refusal
    for words in ("InferenceService team/chat", "Model tiny", "needs 60.4 GiB", "has 22.5 GiB"):
        assert words in refusal


@pytest.mark.parametrize("hardware", [{"accelerator": "auto"}, {"accelerator": "nvidia", "count": 1}])
def test_refusal_holds_for_several_accelerators_and_one(hardware: Obj) -> None:
    assert judge(big_model(), gpu_node("NVIDIA-L4", 23034), hardware=hardware).refusal


def test_estimate_that_a_benchmark_may_correct_passes_with_a_warning() -> None:
    here = (gpu_node("NVIDIA-L4", 23034), (MODELS, model()))
    (speed,) = assess_classes(chat(), Served(convert(model(), Model), "llama.cpp"), 1, [L4], {})
    expected, high = float(speed.tokens_per_second or 0), float(speed.high or 0)
    answer = judge(*here, placement={"minTokensPerSecond": round((expected + high) / 2)})
    assert answer.refusal == ""
    assert "fewer than spec.placement.minTokensPerSecond" in answer.warning
    assert judge(*here, placement={"minTokensPerSecond": round(2 * high)}).refusal


def test_unknown_model_nodes_or_devices_pass_with_a_warning() -> None:
    node = gpu_node("NVIDIA-L4", 23034)
    for answer in (
        judge(node),
        judge((MODELS, model(status={"phase": "Pending", "conditions": []})), node),
        judge(big_model(), classes=()),
        judge(big_model(), node, gpu_node("New", None), classes=(L4, NEW)),
        judge(big_model(), node, hardware=NVIDIA | {"memory": "80Gi"}),
        judge(big_model(), classes=(L4, ServingDevices("nvidia", ""))),
    ):
        assert answer.refusal == ""
        assert answer.warning
