import re
from typing import Any

import msgspec
import pytest

from controller import services
from controller.plan import FIELD_MANAGER, Key, Plan, Snapshot
from controller.readiness import Prober
from controller.services import Facts, examine
from crds.model import Layout
from fitness.memory import estimate
from fitness.parts import Settings
from kube.client import Client, Obj
from kube.errors import NotFound
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
    Resource,
)
from runtimes.probe import Probe
from tests.serving import GIB, NOW, as_service, condition, host, model, process, service, slice_of, store, told

KEY = Key("team", "chat")
OK = Probe(ok=True, reason="Generated", message="http://10.77.0.100:18000 generated a token")
METAL = {"hardware": {"accelerator": "metal"}}
SERVING: Obj = {"conditions": [condition("Ready", "True", "Serving", "generated a token")]}
SHORT = [condition("Ready", "True", "LeaseRenewed"), condition("MemoryPressure", "True", "MemoryPressure")]
DISPLACED = [condition("DisruptionTarget", "True", "MemoryPressure")]


def decide(*objects: tuple[Resource, Obj], answer: Probe | None = None, new_token: str | None = None) -> Plan:
    """Decide about `chat` with an answer to whatever is to be asked."""
    known = store(*objects)
    snapshot = Snapshot(known, NOW)
    chat = as_service(snapshot.get(INFERENCE_SERVICES, KEY) or service())
    question = examine(snapshot, KEY, chat).question
    facts = Facts(question, answer if question else None, new_token)
    return services.decide(Snapshot(known, NOW, facts), KEY)


def chat(**spec: Any) -> tuple[Resource, Obj]:
    return INFERENCE_SERVICES, service(**spec)


def applied(plan: Plan, resource: Resource) -> list[Obj]:
    return [obj for kind, obj in plan.apply if kind == resource]


def ready(plan: Plan) -> tuple[str, str, str]:
    condition = told(plan, "Ready")
    assert plan.status is not None
    return plan.status["phase"], condition["status"], condition["reason"]


def deployed(*objects: tuple[Resource, Obj], ready: int = 1, replicas: int = 1, updated: int | None = None) -> Obj:
    """The Deployment of what is to be served, as it is after it was applied."""
    (desired,) = applied(decide(*objects), DEPLOYMENTS)
    metadata = desired["metadata"] | {
        "uid": "uid-deployment",
        "generation": 1,
        "resourceVersion": "1",
        "managedFields": [{"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}}],
    }
    status = {
        "observedGeneration": 1,
        "replicas": replicas,
        "updatedReplicas": replicas if updated is None else updated,
        "readyReplicas": ready,
    }
    return desired | {"metadata": metadata, "status": status}


def pod(name: str = "chat-1", *, ready: bool = True, **status: Any) -> Obj:
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "labels": {"inference.pomona.dev/service": "chat"},
        },
        "status": {"conditions": [{"type": "Ready", "status": str(ready)}], **status},
    }


def bound(phase: str = "Ready", **fields: Any) -> tuple[Resource, Obj]:
    """The process that `chat` on metal makes, on studio-1."""
    ((_, made),) = decide(chat(**METAL), (MODELS, model()), (METAL_HOSTS, host())).create
    return METAL_PROCESSES, process(made["metadata"]["name"], host="studio-1", phase=phase, **fields)


def test_the_service_and_its_token_are_there_from_the_first_moment() -> None:
    plan = decide(chat(), new_token="s3cret")
    assert [resource for resource, _ in plan.create] == [SECRETS]
    assert len(applied(plan, SERVICES)) == 1
    assert decide(chat()).create == ()
    assert plan.status is not None
    assert plan.status["endpoint"] == "http://chat.team.svc:8080/v1"
    assert plan.status["selector"] == "inference.pomona.dev/service=chat"
    assert plan.status["observedGeneration"] == 1


def test_a_missing_model_is_named() -> None:
    plan = decide(chat())
    assert ready(plan) == ("Pending", "False", "ModelNotFound")
    assert "Model tiny" in told(plan, "Ready")["message"]
    assert told(plan, "ModelReady")["reason"] == "ModelNotFound"


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
    plan = decide(chat(), (MODELS, model(status=status)))
    assert applied(plan, DEPLOYMENTS) == []
    assert ready(plan) == (expected[0], "False", expected[1])
    if phase == "Failed":
        assert conditions[-1]["message"] in told(plan, "Ready")["message"], "the Model's own words"


