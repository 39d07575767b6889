"""`pomona up` runs the processes for a service that the controller would assign to a host."""

from typing import Any

import msgspec
import pytest

from artifacts.errors import ArtifactError
from artifacts.inspect import Inspection
from controller.models.served import Served
from controller.services.metal_processes import build_process_spec
from controller.services.replica_memory import measure_replica
from crds.inferenceservice import InferenceService
from crds.model import Model
from crds.weights_header import GGUF, Layout
from kube.resources import INFERENCE_SERVICES, MODELS, ObjectKey
from metal_agent.assignments import STANDALONE
from metal_agent.lifecycle import LOG_HINT, ProcessState
from standalone.desired import (
    decide_assignments,
    describe_failure,
    drop_unusable_secret,
    list_ignored_fields,
    with_error,
    with_inspection,
)
from standalone.manifests import accept_manifest
from tests.support import api_objects
from tests.support.api_objects import GIB
from tests.support.refused_manifests import make_manifest

KEY = ObjectKey("default", "tiny")
LAYOUT = msgspec.convert(api_objects.model()["status"]["layout"], Layout)


def service(**spec: Any) -> InferenceService:
    return accept_manifest(make_manifest(INFERENCE_SERVICES, name="chat", **spec), InferenceService)


def model(**spec: Any) -> Model:
    return accept_manifest(make_manifest(MODELS, name="tiny", **spec), Model)


def inspection(sha256: str = "b" * 64, layout: Layout | None = LAYOUT) -> Inspection:
    return Inspection(
        format="gguf",
        size_bytes=GIB,
        revision="r1",
        file="tiny.gguf",
        sha256=sha256,
        gguf=GGUF(architecture="llama"),
        layout=layout,
        tensor_bytes=GIB,
    )


def test_replica_equals_the_process_that_controller_assigns_to_host() -> None:
    inspected = with_inspection(model(), inspection())
    wanted = service(replicas=2, contextLength=1024, parallel=3, extraArgs=["-t", "2"])
    decision = decide_assignments(wanted, {KEY: inspected})
    assert decision.problem is None
    needed = measure_replica(wanted, Served(inspected, "llama.cpp")).total_bytes
    assert needed is not None
    assert [assignment.spec for assignment in decision.assignments] == [
        build_process_spec(wanted, Served(inspected, "llama.cpp"), needed)
    ] * 2
    artifact = decision.assignments[0].spec.artifact
    assert artifact is not None
    assert (artifact.revision, artifact.sha256, artifact.size_bytes) == ("r1", "b" * 64, GIB)


def test_uid_is_kept_over_restarts_and_changes_with_spec() -> None:
    models = {KEY: with_inspection(model(), inspection())}
    uids = [
        [assignment.uid for assignment in decide_assignments(service(replicas=2), models).assignments] for _ in range(2)
    ]
    assert uids[0] == uids[1]
    assert len(set(uids[0])) == 2
    assert all(uid.startswith(STANDALONE) for uid in uids[0])
    assert decide_assignments(service(contextLength=1024), models).assignments[0].uid not in uids[0]


@pytest.mark.parametrize(
    "spec",
    [
        {"hardware": {"accelerator": "cpu"}},
        {"hardware": {"accelerator": "nvidia"}, "resources": {"gpu": 2}},
        {"resources": {"memory": "4Gi"}, "nodeSelector": {"disk": "ssd"}, "image": "example/server"},
    ],
    ids=["cpu", "nvidia", "pods"],
)
def test_fields_about_pods_do_not_prevent_serving(spec: dict[str, Any]) -> None:
    models = {KEY: with_inspection(model(), inspection())}
    assert decide_assignments(service(**spec), models) == decide_assignments(service(), models)
    assert decide_assignments(service(), models).assignments


def test_ignored_fields_are_listed() -> None:
    assert list_ignored_fields([service(), service(hardware={"accelerator": "cpu"})]) == []
    for_pods = service(hardware={"accelerator": "nvidia"}, resources={"gpu": 1}, nodeSelector={"a": "b"})
    assert list_ignored_fields([for_pods]) == [
        "chat: ignored on this machine: spec.hardware.accelerator nvidia",
        "chat: ignored on this machine, only pods use them: spec.resources, spec.nodeSelector",
    ]


