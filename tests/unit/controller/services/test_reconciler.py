"""The plan and the status of an InferenceService: its pods, address, token, conditions and Events."""

from typing import Any

import msgspec
import pytest

from controller.pod_settings import PodSettings, TenantLimits
from controller.reconcile.plan import Plan, Snapshot
from controller.services.reconciler import ServiceEffects, decide_service, service_reconciler
from controller.services.service_view import ServiceInputs
from controller.services.traffic import Traffic
from crds.serving import ServingOptions
from crds.weights_header import Layout
from fitness.memory import Workload, estimate
from kube.client import Client, Obj
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    PODS,
    SECRETS,
    SERVICES,
)
from runtimes.probe import ProbeResult
from tests.support.api_objects import (
    GIB,
    NOW,
    condition,
    host,
    model,
    planned_condition,
    process,
    service,
    slice_of,
    store,
)
from tests.support.service_decisions import (
    KEY,
    METAL,
    OK,
    SERVING,
    bound_process,
    chat_deployment,
    chat_pod,
    chat_service,
    decide_chat,
    list_applied,
    plain_sources,
    ready_outcome,
)


def test_service_and_token_are_created_first() -> None:
    plan = decide_chat(chat_service(), new_token="s3cret")
    assert [resource for resource, _ in plan.create] == [SECRETS]
    assert len(list_applied(plan, SERVICES)) == 1
    assert decide_chat(chat_service()).create == ()
    assert plan.status is not None
    assert plan.status["endpoint"] == "http://chat.team.svc:8080/v1"
    assert plan.status["selector"] == "inference.pomona.dev/service=chat"
    assert plan.status["observedGeneration"] == 1


def test_a_missing_model_is_named() -> None:
    plan = decide_chat(chat_service())
    assert ready_outcome(plan) == ("Pending", "False", "ModelNotFound")
    assert "Model tiny" in planned_condition(plan, "Ready")["message"]
    assert planned_condition(plan, "ModelReady")["reason"] == "ModelNotFound"


@pytest.mark.parametrize(
    ("conditions", "phase", "observed", "expected"),
    [
        ([condition("Ready", "False", "Inspecting")], "Pending", 1, ("Pending", "ModelNotReady")),
        ([condition("Ready", "False", "SourceNotFound", "404")], "Failed", 1, ("Failed", "ModelFailed")),
        ([condition("Ready", "True"), condition("Cached", "False")], "Downloading", 1, ("Downloading", "Downloading")),
        (
            [condition("Ready", "True"), condition("Cached", "False", "ChecksumMismatch", "is wrong")],
            "Failed",
            1,
            ("Failed", "ModelFailed"),
        ),
        ([condition("Ready", "True"), condition("Cached", "True")], "Ready", 0, ("Pending", "ModelNotReady")),
    ],
)
def test_pods_wait_for_their_model(conditions: list[Obj], phase: str, observed: int, expected: tuple[str, str]) -> None:
    status = {"phase": phase, "conditions": conditions, "observedGeneration": observed}
    plan = decide_chat(chat_service(), (MODELS, model(status=status)))
    assert list_applied(plan, DEPLOYMENTS) == []
    assert ready_outcome(plan) == (expected[0], "False", expected[1])
    if phase == "Failed":
        assert conditions[-1]["message"] in planned_condition(plan, "Ready")["message"], "the Model's own words"


def test_hosts_do_not_wait_for_a_volume_nor_for_its_failures() -> None:
    for status in (
        {"conditions": [condition("Ready", "True"), condition("Cached", "False")]},
        {"phase": "Failed", "conditions": [condition("Ready", "True"), condition("Cached", "False")]},
    ):
        plan = decide_chat(chat_service(**METAL), (MODELS, model(status=status)), (METAL_HOSTS, host()))
        assert [resource for resource, _ in plan.create] == [METAL_PROCESSES]