def test_hosts_do_not_wait_for_a_volume_nor_for_its_failures() -> None:
    for status in (
        {"conditions": [condition("Ready", "True"), condition("Cached", "False")]},
        {"phase": "Failed", "conditions": [condition("Ready", "True"), condition("Cached", "False")]},
    ):
        plan = decide(chat(**METAL), (MODELS, model(status=status)), (METAL_HOSTS, host()))
        assert [resource for resource, _ in plan.create] == [METAL_PROCESSES]


@pytest.mark.parametrize(
    ("spec", "source", "says"),
    [
        ({}, "file:///m.gguf", "hardware.accelerator to metal"),
        ({"resources": {"gpu": 1}}, "http://x.example/m.gguf", "resources.gpu is 1"),
        (METAL | {"resources": {"gpu": 1}}, "http://x.example/m.gguf", "resources.gpu is 1"),
        (METAL | {"image": "a", "nodeSelector": {"a": "b"}}, "http://x.example/m.gguf", "image and nodeSelector"),
        (METAL | {"tolerations": [{"key": "a"}]}, "http://x.example/m.gguf", "tolerations"),
    ],
)
def test_a_contradiction_is_explained(spec: Obj, source: str, says: str) -> None:
    plan = decide(chat(**spec), (MODELS, model(source=source, memoryBytes=1)))
    assert ready(plan) == ("Failed", "False", "InvalidSpec")
    assert says in told(plan, "Ready")["message"]
    assert plan.create == ()
    assert applied(plan, DEPLOYMENTS) == []


@pytest.mark.parametrize("layers", [None, 1 << 44], ids=["not told", "beyond a status"])
def test_a_size_that_is_not_known_is_not_guessed(layers: int | None) -> None:
    unknown = model(status={"layout": None})
    if layers is not None:
        unknown = model()
        unknown["status"]["layout"]["layers"][0]["count"] = layers
    assert ready(decide(chat(**METAL), (MODELS, unknown))) == ("Failed", "False", "MemoryUnknown")
    plan = decide(chat(**METAL), (MODELS, unknown | {"spec": unknown["spec"] | {"memoryBytes": 5 * GIB}}))
    assert plan.create[0][1]["spec"]["memoryBytes"] == 5 * GIB
    assert applied(decide(chat(resources={"memory": "4Gi"}), (MODELS, unknown)), DEPLOYMENTS)


def test_a_pod_asks_for_the_memory_that_the_header_tells() -> None:
    (obj,) = applied(decide(chat(contextLength=1024, parallel=2), (MODELS, model())), DEPLOYMENTS)
    requests = obj["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    layout = msgspec.convert(model()["status"]["layout"], Layout)
    needed = estimate(layout, Settings(context_length=1024, parallel=2))
    assert needed
    assert int(requests["memory"]) == needed.total_bytes > GIB


def test_the_models_accelerator_is_the_default() -> None:
    plan = decide(chat(), (MODELS, model(hardware={"accelerator": "metal"})), (METAL_HOSTS, host()))
    assert [resource for resource, _ in plan.create] == [METAL_PROCESSES]
    assert plan.status is not None
    assert plan.status["accelerator"] == "metal"


def test_ready_needs_a_token_and_not_just_ready_pods() -> None:
    base = (chat(), (MODELS, model()))
    there = (*base, (DEPLOYMENTS, deployed(*base)), (PODS, pod()))
    assert ready(decide(*there)) == ("Progressing", "False", "NoEndpoints")
    offered = (*there, (ENDPOINT_SLICES, slice_of("chat", "x")))
    assert ready(decide(*offered)) == ("Progressing", "False", "Probing")
    assert ready(decide(*offered, answer=OK)) == ("Ready", "True", "Serving")
    refused = Probe(ok=False, reason="Unauthorized", message="http://10.77.0.100:18000 answered 401")
    assert ready(decide(*offered, answer=refused)) == ("Progressing", "False", "Unauthorized")


def test_fewer_replicas_that_answer_are_degraded_with_the_cause() -> None:
    base = (chat(replicas=2), (MODELS, model()))
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    plan = decide(
        *base,
        (DEPLOYMENTS, deployed(*base, replicas=2, ready=1)),
        (PODS, pod("chat-1")),
        (PODS, pod("chat-2", ready=False, conditions=[unschedulable])),
        (ENDPOINT_SLICES, slice_of("chat", "x")),
        answer=OK,
    )
    assert ready(plan) == ("Degraded", "True", "Serving")
    assert "1 of 2 replicas are ready: pod chat-2: 0/3 nodes" in told(plan, "Ready")["message"]
    assert plan.status is not None
    assert (plan.status["replicas"], plan.status["readyReplicas"]) == (2, 1)


def waiting(reason: str, **last: Any) -> Obj:
    state = {"waiting": {"reason": reason, "message": "back-off 10s"}}
    return {"containerStatuses": [{"name": "llama-server", "state": state, **last}]}


@pytest.mark.parametrize(
    ("status", "expected", "says"),
    [
        (waiting("ImagePullBackOff"), ("Failed", "ImagePullBackOff"), "back-off 10s"),
        (
            waiting(
                "CrashLoopBackOff",
                lastState={"terminated": {"exitCode": 1, "reason": "Error", "message": "invalid magic"}},
            ),
            ("Failed", "CrashLoopBackOff"),
            "llama-server ended with exit code 1: invalid magic",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": "llama-server",
                        "state": {"running": {}},
                        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                    }
                ]
            },
            ("Progressing", "Restarting"),
            "exit code 137 (OOMKilled)",
        ),
        ({}, ("Progressing", "Progressing"), "0 of 1 replicas are ready"),
    ],
)
def test_what_keeps_a_pod_from_serving_is_told(status: Obj, expected: tuple[str, str], says: str) -> None:
    base = (chat(), (MODELS, model()))
    there = deployed(*base, ready=0)
    plan = decide(*base, (DEPLOYMENTS, there), (PODS, pod(ready=False, **status)))
    assert ready(plan) == (expected[0], "False", expected[1])
    assert says in told(plan, "Ready")["message"]


