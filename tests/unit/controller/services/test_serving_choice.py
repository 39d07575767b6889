"""The choice of serving options is made once for a spec and a Model, by the machines that the service may use."""

from typing import Any, Final

import msgspec
import pytest
from msgspec import structs

from controller.models.served import Served
from controller.pod_settings import PodSettings
from controller.reconcile.plan import Snapshot
from controller.services.checked_replica import read_models
from controller.services.replica_memory import measure_replica
from controller.services.serving_choice import apply_choice, choose_for_host, choose_serving
from crds.inferenceservice import InferenceService
from crds.serving import ServingChoice
from crds.size import GIB, MIB
from crds.weights_header import Layout
from kube.client import Obj
from kube.resources import (
    ACCELERATOR_POOLS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    MODELS,
    NODES,
    PODS,
    Resource,
)
from tests.support.api_objects import NOW, as_model, as_service, host, model, planned_condition, pool, service, store
from tests.support.service_decisions import METAL, SETTINGS, decide_chat, ready_outcome
from tests.unit.fitness.test_serving_defaults import LLAMA_8B, QWEN_27B_HYBRID

World = tuple[tuple[Resource, Obj], ...]
NVIDIA: Final[Obj] = {"hardware": {"accelerator": "nvidia"}}
L4, H100 = 24_576, 81_559
"""MiB of their memory."""


def inspected(
    layout: Any = LLAMA_8B, *, trained: int | None = 131_072, name: str = "tiny", **spec: Any
) -> tuple[Resource, Obj]:
    """Return a Model, inspected, with this layout."""
    status = {"layout": msgspec.to_builtins(layout), "gguf": {"architecture": "llama", "contextLength": trained}}
    status |= {"sizeBytes": spec.pop("sizeBytes")} if "sizeBytes" in spec else {}
    made = model(status=status, **spec)
    made["metadata"]["name"] = name
    return MODELS, made


def gpu_node(name: str, mib: int | None, memory: str = "256Gi", **labels: str) -> tuple[Resource, Obj]:
    stated = {"nvidia.com/gpu.memory": str(mib)} if mib is not None else {}
    return plain_node(name, memory, {"nvidia.com/gpu": "8"}, **stated, **labels)


def plain_node(name: str, memory: str, devices: Obj | None = None, **labels: str) -> tuple[Resource, Obj]:
    metadata = {"name": name, "uid": name, "resourceVersion": "1", "labels": labels}
    return NODES, {"metadata": metadata, "spec": {}, "status": {"allocatable": {"memory": memory, **(devices or {})}}}


def mac(name: str, gib: int, **labels: str) -> tuple[Resource, Obj]:
    machine = host(name, gib * GIB, budgetBytes=gib * GIB, runtimes=["llama.cpp", "mlx-lm"])
    machine["metadata"]["labels"] = labels
    return METAL_HOSTS, machine


def choose(
    *world: tuple[Resource, Obj], last: InferenceService | None = None, settings: PodSettings = SETTINGS, **spec: Any
) -> InferenceService:
    """Return the service `chat` with its choice; `last` is the service of the choice before."""
    kept = store(*world)
    chat = as_service(service(**spec))
    if last is not None:
        chat = structs.replace(chat, status=last.status)

    return choose_serving(kept, chat, *read_models(Snapshot(kept, NOW), chat), settings)


def summarize(chosen: InferenceService) -> tuple[int | None, int | None, Any]:
    return chosen.spec.context_length, chosen.spec.parallel, chosen.spec.prompt_cache


def is_kept(chosen: InferenceService) -> bool:
    return chosen.status.serving is not None and chosen.status.serving.inputs != ""