@pytest.mark.parametrize(
    ("spec", "source", "says"),
    [
        ({}, "file:///m.gguf", "hardware.accelerator to metal"),
        (METAL, "s3://models/m.gguf", "hosts, which cannot read s3://models/m.gguf"),
        (METAL, "pvc://weights/m.gguf", "use an accelerator of pods"),
        ({"resources": {"gpu": 1}}, "http://x.example/m.gguf", "resources.gpu is 1"),
        (METAL | {"resources": {"gpu": 1}}, "http://x.example/m.gguf", "resources.gpu is 1"),
        (METAL | {"image": "a", "resources": {"cpu": "1"}}, "http://x.example/m.gguf", "image and resources"),
        (METAL | {"tolerations": [{"key": "a", "tolerationSeconds": 5}]}, "http://x.example/m", "tolerations with"),
    ],
)
def test_contradicting_spec_is_reported_with_the_way_out(spec: Obj, source: str, says: str) -> None:
    plan = decide_chat(chat_service(**spec), (MODELS, model(source=source, memoryBytes=1)))
    assert ready_outcome(plan) == ("Failed", "False", "InvalidSpec")
    assert says in planned_condition(plan, "Ready")["message"]
    assert plan.create == ()
    assert list_applied(plan, DEPLOYMENTS) == []


@pytest.mark.parametrize("layers", [None, 1 << 44], ids=["not told", "beyond a status"])
def test_unknown_size_is_not_guessed(layers: int | None) -> None:
    unknown = model(status={"layout": None})
    if layers is not None:
        unknown = model()
        unknown["status"]["layout"]["layers"][0]["count"] = layers
    assert ready_outcome(decide_chat(chat_service(**METAL), (MODELS, unknown))) == ("Failed", "False", "MemoryUnknown")
    plan = decide_chat(chat_service(**METAL), (MODELS, unknown | {"spec": unknown["spec"] | {"memoryBytes": 5 * GIB}}))
    assert plan.create[0][1]["spec"]["memoryBytes"] == 5 * GIB
    assert list_applied(decide_chat(chat_service(resources={"memory": "4Gi"}), (MODELS, unknown)), DEPLOYMENTS)


def test_pod_requests_the_memory_estimated_from_the_header() -> None:
    (obj,) = list_applied(decide_chat(chat_service(contextLength=1024, parallel=2), (MODELS, model())), DEPLOYMENTS)
    requests = obj["spec"]["template"]["spec"]["initContainers"][0]["resources"]["requests"]
    layout = msgspec.convert(model()["status"]["layout"], Layout)
    needed = estimate(Workload(layout), ServingOptions(context_length=1024, parallel=2))
    assert needed
    assert int(requests["memory"]) == needed.total_bytes > GIB


def test_the_models_accelerator_is_the_default() -> None:
    plan = decide_chat(chat_service(), (MODELS, model(hardware={"accelerator": "metal"})), (METAL_HOSTS, host()))
    assert [resource for resource, _ in plan.create] == [METAL_PROCESSES]
    assert plan.status is not None
    assert plan.status["accelerator"] == "metal"


def test_service_is_ready_only_after_a_generated_token() -> None:
    base = (chat_service(), (MODELS, model()))
    there = (*base, (DEPLOYMENTS, chat_deployment(*base)), (PODS, chat_pod()))
    assert ready_outcome(decide_chat(*there)) == ("Progressing", "False", "NoEndpoints")
    offered = (*there, (ENDPOINT_SLICES, slice_of("chat", "x")))
    assert ready_outcome(decide_chat(*offered)) == ("Progressing", "False", "Probing")
    assert ready_outcome(decide_chat(*offered, answer=OK)) == ("Ready", "True", "Serving")
    refused = ProbeResult(ok=False, reason="Unauthorized", message="http://10.77.0.100:18000 answered 401")
    assert ready_outcome(decide_chat(*offered, answer=refused)) == ("Progressing", "False", "Unauthorized")


def test_replicas_are_the_pods_at_which_a_scheduler_has_looked() -> None:
    base = (chat_service(), (MODELS, model()))
    deployment = (DEPLOYMENTS, chat_deployment(*base, replicas=0, ready=0))
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}

    def counted(**status: Any) -> int:
        plan = decide_chat(*base, deployment, (PODS, chat_pod(ready=False, **status)))
        assert plan.status is not None
        replicas: int = plan.status["replicas"]
        return replicas

    assert counted(conditions=[]) == 0
    assert counted(conditions=[unschedulable]) == 1
    assert counted(phase="Running") == 1
    assert counted(phase="Running", conditions=[]) == 1, "whoever placed it there"
    assert counted(phase="Failed") == 0