def test_a_quota_that_refuses_pods_is_told() -> None:
    base = (chat(), (MODELS, model()))
    there = deployed(*base, ready=0)
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: q"}
    there["status"]["conditions"] = [failure]
    assert ready(decide(*base, (DEPLOYMENTS, there))) == ("Failed", "False", "FailedCreate")


def test_while_an_edit_rolls_out_the_old_answer_is_of_the_old_generation() -> None:
    old = (chat(), (MODELS, model()))
    there = ((DEPLOYMENTS, deployed(*old)), (PODS, pod()), (ENDPOINT_SLICES, slice_of("chat", "x")))
    edited = (chat(generation=2, contextLength=8192, status=SERVING), (MODELS, model()))
    plan = decide(*edited, *there, answer=OK)
    assert ready(plan) == ("Progressing", "True", "Progressing")
    assert told(plan, "Ready")["observedGeneration"] == 1
    rolling = deployed(*edited, replicas=2, updated=1, ready=1)
    assert ready(decide(*edited, (DEPLOYMENTS, rolling), *there[1:], answer=OK))[0] == "Progressing"
    asked = decide(*edited, (DEPLOYMENTS, deployed(*edited)), *there[1:])
    assert ready(asked) == ("Progressing", "True", "Probing")
    assert told(asked, "Ready")["observedGeneration"] == 1
    done = decide(*edited, (DEPLOYMENTS, deployed(*edited)), *there[1:], answer=OK)
    assert ready(done) == ("Ready", "True", "Serving")
    assert told(done, "Ready")["observedGeneration"] == 2


def test_another_endpoint_is_asked_while_the_last_answer_stands() -> None:
    base = (chat(status=SERVING), (MODELS, model()))
    there = ((DEPLOYMENTS, deployed(*base)), (PODS, pod()), (ENDPOINT_SLICES, slice_of("chat", "x")))
    assert ready(decide(*base, *there)) == ("Ready", "True", "Serving")


def with_certificate(name: str) -> Obj:
    secured = slice_of("chat", name)
    return secured | {"ports": [port | {"appProtocol": "https"} for port in secured["ports"]]}


def test_clients_are_told_of_https_where_all_endpoints_serve_it_and_after_they_are_gone() -> None:
    base = (chat(), (MODELS, model()))
    there = (*base, (DEPLOYMENTS, deployed(*base)), (PODS, pod()))
    first, second = ((ENDPOINT_SLICES, with_certificate(name)) for name in ("x", "y"))
    plan = decide(*there, first, second, answer=OK)
    assert plan.status is not None
    assert plan.status["endpoint"] == "https://chat.team.svc:8080/v1"
    alone = decide(chat(status={"endpoint": plan.status["endpoint"]}), (MODELS, model()))
    assert alone.status is not None
    assert alone.status["endpoint"] == "https://chat.team.svc:8080/v1"