def test_choice_is_applied_to_the_spec_and_shown_in_the_status() -> None:
    chosen = choose(inspected(), gpu_node("a", L4), **NVIDIA)
    assert summarize(chosen) == (32_768, 4, "4096Mi")
    serving = chosen.status.serving
    assert serving is not None
    assert (serving.context_length, serving.parallel, serving.prompt_cache) == (32_768, 4, "4096Mi")
    assert serving.message == (
        "contextLength 32768: the most that is chosen of 131072; parallel 4: so many whole contexts fit"
    )
    assert is_kept(chosen)
    plan = decide_chat((INFERENCE_SERVICES, service(**NVIDIA)), inspected(), gpu_node("a", L4))
    assert plan.status is not None
    assert msgspec.convert(plan.status["serving"], ServingChoice) == serving


@pytest.mark.parametrize(
    "later",
    [
        (),
        (gpu_node("a", H100),),
        (gpu_node("a", L4), gpu_node("b", H100)),
        (gpu_node("a", None),),
    ],
    ids=["none", "larger", "one more", "unknown"],
)
def test_choice_stays_whatever_machines_come_and_go(later: World) -> None:
    first = choose(inspected(), gpu_node("a", L4), **NVIDIA)
    assert choose(inspected(), *later, last=first, **NVIDIA) == first
    on_hosts = choose(inspected(), mac("small", 16), **METAL)
    assert choose(inspected(), mac("large", 400), last=on_hosts, **METAL) == on_hosts


@pytest.mark.parametrize(
    "edit",
    [
        {"replicas": 5},
        {"suspend": True},
        {"drainSeconds": 30},
        {"priority": "high"},
        {"evictionProtection": True},
        {"tolerations": [{"key": "gpu"}]},
        {"benchmark": {"warmupIterations": 1}},
    ],
    ids=lambda edit: next(iter(edit)),
)
def test_edit_on_which_the_choice_does_not_depend_keeps_it(edit: Obj) -> None:
    first = choose(inspected(), gpu_node("a", L4), **NVIDIA)
    edited = choose(inspected(), gpu_node("a", L4), gpu_node("b", H100), last=first, **NVIDIA, **edit)
    assert edited.status == first.status
    assert summarize(edited) == summarize(first)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"nodeSelector": {"zone": "large"}}, (65_536, 4, "4096Mi")),
        ({"hardware": {"accelerator": "nvidia", "count": 2}}, (65_536, 4, "4096Mi")),
        # The device of 24 GiB holds so long a context, too, but not four of them.
        ({"resources": {"memory": "12Gi"}}, (65_536, None, "2641Mi")),
        ({"cacheTypeK": "q8_0"}, (65_536, None, "3136Mi")),
        # Those that are stated stay as they are.
        ({"contextLength": 16_384}, (16_384, 4, "4096Mi")),
        ({"contextLength": 5000}, (5000, 4, "1280Mi")),
        ({"parallel": 1}, (65_536, 1, "4096Mi")),
        ({"parallel": 64}, (8192, 64, "2048Mi")),
        ({"promptCache": "1Gi"}, (65_536, None, "1Gi")),
        ({"promptCache": 0}, (65_536, None, 0)),
        ({"contextLength": 512, "parallel": 3, "promptCache": "0"}, (512, 3, "0")),
    ],
    ids=str,
)
def test_edit_on_which_the_choice_depends_chooses_anew(edit: Obj, expected: tuple[int, int, str]) -> None:
    first = choose(inspected(), gpu_node("a", L4), **NVIDIA)
    large = gpu_node("b", H100, zone="large")
    edited = choose(inspected(), gpu_node("a", L4), large, last=first, **(NVIDIA | edit))
    assert summarize(edited) == expected
    assert edited.status.serving is not None
    assert edited.status.serving.context_length == expected[0]


@pytest.mark.parametrize(
    "changed",
    [
        inspected(sizeBytes=5),
        inspected(trained=8192),
        inspected(source="http://models.example/other.gguf"),
        inspected(memoryBytes=8 * GIB),
    ],
    ids=["size", "trained context", "source", "stated memory"],
)
def test_other_weights_choose_anew(changed: tuple[Resource, Obj]) -> None:
    first = choose(inspected(), gpu_node("a", L4), **NVIDIA)
    again = choose(changed, gpu_node("a", L4), last=first, **NVIDIA)
    assert first.status.serving is not None
    assert again.status.serving is not None
    assert again.status.serving.inputs != first.status.serving.inputs
    same = choose(inspected(), gpu_node("a", H100), last=first, **NVIDIA)
    assert same == first, "another license or revision is no reason"
    better_read = choose(inspected(QWEN_27B_HYBRID), gpu_node("a", H100), last=first, **NVIDIA)
    assert better_read.status == first.status, "nor is a header of which more is known"