def test_fewer_replicas_that_answer_are_degraded_with_the_cause() -> None:
    base = (chat_service(replicas=2), (MODELS, model()))
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    plan = decide_chat(
        *base,
        (DEPLOYMENTS, chat_deployment(*base, replicas=2, ready=1)),
        (PODS, chat_pod("chat-1")),
        (PODS, chat_pod("chat-2", ready=False, conditions=[unschedulable])),
        (ENDPOINT_SLICES, slice_of("chat", "x")),
        answer=OK,
    )
    assert ready_outcome(plan) == ("Degraded", "True", "Serving")
    assert "1 of 2 replicas are ready: pod chat-2: 0/3 nodes" in planned_condition(plan, "Ready")["message"]
    assert plan.status is not None
    assert (plan.status["replicas"], plan.status["readyReplicas"]) == (2, 1)


def test_status_names_engine_memory_and_nodes() -> None:
    base = (chat_service(), (MODELS, model()))
    there = chat_deployment(*base, ready=1)
    pods = [(PODS, chat_pod(f"chat-{number}") | {"spec": {"nodeName": node}}) for number, node in enumerate("ba")]
    status = decide_chat(*base, (DEPLOYMENTS, there), *pods).status
    assert status is not None
    assert (status["accelerator"], status["runtime"], status["nodes"]) == ("cpu", "llama.cpp", ["a", "b"])
    assert status["memory"] == "1.1 GiB"


@pytest.mark.parametrize(
    ("hardware", "known", "expected"),
    [
        ({}, {"memoryBytes": 20 * GIB}, None),
        ({"accelerator": "nvidia"}, {"memoryBytes": 20 * GIB}, "1 x 20.4 GiB"),
        ({"accelerator": "nvidia", "count": 4}, {"memoryBytes": 20 * GIB}, "4 x 5.4 GiB"),
        ({"accelerator": "nvidia"}, {}, "1 x 2.1 GiB"),
        ({"accelerator": "nvidia"}, {"status": {"layout": None}}, None),
    ],
    ids=["no device", "stated", "shared", "by the header", "unknown"],
)
def test_status_shows_the_memory_of_devices(hardware: Obj, known: Obj, expected: str | None) -> None:
    status = decide_chat(chat_service(hardware=hardware), (MODELS, model(**known))).status
    assert status is not None
    assert status.get("deviceMemory") == expected


def test_stated_memory_of_the_node_leaves_the_memory_of_devices() -> None:
    chat = chat_service(hardware={"accelerator": "nvidia"}, resources={"memory": "9Gi"})
    status = decide_chat(chat, (MODELS, model(memoryBytes=20 * GIB))).status
    assert status is not None
    assert (status["memory"], status["deviceMemory"]) == ("9.0 GiB", "1 x 20.4 GiB")


def test_decision_probes_what_is_offered_and_reads_the_metrics_of_pods_only() -> None:
    old = (chat_service(), (MODELS, model()))
    there = (*old, (DEPLOYMENTS, chat_deployment(*old)), (PODS, chat_pod()))
    assert decide_chat(*there).effects == (ServiceEffects(),)
    for name, of_host in (("chat-abcde", ""), ("chat.x", "x")):
        offered = slice_of("chat", "x")
        offered["metadata"]["name"] = name
        (effects,) = decide_chat(*there, (ENDPOINT_SLICES, offered)).effects
        assert [endpoint.host for endpoint in effects.question.endpoints] == [of_host]
        assert (effects.target is None) == bool(of_host)


def test_status_shows_the_traffic_that_is_known() -> None:
    old, offered = (chat_service(), (MODELS, model())), slice_of("chat", "x")
    offered["metadata"]["name"] = "chat-abcde"
    base = (*old, (DEPLOYMENTS, chat_deployment(*old)), (PODS, chat_pod()), (ENDPOINT_SLICES, offered))
    status = decide_chat(*base, traffic=Traffic(90, 1200)).status
    assert status is not None
    assert (status["requestsPerMinute"], status["averageLatencyMs"]) == (90, 1200)
    shown = chat_service(status={"requestsPerMinute": 7})
    status = decide_chat(shown, *base[1:]).status
    assert status is not None
    assert status["requestsPerMinute"] == 7, "a new leader has not read the pods yet"
    status = decide_chat(*base, traffic=Traffic(0, None)).status
    assert status is not None
    assert status["requestsPerMinute"] == 0
    assert "averageLatencyMs" not in status


def test_quota_that_refuses_pods_is_reported() -> None:
    base = (chat_service(), (MODELS, model()))
    there = chat_deployment(*base, ready=0)
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: q"}
    there["status"]["conditions"] = [failure]
    assert ready_outcome(decide_chat(*base, (DEPLOYMENTS, there))) == ("Failed", "False", "FailedCreate")