def test_hosts_with_and_without_a_certificate_are_a_mixture_that_is_told() -> None:
    base = (chat(), (MODELS, model()))
    mixed = ((ENDPOINT_SLICES, with_certificate("x")), (ENDPOINT_SLICES, slice_of("chat", "y")))
    plan = decide(*base, (DEPLOYMENTS, deployed(*base)), (PODS, pod()), *mixed, answer=OK)
    assert ready(plan) == ("Degraded", "True", "Serving")
    assert "some http: give the agent of y a --tls-certificate too" in told(plan, "Ready")["message"]
    assert plan.status is not None
    assert plan.status["endpoint"].startswith("http://")


def test_what_serves_goes_on_while_its_model_is_gone() -> None:
    old = (chat(), (MODELS, model()))
    there = ((DEPLOYMENTS, deployed(*old)), (PODS, pod()), (ENDPOINT_SLICES, slice_of("chat", "x")))
    plan = decide(chat(status=SERVING), *there)
    assert plan.delete == ()
    assert ready(plan) == ("Degraded", "True", "ModelNotFound")


@pytest.mark.parametrize(("spec", "reason"), [({"suspend": True}, "Suspended"), ({"replicas": 0}, "ScaledToZero")])
def test_nothing_runs_that_is_not_wanted_and_the_address_stays(spec: Obj, reason: str) -> None:
    old = (chat(), (MODELS, model()))
    plan = decide(chat(**spec), (MODELS, model()), (DEPLOYMENTS, deployed(*old)), (PODS, pod()))
    assert [each.resource for each in plan.delete] == [DEPLOYMENTS]
    assert [resource for resource, _ in plan.apply] == [SERVICES]
    assert ready(plan) == ("Suspended", "False", reason)
    gone = decide(chat(**spec), (DEPLOYMENTS, deployed(*old)))
    assert [each.resource for each in gone.delete] == [DEPLOYMENTS], "a Model is not needed to stop"


def test_a_change_of_accelerator_replaces_one_kind_by_the_other() -> None:
    pods = (chat(), (MODELS, model()))
    plan = decide(chat(**METAL), (MODELS, model()), (METAL_HOSTS, host()), (DEPLOYMENTS, deployed(*pods)))
    assert plan.delete == (), "it serves until the other does"
    assert [resource for resource, _ in plan.create] == [METAL_PROCESSES]
    moved = decide(chat(**METAL), (MODELS, model()), (METAL_HOSTS, host()), (DEPLOYMENTS, deployed(*pods)), bound())
    assert [each.resource for each in moved.delete] == [DEPLOYMENTS]
    on_metal = ((MODELS, model()), bound(), (METAL_HOSTS, host()))
    back = decide(chat(), *on_metal)
    assert back.delete == ()
    assert applied(back, DEPLOYMENTS)
    assert ready(back)[1] == "False", "what answers is of another kind than wanted"
    moved = decide(chat(), *on_metal, (DEPLOYMENTS, deployed(*pods)), (PODS, pod()))
    assert [each.resource for each in moved.delete] == [METAL_PROCESSES]
    stopped = decide(chat(suspend=True), *on_metal, (DEPLOYMENTS, deployed(*pods)))
    assert {each.resource for each in stopped.delete} == {METAL_PROCESSES, DEPLOYMENTS}


def test_while_its_model_is_gone_a_service_is_scaled_down_and_not_up() -> None:
    there = (DEPLOYMENTS, deployed(chat(replicas=3), (MODELS, model())))
    (patch,) = decide(chat(replicas=1), there).patch
    assert (patch.ref.resource, patch.ref.name) == (DEPLOYMENTS, "chat")
    assert patch.operations[-1] == {"op": "replace", "path": "/spec/replicas", "value": 1}
    assert decide(chat(replicas=3), there).patch == ()
    assert decide(chat(replicas=4), there).patch == ()


def test_memory_of_zero_is_what_was_said() -> None:
    (obj,) = applied(decide(chat(resources={"memory": 0}), (MODELS, model())), DEPLOYMENTS)
    assert obj["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"] == {"memory": "0"}


def test_one_host_or_process_in_unknown_words_stops_no_service() -> None:
    odd = process("new-0", host="studio-1", phase="Hibernating", priority="cosmic")
    plan = decide(
        chat(**METAL), (MODELS, model()), (METAL_HOSTS, host(runtimes="all")), bound(), (METAL_PROCESSES, odd)
    )
    assert plan.status is not None
    assert plan.status["readyReplicas"] == 1
    assert (plan.create, plan.delete) == ((), ()), "a host that cannot be read is not lost"