def test_last_choice_stays_while_nothing_is_known_of_the_model() -> None:
    first = choose(inspected(), gpu_node("a", L4), **NVIDIA)
    assert choose(gpu_node("a", H100), last=first, **NVIDIA) == first
    unknown = model()
    unknown["status"] = {}
    assert choose((MODELS, unknown), gpu_node("a", H100), last=first, **NVIDIA) == first
    new = choose((MODELS, unknown), gpu_node("a", H100), **NVIDIA)
    assert (summarize(new), new.status.serving) == ((None, None, None), None)


@pytest.mark.parametrize(
    ("world", "spec"),
    [
        ((), NVIDIA),
        ((), METAL),
        ((gpu_node("a", None),), NVIDIA),
        ((gpu_node("a", L4),), NVIDIA | {"nodeSelector": {"zone": "nowhere"}}),
        ((gpu_node("a", L4),), {"hardware": {"accelerator": "nvidia", "resource": "nvidia.com/mig-3g.20gb"}}),
    ],
    ids=["no node", "no host", "unknown memory", "no node with the label", "partition"],
)
def test_choice_without_a_known_machine_leaves_the_requests_to_the_engine_and_is_made_anew(
    world: World, spec: Obj
) -> None:
    first = choose(inspected(), *world, **spec)
    assert summarize(first) == (32_768, None, None)
    assert first.status.serving is not None
    assert not is_kept(first)
    later = choose(inspected(), *world, gpu_node("new", 12_288, zone="nowhere"), mac("new", 12), last=first, **spec)
    assert is_kept(later) is ("resource" not in spec["hardware"])


def pods_of_chat(**spec: Any) -> World:
    """Return a Deployment of the service and its pod."""
    owners = [{"uid": "uid-chat", "controller": True}]
    labels = {"inference.pomona.dev/service": "chat"}
    deployment = {
        "metadata": {"name": "chat", "namespace": "team", "ownerReferences": owners},
        "spec": {"template": {"spec": {}}},
    }
    pod = {"metadata": {"name": "chat-1", "namespace": "team", "labels": labels}, "spec": spec}
    return (DEPLOYMENTS, deployment), (PODS, pod)


def test_choice_of_replicas_that_have_no_node_is_made_anew_if_no_machine_holds_it() -> None:
    later = gpu_node("a", 9216)
    first = choose(inspected(), gpu_node("a", L4), **NVIDIA)
    assert choose(inspected(), later, *pods_of_chat(nodeName="a"), last=first, **NVIDIA) == first
    assert choose(inspected(), *pods_of_chat(), last=first, **NVIDIA) == first, "no node is known"
    again = choose(inspected(), later, *pods_of_chat(), last=first, **NVIDIA)
    assert again.spec.context_length == 16_384


def test_choice_that_no_machine_holds_stays_from_the_moment_that_a_pod_has_a_node() -> None:
    first = choose(inspected(), **NVIDIA)
    assert not is_kept(choose(inspected(), *pods_of_chat(), last=first, **NVIDIA))
    placed = choose(inspected(), gpu_node("a", 9216), *pods_of_chat(nodeName="a"), last=first, **NVIDIA)
    assert summarize(placed) == summarize(first)
    assert is_kept(placed)


def test_choice_stays_while_a_companion_is_not_known() -> None:
    spec = NVIDIA | {"speculative": {"draftModelRef": "draft"}}
    first = choose(inspected(), inspected(name="draft"), gpu_node("a", L4), **spec)
    assert choose(inspected(), gpu_node("a", H100), last=first, **spec) == first
    assert choose(inspected(), inspected(name="draft"), gpu_node("a", H100), last=first, **spec) == first


