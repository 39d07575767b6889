"""Services with companions of their Model (draft, projector, adapters), and the choice of the runtime."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from controller.hosts.secrets import list_needed_secrets
from controller.models.observation import models_of_service, models_served_beside, observe_model, read_placement
from controller.models.served import runtime_of
from controller.pod_settings import PodSettings
from controller.reconcile.plan import Plan, Snapshot
from controller.services.reconciler import decide_service
from controller.services.service_triggers import services_of_model
from controller.services.service_view import ServiceInputs
from crds.meta import Accelerator
from crds.model import Model
from devices.vendor_file import parse_vendors
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, MODELS, ObjectKey
from runtimes.registry import list_pod_engines
from tests.support.api_objects import (
    GIB,
    NOW,
    as_model,
    as_service,
    condition,
    host,
    model,
    planned_condition,
    service,
    store,
)
from tests.support.service_decisions import chat_service, decide_chat, list_applied

KEY = ObjectKey("team", "chat")
PARTS: dict[str, Any] = {
    "speculative": {"draftModelRef": "small", "maxTokens": 4},
    "projectorModelRef": "eyes",
    "adapters": [{"modelRef": "accent", "scale": "0.5"}],
}
SECRET = {"name": "hub"}


def named(name: str, *, status: Obj | None = None, **spec: Any) -> Obj:
    made = model(status=status, source=f"http://models.example/{name}.gguf", **spec)
    made["metadata"] |= {"name": name, "uid": f"uid-{name}"}
    return made


def others(**changes: Obj) -> list[Obj]:
    models = {
        "small": named("small"),
        "eyes": named("eyes", status={"sizeBytes": GIB, "gguf": {"architecture": "clip"}, "layout": None}),
        "accent": named("accent", sourceSecretRef=SECRET, status={"layout": None}),
    }
    return list((models | changes).values())


def decide(accelerator: Accelerator, *found: Obj, served: Obj | None = None, **spec: Any) -> Plan:
    asked = service(hardware={"accelerator": accelerator}, **spec)
    objects = [(MODELS, obj) for obj in (served or model(), *found)]
    cluster = store((INFERENCE_SERVICES, asked), (METAL_HOSTS, host(runtimes=["llama.cpp", "mlx-lm"])), *objects)
    return decide_service(Snapshot(cluster, NOW, ServiceInputs()), KEY)


def made(plan: Plan) -> Obj:
    """Return the spec of the only process that the plan creates."""
    ((resource, obj),) = plan.create
    assert resource == METAL_PROCESSES
    spec: Obj = obj["spec"]
    return spec


def told_why(plan: Plan) -> tuple[str, str]:
    ready = planned_condition(plan, "Ready")
    return ready["reason"], ready["message"]


def test_host_gets_each_companion_with_its_source_and_token() -> None:
    spec = made(decide("metal", *others(), **PARTS))
    further = spec["furtherArtifacts"]
    assert [(companion["role"], companion["artifact"]["source"].rpartition("/")[2]) for companion in further] == [
        ("draft", "small.gguf"),
        ("projector", "eyes.gguf"),
        ("adapter", "accent.gguf"),
    ]
    assert further[2]["scale"] == "0.5"
    assert further[2]["sourceSecret"] == "hub"
    assert "sourceSecret" not in further[0]
    assert further[0]["artifact"]["sha256"] == "a" * 64
    assert spec["draftMaxTokens"] == 4


def test_companions_count_for_memory() -> None:
    alone = made(decide("metal"))["memoryBytes"]
    projector = made(decide("metal", *others(), projectorModelRef="eyes"))["memoryBytes"]
    assert projector == alone + 2 * GIB  # its weights and its compute buffers
    draft = made(decide("metal", *others(), speculative={"draftModelRef": "small"}))["memoryBytes"]
    assert alone < draft < 2 * alone  # the engine itself counts once
    stated = others(small=named("small", memoryBytes=3 * GIB))
    assert made(decide("metal", *stated, speculative={"draftModelRef": "small"}))["memoryBytes"] == alone + 3 * GIB


@pytest.mark.parametrize(
    ("companion", "field", "status"),
    [
        ("small", {"speculative": {"draftModelRef": "small"}}, None),
        ("eyes", {"projectorModelRef": "eyes"}, {"gguf": {"architecture": "clip"}, "layout": None}),
    ],
)
def test_companion_whose_memory_is_understated_is_named(companion: str, field: Obj, status: Obj | None) -> None:
    stated = others(**{companion: named(companion, status=status, memoryBytes=7)})
    reason, message = told_why(decide("metal", *stated, **field))
    assert reason == "MemoryUnderstated"
    assert f"raise spec.memoryBytes of Model {companion}, which is 7 B, to " in message


def test_companion_of_unknown_size_is_named() -> None:
    unknown = others(small=named("small", status={"layout": None}))
    reason, message = told_why(decide("metal", *unknown, speculative={"draftModelRef": "small"}))
    assert reason == "MemoryUnknown"
    assert "the memory of Model small cannot be computed from its header: set its spec.memoryBytes" in message


def test_pod_mounts_each_companion_from_its_own_volume() -> None:
    plan = decide("cpu", *others(), **PARTS)
    ((_, deployment),) = [applied for applied in plan.apply if applied[0] == DEPLOYMENTS]
    pod = deployment["spec"]["template"]["spec"]
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert list(claims) == ["models", "part-1", "part-2", "part-3"]
    assert len(set(claims.values())) == 4
    (container,) = pod["initContainers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert (mounts["part-1"], mounts["part-3"]) == ("/parts/1", "/parts/3")
    rendered = " ".join(container["args"])
    assert "-md /parts/1/" in rendered
    assert "--mmproj /parts/2/" in rendered
    assert "--lora-scaled /parts/3/" in rendered
    assert ":0.5 " in rendered


def test_adapters_on_request_reach_host_and_pod_with_their_names() -> None:
    chosen: list[Obj] = [{"modelRef": "accent", "scale": "0.5", "onRequest": True}, {"modelRef": "always"}]
    further = made(decide("metal", *others(), named("always", status={"layout": None}), adapters=chosen))
    assert [artifact.get("requestName") for artifact in further["furtherArtifacts"]] == ["accent", None]
    assert further["features"] == ["AdaptersOnRequest"]
    assert "promptCache" not in further

    plan = decide("cpu", *others(), named("always", status={"layout": None}), adapters=chosen)
    ((_, deployment),) = [applied for applied in plan.apply if applied[0] == DEPLOYMENTS]
    pod = deployment["spec"]["template"]["spec"]
    assert re.search("--lora-scaled /parts/1/[^ ]+:0,/parts/2/[^ ]+:1 ", " ".join(pod["initContainers"][0]["args"]))
    assert "--adapter accent:0.5 --adapter :1 " in " ".join(pod["containers"][0]["args"])


def test_unusable_companion_blocks_the_service_and_is_named() -> None:
    assert told_why(decide("metal", projectorModelRef="eyes")) == (
        "ModelNotFound",
        "Model eyes does not exist in namespace team: create it, or edit spec.projectorModelRef",
    )
    waiting = named("small", status={"conditions": [condition("Ready", "False", "Inspecting", "being read")]})
    reason, message = told_why(decide("metal", waiting, speculative={"draftModelRef": "small"}))
    assert (reason, message) == ("ModelNotReady", "Model small: being read")
    remote = named("small", status={"conditions": [condition("Ready", "True"), condition("Cached", "False")]})
    assert told_why(decide("cpu", remote, speculative={"draftModelRef": "small"}))[0] == "Downloading"


@pytest.mark.parametrize(
    ("accelerator", "source", "spec", "says"),
    [
        ("metal", "hf://org/mlx-model", {"mode": "rerank"}, "runtime mlx-lm has no mode rerank"),
        ("metal", "hf://org/mlx-model", {"runtime": "llama.cpp"}, "set runtime to mlx-lm"),
        ("metal", "hf://org/m/m.gguf", {"runtime": "omlx"}, "runtime omlx cannot serve a GGUF file"),
        ("metal", "hf://org/m/m.gguf", {"runtime": "ollama", "cacheTypeK": "q8_0"}, "has no cacheTypeK q8_0"),
        ("metal", "hf://org/m/m.gguf", {"extraArgs": ["--max-tokens", "5"]}, "does not take --max-tokens"),
        (
            "metal",
            "hf://org/m/m.gguf",
            {"projectorModelRef": "small"},
            "names a model of architecture llama, not a proj",
        ),
        ("metal", "hf://org/m/m.gguf", {"adapters": [{"modelRef": "mlx"}]}, "name a Model of the same format"),
        ("cpu", "hf://org/m/m.gguf", {"adapters": [{"modelRef": "local"}]}, "cannot read file:///m.gguf of Model loca"),
    ],
)
def test_setting_that_the_runtime_lacks_is_reported(
    accelerator: Accelerator, source: str, spec: dict[str, Any], says: str
) -> None:
    mlx, local = named("mlx"), named("local")
    mlx["spec"]["source"], local["spec"]["source"] = "hf://org/mlx-adapter", "file:///m.gguf"
    reason, message = told_why(decide(accelerator, *others(), mlx, local, served=model(source=source), **spec))
    assert reason == "InvalidSpec"
    assert says in message


@pytest.mark.parametrize("accelerator", ["metal", "cpu"])
@pytest.mark.parametrize(
    ("header", "spec", "says"),
    [
        ({"modes": ["chat"]}, {"mode": "rerank"}, "would answer numbers without meaning"),
        ({"modes": ["chat"]}, {"mode": "embeddings"}, "set extraArgs to [--pooling, mean]"),
        ({"keyHeadSize": 80}, {"cacheTypeK": "q8_0"}, "blocks of 32 elements, which do not divide the heads of the mo"),
        ({}, {"cacheTypeV": "q8_0", "speculative": {"draftModelRef": "small"}}, "do not divide the heads of the draft"),
    ],
)
def test_what_the_header_rules_out_is_refused_before_anything_is_placed(
    accelerator: Accelerator, header: Obj, spec: Obj, says: str
) -> None:
    served = model()
    served["status"]["gguf"] |= header
    draft = named("small")
    draft["status"]["gguf"] = served["status"]["gguf"] | {"valueHeadSize": 16}
    reason, message = told_why(decide(accelerator, *others(small=draft), served=served, **spec))
    assert reason == "InvalidSpec"
    assert says in message


def test_weights_that_mlx_wrote_do_not_run_in_pods() -> None:
    served = model(source="hf://org/mlx-model")
    served["status"]["format"] = "mlx"
    reason, message = told_why(decide("cpu", *others(), served=served))
    assert reason == "InvalidSpec"
    assert "runtime mlx-lm does not run in pods, where accelerator cpu is" in message


def test_mlx_weights_are_served_by_mlx_lm() -> None:
    assert made(decide("metal", served=model(source="hf://org/mlx-model")))["runtime"] == "mlx-lm"
    assert made(decide("metal"))["runtime"] == "llama.cpp"


@pytest.mark.parametrize("runtime", ["auto", None])
@pytest.mark.parametrize(
    ("source", "accelerator", "chosen"),
    [
        ("hf://org/m/m.gguf", "cpu", "llama.cpp"),
        ("hf://org/m/m.gguf", "nvidia", "llama.cpp"),
        ("hf://org/m/m.gguf", "metal", "llama.cpp"),
        ("hf://org/weights", "cpu", "vllm"),
        ("hf://org/weights", "nvidia", "vllm"),
        ("hf://org/weights", "metal", "mlx-lm"),
        ("ollama://qwen3:8b", "nvidia", "ollama"),
        ("ollama://qwen3:8b", "metal", "ollama"),
    ],
)
def test_auto_and_no_runtime_leave_the_choice_to_pomona(
    runtime: str | None, source: str, accelerator: Accelerator, chosen: str
) -> None:
    asked = as_service(service(hardware={"accelerator": accelerator}, runtime=runtime))
    assert runtime_of(asked, as_model(model(source=source)), VENDORS) == chosen


def test_stated_runtime_is_that_of_the_service() -> None:
    assert runtime_of(as_service(service(runtime="sglang")), as_model(model()), VENDORS) == "sglang"


@pytest.mark.parametrize("spec", [{}, {"runtime": "auto"}], ids=["none", "auto"])
@pytest.mark.parametrize("images", ["sglang: a.example/sglang:1", "tgi: a.example/b:1, sglang: a.example/sglang:1"])
def test_engine_is_one_that_has_an_image_for_an_accelerator_of_the_vendors_file(spec: Obj, images: str) -> None:
    vendors = parse_vendors(f"acme: {{resource: a.example/npu, images: {{{images}}}}}\n", list_pod_engines())
    folder = model(source="hf://org/weights")
    folder["status"]["format"] = "safetensors"
    asked = chat_service(hardware={"accelerator": "acme"}, **spec)
    plan = decide_chat(asked, (MODELS, folder), settings=PodSettings("pomona:test", vendors=vendors))
    (deployment,) = list_applied(plan, DEPLOYMENTS)
    pod = deployment["spec"]["template"]["spec"]
    by_container = {container["name"]: container["image"] for container in (*pod["containers"], *pod["initContainers"])}
    assert by_container["sglang"] == "a.example/sglang:1"
    assert plan.status is not None
    assert plan.status["runtime"] == "sglang"


def test_service_and_companion_enqueue_each_other() -> None:
    chat = service(**PARTS)
    cluster = store((INFERENCE_SERVICES, chat))
    assert services_of_model(cluster, named("eyes")) == [KEY]
    assert services_of_model(cluster, named("other")) == []
    assert models_of_service(cluster, chat) == [ObjectKey("team", name) for name in ("accent", "eyes", "small", "tiny")]
    assert models_served_beside(cluster, model()) == [ObjectKey("team", name) for name in ("accent", "eyes", "small")]


@pytest.mark.parametrize(("accelerator", "consumer"), [("cpu", "cpu"), ("metal", None)])
def test_companion_is_cached_where_the_model_runs(accelerator: Accelerator, consumer: str | None) -> None:
    small = named("small", hardware={"accelerator": "nvidia"})
    served = model(hardware={"accelerator": accelerator})
    cluster = store(
        (INFERENCE_SERVICES, service(speculative={"draftModelRef": "small"})), (MODELS, served), (MODELS, small)
    )
    key = ObjectKey("team", "small")
    read = Snapshot(cluster, NOW).read(MODELS, key, Model)
    assert read is not None
    observed = observe_model(Snapshot(cluster, NOW), key, read).consumer
    assert (observed and observed.spec.hardware.accelerator) == consumer


@pytest.mark.parametrize(
    ("spec", "status", "consumer"),
    [
        ({"hardware": {"accelerator": "auto"}}, {}, None),
        ({"hardware": {"accelerator": "auto"}}, {"metal": 1, "amd": 0}, None),
        ({"hardware": {"accelerator": "auto"}}, {"metal": 1, "amd": 2}, "amd"),
        ({"scheduling": {"pools": ["metal", "amd"]}}, {"metal": 1}, None),
        ({"scheduling": {"pools": ["metal", "amd"]}}, {}, None),
        ({"hardware": {"accelerator": "nvidia"}}, {"metal": 1}, "nvidia"),
    ],
)
def test_weights_are_cached_for_pods_that_were_chosen(spec: Obj, status: Mapping[str, int], consumer: str) -> None:
    shares = [{"accelerator": name, **({"replicas": count} if count else {})} for name, count in status.items()]
    chat = service(**spec, status={"choice": {"accelerators": shares}} if status else {})
    cluster = store((INFERENCE_SERVICES, chat), (MODELS, model()))
    key = ObjectKey("team", "tiny")
    read = Snapshot(cluster, NOW).read(MODELS, key, Model)
    assert read is not None
    observed = observe_model(Snapshot(cluster, NOW), key, read).consumer
    assert (observed and observed.spec.hardware.accelerator) == consumer
    changed = chat | {"status": {**chat["status"], "phase": "Ready"}}
    assert read_placement(changed) == read_placement(chat)


def test_model_is_decided_again_when_pods_are_chosen() -> None:
    def chosen(**replicas: int) -> Obj:
        shares = [{"accelerator": name, "replicas": count} for name, count in replicas.items()]
        return service(hardware={"accelerator": "auto"}, status={"choice": {"accelerators": shares}})

    assert read_placement(chosen(metal=1)) == read_placement(chosen(metal=2))
    assert read_placement(chosen(metal=1)) != read_placement(chosen(metal=1, amd=1))
    assert read_placement(chosen(amd=1)) != read_placement(chosen(amd=2)), "copies on nodes are as many as pods"


def test_host_gets_the_download_tokens_of_companions() -> None:
    ((_, process),) = decide("metal", *others(), **PARTS).create
    process["spec"]["hostName"] = "studio-1"
    process["metadata"].setdefault("namespace", "team")
    needed = list_needed_secrets([process])
    assert {secret.name for secret in needed} == {"chat-token", "hub"}