def test_while_an_edit_rolls_out_the_old_answer_is_of_the_old_generation() -> None:
    old = (chat_service(), (MODELS, model()))
    there = ((DEPLOYMENTS, chat_deployment(*old)), (PODS, chat_pod()), (ENDPOINT_SLICES, slice_of("chat", "x")))
    edited = (chat_service(generation=2, contextLength=8192, status=SERVING), (MODELS, model()))
    plan = decide_chat(*edited, *there, answer=OK)
    assert ready_outcome(plan) == ("Progressing", "True", "Progressing")
    assert planned_condition(plan, "Ready")["observedGeneration"] == 1
    rolling = chat_deployment(*edited, replicas=2, updated=1, ready=1)
    assert ready_outcome(decide_chat(*edited, (DEPLOYMENTS, rolling), *there[1:], answer=OK))[0] == "Progressing"
    asked = decide_chat(*edited, (DEPLOYMENTS, chat_deployment(*edited)), *there[1:])
    assert ready_outcome(asked) == ("Progressing", "True", "Probing")
    assert planned_condition(asked, "Ready")["observedGeneration"] == 1
    done = decide_chat(*edited, (DEPLOYMENTS, chat_deployment(*edited)), *there[1:], answer=OK)
    assert ready_outcome(done) == ("Ready", "True", "Serving")
    assert planned_condition(done, "Ready")["observedGeneration"] == 2


def test_ready_service_stays_ready_without_its_model() -> None:
    old = (chat_service(), (MODELS, model()))
    there = ((DEPLOYMENTS, chat_deployment(*old)), (PODS, chat_pod()), (ENDPOINT_SLICES, slice_of("chat", "x")))
    plan = decide_chat(chat_service(status=SERVING), *there)
    assert plan.delete == ()
    assert ready_outcome(plan) == ("Degraded", "True", "ModelNotFound")


@pytest.mark.parametrize(("spec", "reason"), [({"suspend": True}, "Suspended"), ({"replicas": 0}, "ScaledToZero")])
def test_suspended_or_scaled_to_zero_service_keeps_only_its_address(spec: Obj, reason: str) -> None:
    old = (chat_service(), (MODELS, model()))
    plan = decide_chat(
        chat_service(**spec), (MODELS, model()), (DEPLOYMENTS, chat_deployment(*old)), (PODS, chat_pod())
    )
    assert [deletion.resource for deletion in plan.delete] == [DEPLOYMENTS]
    assert [resource for resource, _ in plan.apply] == [SERVICES]
    assert ready_outcome(plan) == ("Suspended", "False", reason)
    gone = decide_chat(chat_service(**spec), (DEPLOYMENTS, chat_deployment(*old)))
    assert [deletion.resource for deletion in gone.delete] == [DEPLOYMENTS], "a Model is not needed to stop"


def test_a_change_of_accelerator_replaces_one_kind_by_the_other() -> None:
    pods = (chat_service(), (MODELS, model()))
    plan = decide_chat(
        chat_service(**METAL), (MODELS, model()), (METAL_HOSTS, host()), (DEPLOYMENTS, chat_deployment(*pods))
    )
    assert plan.delete == (), "it serves until the other does"
    assert [resource for resource, _ in plan.create] == [METAL_PROCESSES]
    moved = decide_chat(
        chat_service(**METAL),
        (MODELS, model()),
        (METAL_HOSTS, host()),
        (DEPLOYMENTS, chat_deployment(*pods)),
        bound_process(),
    )
    assert [ref.resource for ref in moved.delete] == [DEPLOYMENTS]
    on_metal = ((MODELS, model()), bound_process(), (METAL_HOSTS, host()))
    back = decide_chat(chat_service(), *on_metal)
    assert back.delete == ()
    assert list_applied(back, DEPLOYMENTS)
    assert ready_outcome(back)[1] == "False", "what answers is of another kind than wanted"
    moved = decide_chat(chat_service(), *on_metal, (DEPLOYMENTS, chat_deployment(*pods)), (PODS, chat_pod()))
    assert [ref.resource for ref in moved.delete] == [METAL_PROCESSES]
    stopped = decide_chat(chat_service(suspend=True), *on_metal, (DEPLOYMENTS, chat_deployment(*pods)))
    assert {ref.resource for ref in stopped.delete} == {METAL_PROCESSES, DEPLOYMENTS}