def test_nodes_and_hosts_that_take_no_new_replica_do_not_count() -> None:
    _, tainted = gpu_node("b", H100)
    tainted["spec"] = {"taints": [{"key": "team", "value": "x", "effect": "NoSchedule"}]}
    _, cordoned = gpu_node("c", H100)
    cordoned["spec"] = {"unschedulable": True}
    _, starting = gpu_node("a", 9216)
    starting["spec"] = {"taints": [{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]}
    world = (inspected(), (NODES, starting), (NODES, tainted), (NODES, cordoned))
    assert choose(*world, **NVIDIA).spec.context_length == 16_384
    assert choose(*world, **NVIDIA, tolerations=[{"key": "team", "operator": "Exists"}]).spec.context_length == 65_536
    _, closed = mac("large", 400)
    closed["spec"] = {**closed.get("spec", {}), "unschedulable": True}
    assert choose(inspected(), mac("small", 16), (METAL_HOSTS, closed), **METAL).spec.context_length == 32_768


def test_choice_that_no_machine_holds_is_made_anew_when_one_comes() -> None:
    small = choose(inspected(), mac("small", 4), **METAL)
    assert summarize(small) == (4096, 1, None)
    assert not is_kept(small)
    large = choose(inspected(), mac("small", 4), mac("large", 48), last=small, **METAL)
    assert summarize(large) == (65_536, None, "4096Mi")
    assert is_kept(large)


@pytest.mark.parametrize(
    ("spec", "context"),
    [
        ({}, 65_536),
        ({"scheduling": {"pools": ["team"]}}, 16_384),
        ({"scheduling": {"pools": ["team", "nvidia"]}}, 65_536),
        ({"scheduling": {"pools": ["team"]}, "nodeSelector": {"zone": "a"}}, 16_384),
        ({"nodeSelector": {"zone": "b"}}, 65_536),
        ({"scheduling": {"mode": "Native"}, "nodeSelector": {"zone": "a"}}, 16_384),
        # No node of the pool has the label: nothing is known.
        ({"scheduling": {"pools": ["team"]}, "nodeSelector": {"zone": "b"}}, None),
        ({"nodeSelector": {"zone": "a"}}, None),
    ],
    ids=str,
)
def test_only_nodes_of_its_pools_with_its_labels_count(spec: Obj, context: int | None) -> None:
    team = (ACCELERATOR_POOLS, pool("team", nodeSelector={"team": "x"}))
    chosen = choose(
        inspected(), gpu_node("a", 9216, zone="a", team="x"), gpu_node("b", H100, zone="b"), team, **NVIDIA, **spec
    )
    assert (chosen.spec.context_length if is_kept(chosen) else None) == context


def test_scheduler_that_knows_no_pools_places_pods_in_each() -> None:
    team = (ACCELERATOR_POOLS, pool("team", nodeSelector={"team": "x"}))
    world = (gpu_node("b", H100, team="x"), team)
    assert choose(inspected(), *world, **NVIDIA, scheduling={"mode": "Native"}).spec.context_length == 65_536
    assert not is_kept(choose(inspected(), *world, **NVIDIA, scheduling={"mode": "Queue"}))


@pytest.mark.parametrize(
    ("spec", "context"),
    [
        ({}, 32_768),
        ({"nodeSelector": {"room": "attic"}}, 4096),
        ({"scheduling": {"pools": ["team"]}}, 65_536),
        ({"scheduling": {"pools": ["team", "metal"]}, "nodeSelector": {"room": "attic"}}, 4096),
    ],
    ids=str,
)
def test_only_hosts_of_its_pools_with_its_labels_count(spec: Obj, context: int) -> None:
    team = (ACCELERATOR_POOLS, pool("team", "metal", nodeSelector={"team": "x"}))
    world = (mac("a", 6, room="attic"), mac("b", 12, room="lab"), mac("c", 96, team="x"), team)
    assert choose(inspected(), *world, **METAL, **spec).spec.context_length == context


def test_hosts_that_cannot_run_the_service_do_not_count() -> None:
    foreign = mac("foreign", 400)
    foreign[1]["status"]["runtimes"] = ["ollama"]
    lent = mac("lent", 400)
    lent[1]["spec"] = {"namespaces": ["other"]}
    assert summarize(choose(inspected(), mac("small", 16), foreign, lent, **METAL)) == (32_768, None, "1575Mi")


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        ({"memory": "40Gi"}, (32_768, 4, "4096Mi")),
        ({"memory": "8Gi"}, (8192, None, "2048Mi")),
        ({"memory": "80Gi"}, (65_536, 4, "4096Mi")),
        ({"products": ["NVIDIA-L4"]}, (32_768, 4, "4096Mi")),
        ({"products": ["NVIDIA-H100-80GB-HBM3"]}, (65_536, 4, "4096Mi")),
        ({"products": ["of tomorrow"]}, (32_768, 4, "4096Mi")),
        ({"deviceSelector": {"memory": "72Gi"}}, (65_536, 4, "4096Mi")),
        ({"resource": "nvidia.com/mig-3g.20gb", "memory": "20Gi"}, (32_768, None, "4096Mi")),
    ],
    ids=str,
)
def test_memory_and_products_that_are_stated_decide_before_nodes(hardware: Obj, expected: tuple[int, int, str]) -> None:
    """An autoscaler may add such nodes."""
    chosen = choose(inspected(), gpu_node("a", L4), hardware={"accelerator": "nvidia", **hardware})
    assert summarize(chosen) == expected
    assert is_kept(chosen)


