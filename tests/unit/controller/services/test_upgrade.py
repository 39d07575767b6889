"""Objects of an earlier version of the controller: nothing that runs is replaced, and missing facts are added."""

from typing import Any

import pytest

from controller.models.volume import INSPECTION
from controller.reconcile.stamp import is_desired, stamp
from kube.client import Obj
from kube.resources import DEPLOYMENTS, METAL_HOSTS, METAL_PROCESSES, MODELS, Resource
from tests.support.api_objects import GIB, host, model, planned_condition, process
from tests.support.service_decisions import METAL, chat_deployment, chat_service, decide_chat, kept_part, list_applied
from tests.support.simulated_model import INSPECTED, SimulatedModel, make_inspected

LAYOUT = {
    "tensorBytes": 100,
    "vocabularySize": 8,
    "embeddingSize": 8,
    "attentionSize": 8,
    "headCount": 1,
    "feedForwardSize": 8,
    "layers": [{"count": 1}],
}


def inspected_by_an_earlier_version(**spec: Any) -> SimulatedModel:
    """Return a Model with the status of a version that did not inspect the layout, and whose Job is gone."""
    simulated = make_inspected(**spec)
    simulated.forget_inspection()
    simulated.jobs, simulated.pods = {}, {}
    return simulated


def test_model_of_earlier_version_is_inspected_again_while_status_stays() -> None:
    simulated = inspected_by_an_earlier_version(source="hf://org/repo/tiny.gguf")
    before = simulated.model.status
    simulated.settle()
    assert simulated.model.status == before, "nothing that serves has to wait for it"
    (container,) = simulated.job("inspect")["spec"]["template"]["spec"]["containers"]
    assert container["args"][1] == 'hf://org/repo@"etag-1"/tiny.gguf', "of the weights that are served"
    simulated.end("inspect", 0, INSPECTED | {"layout": LAYOUT})
    simulated.settle()
    assert simulated.model.status.layout is not None
    assert simulated.condition("Ready").reason == "Inspected"


@pytest.mark.parametrize(
    "answer", [INSPECTED, INSPECTED | {"layout": LAYOUT, "revision": '"etag-2"'}], ids=["not told", "of other weights"]
)
def test_model_is_inspected_again_only_once(answer: Obj) -> None:
    simulated = inspected_by_an_earlier_version()
    simulated.settle()
    simulated.end("inspect", 0, answer)
    simulated.settle()
    simulated.jobs, simulated.pods = {}, {}
    made = len(simulated.made)
    simulated.settle()
    assert (len(simulated.made), simulated.model.status.layout, simulated.model.status.revision) == (
        made,
        None,
        '"etag-1"',
    )


@pytest.mark.parametrize("answer", [{}, {"layout": LAYOUT}], ids=["no layout", "layout"])
def test_folder_that_is_inspected_again_keeps_the_size_that_processes_have(answer: Obj) -> None:
    """Fewer files are chosen now; a process with another size would be another process, which loads again."""
    simulated = SimulatedModel(source="hf://org/repo", memory_bytes=5)
    simulated.settle()
    folder: Obj = {"revision": "c" * 40, "sizeBytes": 1000}
    simulated.end("inspect", 0, folder)
    simulated.settle()
    simulated.forget_inspection()
    simulated.jobs, simulated.pods = {}, {}
    simulated.settle()
    simulated.end("inspect", 0, folder | {"sizeBytes": 900, "format": "mlx"} | answer)
    simulated.settle()
    assert (simulated.model.status.size_bytes, simulated.model.status.format) == (1000, "mlx")


def test_failed_second_inspection_is_not_reported_as_running() -> None:
    simulated = inspected_by_an_earlier_version()
    simulated.settle()
    simulated.end("inspect", 2, {"reason": "SourceNotFound", "message": "there is no such file"})
    simulated.settle()
    assert simulated.model.status.inspection == INSPECTION
    assert simulated.condition("Ready").status == "True", "volumes may have it still"


def test_model_with_stated_memory_is_not_inspected_again() -> None:
    simulated = inspected_by_an_earlier_version(memory_bytes=5)
    simulated.settle()
    assert not simulated.jobs


def running(spec: Obj, **changed: Any) -> tuple[Resource, Obj]:
    """Return a running process with this spec, and with the name from an earlier version of the controller."""
    obj = process("chat-00000000-0", host="studio-1", phase="Ready")
    return METAL_PROCESSES, obj | {"spec": spec | {"hostName": "studio-1"} | changed}


