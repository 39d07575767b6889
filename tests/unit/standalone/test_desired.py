"""What this machine runs for a service is what the controller would have a host run."""

from typing import Any

import msgspec
import pytest

from artifacts.errors import ArtifactError
from artifacts.inspect import Inspection
from controller.parts import Served
from controller.plan import Key
from controller.processes import desired_spec
from controller.requirements import memory_bytes
from crds.inferenceservice import InferenceService
from crds.model import GGUF, Layout, Model
from kube.resources import INFERENCE_SERVICES, MODELS
from metal_agent.assignments import STANDALONE
from standalone.desired import decide, failed, inspected, notes
from standalone.manifests import accepted
from tests import serving
from tests.manifests import made
from tests.serving import GIB

KEY = Key("default", "tiny")
LAYOUT = msgspec.convert(serving.model()["status"]["layout"], Layout)


def service(**spec: Any) -> InferenceService:
    return accepted(made(INFERENCE_SERVICES, name="chat", **spec), InferenceService)


def model(**spec: Any) -> Model:
    return accepted(made(MODELS, name="tiny", **spec), Model)


def found(sha256: str | None = "b" * 64, layout: Layout | None = LAYOUT) -> Inspection:
    return Inspection(
        size_bytes=GIB,
        revision="r1",
        file="tiny.gguf",
        sha256=sha256,
        gguf=GGUF(architecture="llama"),
        layout=layout,
        tensor_bytes=GIB,
    )


def test_a_replica_is_what_the_controller_would_have_a_host_serve() -> None:
    known = inspected(model(), found())
    wanted = service(replicas=2, contextLength=1024, parallel=3, extraArgs=["-t", "2"])
    decision = decide(wanted, {KEY: known})
    assert decision.problem is None
    needed = memory_bytes(wanted, Served(known))
    assert needed is not None
    assert [each.spec for each in decision.assignments] == [desired_spec(wanted, Served(known), needed)] * 2
    artifact = decision.assignments[0].spec.artifact if decision.assignments[0].spec else None
    assert artifact is not None
    assert (artifact.revision, artifact.sha256, artifact.size_bytes) == ("r1", "b" * 64, GIB)


def test_a_process_keeps_its_uid_over_restarts_and_gets_another_for_another_spec() -> None:
    models = {KEY: inspected(model(), found())}
    uids = [[each.uid for each in decide(service(replicas=2), models).assignments] for _ in range(2)]
    assert uids[0] == uids[1]
    assert len(set(uids[0])) == 2
    assert all(each.startswith(STANDALONE) for each in uids[0])
    assert decide(service(contextLength=1024), models).assignments[0].uid not in uids[0]


@pytest.mark.parametrize(
    "spec",
    [
        {"hardware": {"accelerator": "cpu"}},
        {"hardware": {"accelerator": "nvidia"}, "resources": {"gpu": 2}},
        {"resources": {"memory": "4Gi"}, "nodeSelector": {"disk": "ssd"}, "image": "example/server"},
    ],
    ids=["cpu", "nvidia", "pods"],
)
def test_what_is_about_pods_does_not_keep_a_service_from_this_machine(spec: dict[str, Any]) -> None:
    models = {KEY: inspected(model(), found())}
    assert decide(service(**spec), models) == decide(service(), models)
    assert decide(service(), models).assignments


def test_what_is_not_used_here_is_said() -> None:
    assert notes([service(), service(hardware={"accelerator": "cpu"})]) == []
    assert notes([service(hardware={"accelerator": "nvidia"}, resources={"gpu": 1}, nodeSelector={"a": "b"})]) == [
        "chat: hardware.accelerator nvidia: served by this machine instead",
        "chat: resources, nodeSelector: about pods, and not used here",
    ]


def test_a_local_file_is_the_same_process_as_in_a_cluster_which_cannot_read_it() -> None:
    local = model(source="file:///m/tiny.gguf", memoryBytes=3 * GIB)
    decision = decide(service(), {KEY: inspected(local, found(sha256=None))})
    spec = decision.assignments[0].spec
    assert spec is not None
    assert (spec.artifact.revision, spec.artifact.sha256) == ("", "")
    assert spec.memory_bytes == 3 * GIB


@pytest.mark.parametrize(
    ("wanted", "known", "reason", "phase", "says"),
    [
        (service(suspend=True), model(), "Suspended", "Suspended", "spec.suspend is true: edit the file"),
        (service(replicas=0), model(), "Suspended", "Suspended", "spec.replicas is 0: edit the file"),
        (service(), model(), "ModelNotReady", "Pending", "Model tiny is being looked at"),
        (
            service(),
            failed(model(), ArtifactError("SourceNotFound", "no such file")),
            "ModelFailed",
            "Failed",
            "Model tiny: no such file",
        ),
        (
            service(),
            failed(model(), ArtifactError("SourceUnreachable", "no answer", retryable=True)),
            "ModelNotReady",
            "Pending",
            "Model tiny: no answer",
        ),
        (
            service(),
            inspected(model(), found(layout=None)),
            "MemoryUnknown",
            "Failed",
            "spec.memoryBytes",
        ),
    ],
    ids=["suspended", "zero", "new", "failed", "away", "memory"],
)
def test_nothing_runs_and_it_is_said_why(
    wanted: InferenceService, known: Model, reason: str, phase: str, says: str
) -> None:
    decision = decide(wanted, {KEY: known})
    assert decision.assignments == ()
    assert decision.problem is not None
    assert (decision.problem.reason, decision.problem.phase) == (reason, phase)
    assert says in decision.problem.message