def test_remembered_conversations_fit_into_the_smallest_node_with_devices() -> None:
    world = (gpu_node("a", L4, "64Gi"), gpu_node("b", L4, "256Gi"), plain_node("c", "4Gi"))
    # A quarter of what the engine leaves of an eighth of the node, which has 8 devices.
    assert summarize(choose(inspected(), *world, **NVIDIA)) == (32_768, 4, "1361Mi")
    small = (gpu_node("a", L4, "16Gi"), gpu_node("b", L4, "256Gi"))
    assert summarize(choose(inspected(), *small, **NVIDIA)) == (32_768, 4, None)


@pytest.mark.parametrize(
    ("resources", "prompt_cache"),
    [({}, "4096Mi"), ({"memory": "12Gi"}, None), ({"memoryLimit": "12Gi"}, None), ({"memory": "16Gi"}, "1575Mi")],
    ids=str,
)
def test_pod_on_a_processor_keeps_within_the_stated_memory(resources: Obj, prompt_cache: str | None) -> None:
    chosen = choose(inspected(), plain_node("a", "64Gi"), hardware={"accelerator": "cpu"}, resources=resources)
    assert chosen.spec.context_length == 32_768
    assert chosen.spec.prompt_cache == prompt_cache


@pytest.mark.parametrize("spec", [METAL, NVIDIA, {"hardware": {"accelerator": "cpu"}}], ids=["host", "device", "cpu"])
@pytest.mark.parametrize("gib", [5.5, 7, 12, 40])
def test_replica_keeps_within_the_memory_that_its_model_states(spec: Obj, gib: float) -> None:
    stated = inspected(memoryBytes=int(gib * GIB))
    world = (mac("large", 400), gpu_node("a", H100), plain_node("b", "512Gi"))
    chosen = choose(stated, *world, **spec)
    found = as_model(stated[1])
    memory = measure_replica(chosen, Served(found, "llama.cpp"))
    assert not any(each.is_understated for each in memory.models)
    assert memory.models[0].measured_bytes is not None
    assert memory.models[0].measured_bytes <= gib * GIB
    assert choose(stated, **spec) == chosen, "it depends on no machine"