def test_service_without_its_model_is_scaled_down_and_not_up() -> None:
    there = (DEPLOYMENTS, chat_deployment(chat_service(replicas=3), (MODELS, model())))
    (patch,) = decide_chat(chat_service(replicas=1), there).patch
    assert (patch.ref.resource, patch.ref.name) == (DEPLOYMENTS, "chat")
    assert patch.operations[-1] == {"op": "replace", "path": "/spec/replicas", "value": 1}
    assert decide_chat(chat_service(replicas=3), there).patch == ()
    assert decide_chat(chat_service(replicas=4), there).patch == ()


def test_stated_memory_of_zero_is_used() -> None:
    (obj,) = list_applied(decide_chat(chat_service(resources={"memory": 0}), (MODELS, model())), DEPLOYMENTS)
    assert obj["spec"]["template"]["spec"]["initContainers"][0]["resources"]["requests"]["memory"] == "0"


def test_unreadable_host_or_process_blocks_no_service() -> None:
    odd = process("new-0", host="studio-1", phase="Hibernating", priority="cosmic")
    before = decide_chat(chat_service(**METAL), (MODELS, model()), (METAL_HOSTS, host()), bound_process())
    assert before.status is not None
    plan = decide_chat(
        chat_service(**METAL, status={"serving": before.status["serving"]}),
        (MODELS, model()),
        (METAL_HOSTS, host(runtimes="all")),
        bound_process(),
        (METAL_PROCESSES, odd),
    )
    assert plan.status is not None
    assert plan.status["readyReplicas"] == 1
    assert (plan.create, plan.delete) == ((), ()), "a host that cannot be read is not lost"


class NoSecretIsRead(Client):
    """An API that refuses to read anything."""

    def __init__(self) -> None:
        pass


async def test_token_of_a_new_service_is_made_without_a_read_and_then_known() -> None:
    reconciler = service_reconciler(plain_sources())
    assert reconciler.observe is not None
    assert reconciler.written is not None
    snapshot = Snapshot(store(chat_service()), NOW)
    first = await reconciler.observe(NoSecretIsRead(), snapshot, KEY)
    ((resource, made), *_) = decide_chat(chat_service(), new_token=first.token.new_token).create
    reconciler.written(resource, made)
    assert (await reconciler.observe(NoSecretIsRead(), snapshot, KEY)).token.new_token is None


def test_deleted_service_needs_nothing() -> None:
    assert decide_chat() == Plan(effects=(ServiceEffects(is_gone=True),))
    going = service()
    going["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    assert decide_chat((INFERENCE_SERVICES, going), (MODELS, model())) == Plan(effects=(ServiceEffects(is_gone=True),))


def test_each_change_is_one_event() -> None:
    plan = decide_chat(chat_service())
    assert [event.reason for event in plan.events] == ["ModelNotFound"]
    told_before = {"conditions": [planned_condition(plan, "Ready") | {"lastTransitionTime": "2026-11-21T11:00:00Z"}]}
    assert decide_chat(chat_service(status=told_before)).events == ()


async def test_service_beyond_the_limits_keeps_its_pods_and_says_why() -> None:
    spec = {"image": "evil.example/llama:1"}
    there = (chat_service(**spec), (MODELS, model()))
    settings = PodSettings(limits=TenantLimits(("ghcr.io/",)))
    deployed = (DEPLOYMENTS, chat_deployment(*there))
    key, inputs = KEY, ServiceInputs()
    plan = decide_service(Snapshot(store(*there, deployed), NOW, inputs), key, settings)
    assert ready_outcome(plan) == ("Failed", "False", "ImageNotAllowed")
    assert list_applied(plan, DEPLOYMENTS) == []
    assert plan.delete == (), "what runs is not ended by an update of the controller"
    new = decide_service(Snapshot(store(*there), NOW, inputs), key, settings)
    assert list_applied(new, DEPLOYMENTS) == []
    assert list_applied(decide_service(Snapshot(store(*there), NOW, inputs), key), DEPLOYMENTS)


def test_deployment_of_another_namespace_is_no_child_whatever_owner_it_names() -> None:
    """Whoever knows the uid of a foreign service could else state how many replicas it has."""
    forged = chat_deployment(chat_service(), (MODELS, model()))
    forged["metadata"]["namespace"] = "thieves"
    plan = decide_chat(chat_service(suspend=True), (MODELS, model()), (DEPLOYMENTS, forged))
    assert plan.status is not None
    assert (plan.delete, plan.status["replicas"]) == ((), 0)