def test_local_file_is_same_process_as_in_cluster() -> None:
    local = model(source="file:///m/tiny.gguf", memoryBytes=3 * GIB)
    decision = decide_assignments(service(), {KEY: with_inspection(local, inspection(sha256=""))})
    spec = decision.assignments[0].spec
    assert (spec.artifact.revision, spec.artifact.sha256) == ("", "")
    assert spec.memory_bytes == 3 * GIB


READY = ProcessState("Ready")
EXITED = ProcessState("Failed", "EngineExited", f"the engine exited{LOG_HINT}")
AWAY = ProcessState("Failed", "SourceUnreachable", "no answer")
REFUSED = ProcessState("Rejected", "InsufficientMemory", "it needs 9 GiB")


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ([EXITED, REFUSED], "the engine exited; it needs 9 GiB"),
        ([EXITED, EXITED], "the engine exited"),
        ([EXITED, AWAY], ""),
        ([EXITED, READY], ""),
        ([EXITED], ""),
        ([ProcessState("Failed", "DaemonBusy", "busy")] * 2, ""),
        ([], ""),
    ],
)
def test_failure_is_final_if_no_replica_may_serve(states: list[ProcessState], says: str) -> None:
    decision = decide_assignments(service(replicas=2), {KEY: with_inspection(model(), inspection())})
    assert describe_failure(decision, states) == says


def test_failure_of_a_decision_is_final_unless_its_cause_may_pass() -> None:
    lost = {KEY: with_error(model(), ArtifactError("SourceNotFound", "no such file"))}
    away = {KEY: with_error(model(), ArtifactError("SourceUnreachable", "no answer", retryable=True))}
    assert describe_failure(decide_assignments(service(), lost), []) == "Model tiny: no such file"
    assert describe_failure(decide_assignments(service(), away), []) == ""


@pytest.mark.parametrize(
    ("source", "is_kept"),
    [
        ("hf://org/repo/tiny.gguf", True),
        ("https://hub.example/org/repo/resolve/main/tiny.gguf", True),
        ("https://HUB.example:443/tiny.gguf", True),
        ("http://hub.example/tiny.gguf", False),
        ("https://hub.example:8443/tiny.gguf", False),
        ("https://hub.example.evil.test/tiny.gguf", False),
        ("https://hub.example@evil.test/tiny.gguf", False),
        ("https://models.example/tiny.gguf", False),
    ],
)
def test_hub_token_is_kept_for_sources_of_the_hub_only(source: str, *, is_kept: bool) -> None:
    """A Model's Secret stands for the hub's token: this machine has no other."""
    stated = model(source=source, sourceSecretRef={"name": "hub"})
    kept = drop_unusable_secret(stated, "https://hub.example")
    assert (kept.spec.source_secret_ref is not None) == is_kept


@pytest.mark.parametrize(
    ("wanted", "known", "reason", "phase", "says"),
    [
        (service(suspend=True), model(), "Suspended", "Suspended", "spec.suspend is true: edit the file"),
        (service(replicas=0), model(), "Suspended", "Suspended", "spec.replicas is 0: edit the file"),
        (service(), model(), "ModelNotReady", "Pending", "waiting for Model tiny to be inspected"),
        (
            service(),
            with_error(model(), ArtifactError("SourceNotFound", "no such file")),
            "ModelFailed",
            "Failed",
            "Model tiny: no such file",
        ),
        (
            service(),
            with_error(model(), ArtifactError("SourceUnreachable", "no answer", retryable=True)),
            "ModelNotReady",
            "Pending",
            "Model tiny: no answer",
        ),
        (
            service(),
            with_inspection(model(), inspection(layout=None)),
            "MemoryUnknown",
            "Failed",
            "spec.memoryBytes",
        ),
    ],
    ids=["suspended", "zero", "new", "failed", "away", "memory"],
)
def test_reason_is_given_when_nothing_runs(
    wanted: InferenceService, known: Model, reason: str, phase: str, says: str
) -> None:
    decision = decide_assignments(wanted, {KEY: known})
    assert decision.assignments == ()
    assert decision.problem is not None
    assert (decision.problem.reason, decision.problem.phase) == (reason, phase)
    assert says in decision.problem.message