@pytest.mark.parametrize("runtime", ["llama.cpp", "ollama", "omlx"])
def test_model_that_only_hosts_read_gets_the_least(runtime: str) -> None:
    """Its memory was stated for little more than this; the agent refuses a process that would take more."""
    local = {**model(source="file:///models/tiny.gguf", memoryBytes=6 * GIB), "status": {"conditions": []}}
    chosen = choose((MODELS, local), mac("large", 400), runtime=runtime, **METAL)
    assert summarize(chosen) == (4096, 1, None)
    assert is_kept(chosen)
    assert summarize(choose((MODELS, local), runtime=runtime, parallel=3, **METAL)) == (4096, 3, None)


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        (LLAMA_8B, {"runtime": "omlx"}),
        (LLAMA_8B, {"runtime": "mlx-lm", "cacheTypeK": "q8_0", "cacheTypeV": "q8_0"}),
        (LLAMA_8B, {"runtime": "mlx-lm", "speculative": {"draftModelRef": "draft"}}),
        (QWEN_27B_HYBRID, {"runtime": "mlx-lm"}),
        (LLAMA_8B, {"runtime": "ollama"}),
        (LLAMA_8B, {"runtime": "llama.cpp", "mode": "embeddings"}),
    ],
    ids=str,
)
def test_engine_takes_what_is_chosen_for_it(layout: Layout, spec: Obj) -> None:
    """Much is free: four whole contexts would fit, and memory for earlier conversations."""
    weights = ("gguf", "http://models.example/tiny.gguf")
    if spec["runtime"] in {"omlx", "mlx-lm"}:
        weights = ("mlx", "http://models.example/tiny/")
    models = []
    for name in ("tiny", "draft"):
        _, made = inspected(layout, source=weights[1])
        made["metadata"] |= {"name": name, "uid": name}
        made["status"] |= {"format": weights[0], "file": ""}
        models.append((MODELS, made))
    _, large = mac("large", 400)
    large["status"]["runtimes"] = [spec["runtime"]]
    plan = decide_chat((INFERENCE_SERVICES, service(**METAL, **spec)), *models, (METAL_HOSTS, large))
    assert ready_outcome(plan)[2] not in {"InvalidSpec", "Failed"}, planned_condition(plan, "Ready")["message"]
    assert plan.create or layout is QWEN_27B_HYBRID, "its memory is not known"


def test_service_on_several_accelerators_is_served_with_the_same_options_on_each() -> None:
    pools = (ACCELERATOR_POOLS, pool("macs", "metal", nodeSelector={"team": "x"}))
    world = (gpu_node("a", L4), mac("large", 96, team="x"), pools)
    chosen = choose(inspected(), *world, hardware={"accelerator": "auto"}, scheduling={"pools": ["nvidia", "macs"]})
    assert summarize(chosen) == (65_536, None, "4096Mi")


def test_unknown_engine_or_accelerator_is_not_the_business_of_the_choice() -> None:
    for spec in ({"runtime": "of-tomorrow"} | NVIDIA, {"hardware": {"accelerator": "quantum"}}):
        assert choose(inspected(), gpu_node("a", L4), **spec).spec.context_length in {4096, 32_768}


def test_choice_for_one_host_is_that_of_a_cluster_with_such_a_host() -> None:
    chat, tiny = as_service(service(**METAL)), as_model(inspected()[1])
    for gib in (6, 16, 48):
        alone = choose_for_host(chat, tiny, (), gib * GIB + 7 * MIB)
        assert summarize(alone) == summarize(choose(inspected(), mac("only", gib), **METAL))
    stated = as_model(inspected(memoryBytes=7 * GIB)[1])
    assert summarize(choose_for_host(chat, stated, (), 48 * GIB)) == (8192, None, None)
    assert choose_for_host(chat, None, (), 48 * GIB) == chat


def test_status_alone_gives_the_options_to_those_that_choose_nothing() -> None:
    chosen = choose(inspected(), gpu_node("a", L4), **NVIDIA)
    stored = structs.replace(as_service(service(**NVIDIA)), status=chosen.status)
    assert apply_choice(stored).spec == chosen.spec
    new = as_service(service(**NVIDIA))
    assert apply_choice(new) == new