def test_size_that_is_inspected_again_is_no_failure() -> None:
    earlier = (MODELS, model(status={"layout": None, "inspection": None}))
    ((_, made),) = decide_chat(chat_service(**METAL), (MODELS, model()), (METAL_HOSTS, host())).create
    plan = decide_chat(chat_service(**METAL), earlier, (METAL_HOSTS, host()), running(made["spec"]))
    assert planned_condition(plan, "Ready")["reason"] == "ModelNotReady"
    assert "waiting for Model tiny to be inspected again" in planned_condition(plan, "Ready")["message"]
    assert (plan.create, plan.delete, plan.events) == ((), (), ())


def test_better_estimate_replaces_no_running_process() -> None:
    there, mac = (MODELS, model()), (METAL_HOSTS, host())
    ((_, made),) = decide_chat(chat_service(**METAL), there, mac).create
    less = made["spec"]["memoryBytes"] // 2
    # The API server adds the defaults that are missing in a stored object of an earlier version.
    plan = decide_chat(
        chat_service(**METAL), there, mac, running(made["spec"], memoryBytes=less, mode="chat", cacheTypeK="f16")
    )
    assert (plan.create, plan.delete) == ((), ())
    assert plan.status is not None
    assert plan.status["readyReplicas"] == 1
    edited = decide_chat(chat_service(**METAL, contextLength=8192), there, mac, running(made["spec"]))
    assert len(edited.create) == 1


def test_change_of_stated_memory_is_an_edit() -> None:
    there, mac = (MODELS, model(memoryBytes=2 * GIB)), (METAL_HOSTS, host())
    ((_, made),) = decide_chat(chat_service(**METAL), there, mac).create
    assert decide_chat(chat_service(**METAL), there, mac, running(made["spec"], memoryBytes=GIB)).create


@pytest.mark.parametrize("phase", ["Pending", "Rejected"])
def test_unbound_process_is_recreated_with_the_better_estimate(phase: str) -> None:
    there, mac = (MODELS, model()), (METAL_HOSTS, host())
    ((_, made),) = decide_chat(chat_service(**METAL), there, mac).create
    placed = {"hostName": "studio-1"} if phase == "Rejected" else {}
    waits = process("chat-00000000-0", phase=phase) | {"spec": made["spec"] | {"memoryBytes": 1} | placed}
    assert len(decide_chat(chat_service(**METAL), there, mac, (METAL_PROCESSES, waits)).create) == 1


def container_of(deployment: Obj) -> Obj:
    container: Obj
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


def requested(deployment: Obj) -> Obj:
    requests: Obj = container_of(deployment)["resources"]["requests"]
    return requests


@pytest.mark.parametrize(
    ("spec", "weights", "keeps"),
    [
        ({}, {}, True),
        ({"replicas": 3}, {}, True),
        ({"contextLength": 8192}, {}, False),
        ({}, {"memoryBytes": 2 * GIB}, False),
        ({"resources": {"memory": "2Gi"}}, {}, False),
    ],
    ids=["upgrade", "scaled", "edited", "stated by the Model", "stated by the service"],
)
@pytest.mark.parametrize("stamped", [True, False])
@pytest.mark.parametrize("hook", [True, False])
def test_pods_keep_their_memory_request_until_something_else_changes(
    spec: Obj, weights: Obj, keeps: bool, stamped: bool, hook: bool
) -> None:
    there = chat_deployment(chat_service(), (MODELS, model()))
    del there["metadata"]["annotations"]
    requested(there)["memory"] = "1234567"
    if not hook:
        del container_of(there)["lifecycle"]
    there = kept_part(stamp(there) if stamped else there)
    (wanted,) = list_applied(
        decide_chat(chat_service(**spec), (MODELS, model(**weights)), (DEPLOYMENTS, there)), DEPLOYMENTS
    )
    assert (requested(wanted)["memory"] == "1234567") is keeps
    if stamped and not (spec or weights):
        assert is_desired(DEPLOYMENTS, wanted, there), "to apply it would replace all pods"
    assert ("lifecycle" in container_of(wanted)) is (hook or not keeps)
    assert wanted["spec"]["replicas"] == spec.get("replicas", 1)


@pytest.mark.parametrize("edit", [{}, {"contextLength": 8192}])
def test_pods_without_the_hook_before_their_stop_get_it_when_they_are_replaced(edit: Obj) -> None:
    stated = {"resources": {"memory": "2Gi"}}
    there = chat_deployment(chat_service(**stated), (MODELS, model()))
    del container_of(there)["lifecycle"]
    plan = decide_chat(chat_service(**stated, **edit), (MODELS, model()), (DEPLOYMENTS, kept_part(stamp(there))))
    (wanted,) = list_applied(plan, DEPLOYMENTS)
    assert ("lifecycle" in container_of(wanted)) is bool(edit)
    assert is_desired(DEPLOYMENTS, wanted, kept_part(stamp(there))) is not bool(edit)