class TokenSecret(Client):
    """Has one Secret, or none."""

    def __init__(self, owner_uid: str | None) -> None:
        self.owner_uid = owner_uid

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert (resource, name, namespace) == (SECRETS, "chat-token", "team")
        if self.owner_uid is None:
            raise NotFound("get", status=404)
        return {"metadata": {"name": name, "ownerReferences": [{"uid": self.owner_uid, "controller": True}]}}


@pytest.mark.parametrize(("owner_uid", "made"), [("uid-chat", False), ("uid-other", True), (None, True)])
async def test_a_token_of_another_is_not_taken_for_its_own(owner_uid: str | None, *, made: bool) -> None:
    observe = services.kind(Prober()).observe
    assert observe is not None
    facts = await observe(TokenSecret(owner_uid), Snapshot(store(chat()), NOW), KEY)
    assert bool(facts.new_token) == made


def test_a_process_that_answers_makes_the_service_ready() -> None:
    there = (chat(**METAL), (MODELS, model()), (METAL_HOSTS, host()), bound(), (ENDPOINT_SLICES, slice_of("chat", "x")))
    plan = decide(*there, answer=OK)
    assert ready(plan) == ("Ready", "True", "Serving")
    assert (plan.create, plan.delete) == ((), ())


@pytest.mark.parametrize(
    ("hosts", "expected", "says"),
    [
        ([], ("Pending", "NoHost"), "pomona agent"),
        ([host(ready="False")], ("Pending", "NoHost"), "no live host"),
        ([host(runtimes=["mlx"])], ("Pending", "NoHost"), "llama.cpp"),
        (
            [host(free_bytes=GIB), host("studio-2", GIB // 2)],
            ("Pending", "NoHostFits"),
            "studio-1, has 1.0 GiB, 1.0 GiB too few",
        ),
        ([host()], ("Pending", "Binding"), "studio-1"),
        ([host(conditions=SHORT)], ("Pending", "MemoryPressure"), "host studio-1 is short of memory"),
        (
            [host(conditions=SHORT), host("studio-2", GIB)],
            ("Pending", "NoHostFits"),
            "studio-2, has 1.0 GiB, 1.0 GiB too few: free some there; ",
        ),
    ],
)
def test_a_process_without_a_host_says_what_it_waits_for(
    hosts: list[Obj], expected: tuple[str, str], says: str
) -> None:
    base = (chat(**METAL), (MODELS, model()), *((METAL_HOSTS, each) for each in hosts))
    ((_, made),) = decide(*base).create
    plan = decide(*base, (METAL_PROCESSES, process(made["metadata"]["name"], gib=2)))
    assert ready(plan) == (expected[0], "False", expected[1])
    assert says in told(plan, "Ready")["message"]
    if expected[1] == "NoHostFits":
        assert "needs 2.0 GiB (1.0 GiB weights, " in told(plan, "Ready")["message"]


@pytest.mark.parametrize(
    ("fields", "free_bytes", "says"),
    [
        ({"contextLength": 1_048_576}, 2 * GIB, r"a contextLength of \d{6} would fit"),
        (
            {"contextLength": 1_048_576},
            GIB,
            r"a quantization with weights of at most \d\d% of the size and a context.*",
        ),
        ({"contextLength": 8192}, 2**26, r"no quantization of this model would fit: .*"),
    ],
)
def test_what_would_fit_is_told(fields: Obj, free_bytes: int, says: str) -> None:
    made, small = chat(**METAL, **fields), host(free_bytes=free_bytes)
    ((_, waiting),) = decide(made, (MODELS, model()), (METAL_HOSTS, small)).create
    there = process(waiting["metadata"]["name"], memoryBytes=waiting["spec"]["memoryBytes"])
    message = told(decide(made, (MODELS, model()), (METAL_HOSTS, small), (METAL_PROCESSES, there)), "Ready")["message"]
    assert re.search(f": free some there; {says}$", message), message


def test_who_stated_the_memory_knows_what_it_is_made_of() -> None:
    stated = model(memoryBytes=2 * GIB)
    ((_, waiting),) = decide(chat(**METAL), (MODELS, stated)).create
    there = (METAL_PROCESSES, process(waiting["metadata"]["name"], gib=2))
    message = told(decide(chat(**METAL), (MODELS, stated), (METAL_HOSTS, host(free_bytes=GIB)), there), "Ready")[
        "message"
    ]
    assert "a replica needs 2.0 GiB; the host" in message
    assert message.endswith("free some there; lower contextLength or parallel")


@pytest.mark.parametrize(
    ("phase", "fields", "expected", "says"),
    [
        ("Failed", {"reason": "CrashLoop", "message": "bad magic"}, ("Failed", "CrashLoop"), "studio-1: bad magic"),
        ("Failed", {}, ("Failed", "ProcessFailed"), "studio-1"),
        (
            "Fetching",
            {"progress": {"bytes": GIB, "totalBytes": 4 * GIB}},
            ("Downloading", "Fetching"),
            "1.0 GiB of 4.0 GiB",
        ),
        ("Starting", {}, ("Progressing", "Starting"), "0 of 1 replicas are ready"),
    ],
)
def test_what_keeps_a_process_from_serving_is_told(
    phase: str, fields: Obj, expected: tuple[str, str], says: str
) -> None:
    plan = decide(chat(**METAL), (MODELS, model()), (METAL_HOSTS, host()), bound(phase, **fields))
    assert ready(plan) == (expected[0], "False", expected[1])
    assert says in told(plan, "Ready")["message"]


def test_a_rejection_by_the_only_host_is_told_with_its_words() -> None:
    rejected = bound("Rejected", message="needs 9.0 GiB")
    base = (chat(**METAL), (MODELS, model()), (METAL_HOSTS, host()), rejected)
    ((_, made),) = decide(*base).create
    plan = decide(*base, (METAL_PROCESSES, process(made["metadata"]["name"])))
    assert ready(plan) == ("Failed", "False", "Rejected")
    assert "host studio-1 rejected it: needs 9.0 GiB" in told(plan, "Ready")["message"]


def test_a_process_that_has_to_move_counts_while_it_answers() -> None:
    there = (chat(**METAL, status=SERVING), (MODELS, model()), (ENDPOINT_SLICES, slice_of("chat", "x")))
    hosts = ((METAL_HOSTS, host(conditions=SHORT)), (METAL_HOSTS, host("studio-2")))
    asked = decide(*there, *hosts, bound(conditions=DISPLACED), answer=OK)
    assert [resource for resource, _ in asked.create] == [METAL_PROCESSES]
    assert ready(asked) == ("Ready", "True", "Serving")
    assert asked.status
    assert asked.status["readyReplicas"] == 1


def test_a_process_that_was_evicted_says_what_it_waits_for() -> None:
    there = (chat(**METAL), (MODELS, model()), (METAL_HOSTS, host(conditions=SHORT)))
    evicted = bound("Pending", reason="MemoryPressure", conditions=DISPLACED)
    ((_, made),) = decide(*there, evicted).create
    plan = decide(*there, evicted, (METAL_PROCESSES, process(made["metadata"]["name"], gib=2)))
    assert (plan.create, plan.delete) == ((), ())
    assert ready(plan) == ("Pending", "False", "MemoryPressure")
    assert "no other host can run it" in told(plan, "Ready")["message"]


def test_a_lost_host_serves_nothing_any_more() -> None:
    plan = decide(chat(**METAL, status=SERVING), (MODELS, model()), (METAL_HOSTS, host(ready="False")), bound())
    assert len(plan.create) == 1
    assert plan.status is not None
    assert plan.status["readyReplicas"] == 0
    assert told(plan, "Ready")["status"] == "False"


def test_an_answer_to_another_question_is_none() -> None:
    there = (chat(**METAL), (MODELS, model()), (METAL_HOSTS, host()), bound(), (ENDPOINT_SLICES, slice_of("chat", "x")))
    snapshot = Snapshot(store(*there), NOW, Facts(None, OK, None))
    assert told(services.decide(snapshot, KEY), "Ready")["reason"] == "Probing"


def test_a_service_that_is_gone_or_going_needs_nothing() -> None:
    assert decide() == Plan()
    going = service()
    going["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    assert decide((INFERENCE_SERVICES, going), (MODELS, model())) == Plan()


def test_events_tell_of_changes_once() -> None:
    plan = decide(chat())
    assert [event.reason for event in plan.events] == ["ModelNotFound"]
    told_before = {"conditions": [told(plan, "Ready") | {"lastTransitionTime": "2026-11-21T11:00:00Z"}]}
    assert decide(chat(status=told_before)).events == ()
