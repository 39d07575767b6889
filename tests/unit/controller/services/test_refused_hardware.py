"""Services that no hardware or engine can serve: refused with what would fit, or with what exists."""

import msgspec
import pytest

from controller.pod_settings import PodSettings
from controller.reconcile.plan import Snapshot
from controller.services.reconciler import _list_labels
from controller.services.service_view import build_view
from crds.size import GIB, size_text
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS, NODES, PODS, Resource
from tests.support.api_objects import NOW, as_service, model, planned_condition, store
from tests.support.service_decisions import (
    KEY,
    METAL,
    SETTINGS,
    chat_deployment,
    chat_pod,
    chat_service,
    decide_chat,
    list_applied,
    ready_outcome,
)


def gpu_node(memory_mib: int) -> tuple[Resource, Obj]:
    labels = {"nvidia.com/gpu.memory": str(memory_mib)}
    metadata = {"name": "gpu-1", "uid": "n", "resourceVersion": "1", "labels": labels}
    return NODES, {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": "8", "memory": "4Gi"}}}


@pytest.mark.parametrize(
    ("hardware", "expected", "says"),
    [
        ({"memory": "1Gi"}, ("Failed", "DeviceTooSmall"), "hardware.memory is 1Gi: "),
        (
            {},
            ("Pending", "DeviceTooSmall"),
            "nvidia device of the cluster has 2.5 GiB: a contextLength of ",
        ),
        ({"memory": "80Gi"}, ("Progressing", "Progressing"), "0 of 1 replicas"),
        ({"resource": "nvidia.com/mig-7g.80gb"}, ("Progressing", "Progressing"), "0 of 1 replicas"),
    ],
)
def test_context_that_fits_into_no_device_is_refused_with_what_would(
    hardware: Obj, expected: tuple[str, str], says: str
) -> None:
    spec = {"hardware": {"accelerator": "nvidia", **hardware}, "contextLength": 2_000_000}
    plan = decide_chat(chat_service(**spec), (MODELS, model()), gpu_node(2560))
    assert ready_outcome(plan) == (expected[0], "False", expected[1])
    assert says in planned_condition(plan, "Ready")["message"]
    assert bool(list_applied(plan, DEPLOYMENTS)) == (expected[0] == "Progressing")


@pytest.mark.parametrize(
    ("hardware", "says"),
    [
        ({"products": ["Gaudi2", "Gaudi3"]}, "the largest of hardware.products has 128.0 GiB: a hardware.count of 2 "),
        ({"products": ["Gaudi2"], "count": 2}, None),
        ({"products": ["Gaudi2", "Gaudi9"]}, None),
        ({}, None),
    ],
    ids=["too small", "two", "unlisted", "not stated"],
)
def test_products_tell_the_memory_that_no_label_does(hardware: Obj, says: str | None) -> None:
    gaudi = msgspec.structs.replace(VENDORS["intel-gaudi"], product_label="example.com/gaudi")
    layout = model()["status"]["layout"] | {"tensorBytes": 150 * GIB}
    manifest = model(status={"format": "safetensors", "layout": layout, "sizeBytes": 150 * GIB}, source="hf://acme/big")
    chat = chat_service(runtime="vllm", image="a/vllm", hardware={"accelerator": "intel-gaudi", **hardware})
    settings = PodSettings("pomona:test", vendors={**VENDORS, "intel-gaudi": gaudi})
    plan = decide_chat(chat, (MODELS, manifest), settings=settings)
    message = planned_condition(plan, "Ready")["message"]
    assert ready_outcome(plan) == (
        ("Failed", "False", "DeviceTooSmall") if says else ("Progressing", "False", "Progressing")
    )
    assert (says or "") in message
    assert "autoscaler" not in message


def test_memory_above_that_of_any_node_is_explained() -> None:
    base = (chat_service(contextLength=2_000_000, parallel=2), (MODELS, model()), gpu_node(1536))
    there = chat_deployment(*base[:2], ready=0)
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    pod = chat_pod(ready=False, conditions=[unscheduled])
    message = planned_condition(decide_chat(*base, (DEPLOYMENTS, there), (PODS, pod)), "Ready")["message"]
    assert "pod chat-1: 0/1 nodes; a replica requests " in message
    assert "the largest node has 4.0 GiB: a contextLength of " in message


def test_memory_of_devices_is_not_requested_of_a_node() -> None:
    """A replica with devices requests less of its node than weights and cache take, which are in the devices."""
    manifest = model(source="hf://acme/weights", status={"format": "safetensors"})
    manifest["status"]["layout"]["tensorBytes"] = 60 << 30
    base = (chat_service(runtime="vllm", hardware={"accelerator": "nvidia", "count": 2}), (MODELS, manifest))
    (applied,) = list_applied(decide_chat(*base), DEPLOYMENTS)
    (_, engine) = applied["spec"]["template"]["spec"]["initContainers"]
    requested = int(engine["resources"]["requests"]["memory"])
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    there = (DEPLOYMENTS, chat_deployment(*base, ready=0)), (PODS, chat_pod(ready=False, conditions=[unscheduled]))
    _, node = gpu_node(81_559)
    for gib, is_explained in ((32, False), (2, True)):
        node["status"]["allocatable"]["memory"] = f"{gib}Gi"
        plan = decide_chat(*base, *there, (NODES, node))
        message = planned_condition(plan, "Ready")["message"]
        assert plan.status is not None
        assert plan.status["memory"] == size_text(requested)
        assert (f"a replica requests {size_text(requested)} of memory, and the largest" in message) is is_explained
        assert ("lower hardware.count" in message) is is_explained


@pytest.mark.parametrize(
    ("spec", "quantization", "says"),
    [
        ({"hardware": {"accelerator": "intel-gaudi"}, "image": "a/vllm"}, "awq 4-bit", "it works with vllm on nvidia"),
        ({"hardware": {"accelerator": "amd", "products": ["MI300X"]}}, "mxfp4", "it works with vllm on "),
        ({"hardware": {"accelerator": "amd", "products": ["MI355X", "MI300X"]}}, "mxfp4", "it works with vllm on "),
    ],
)
def test_quantization_that_the_devices_lack_is_refused_with_pairs_that_work(
    spec: Obj, quantization: str, says: str
) -> None:
    manifest = model(
        status={"format": "safetensors", "gguf": {"quantization": quantization}}, source="hf://acme/weights"
    )
    plan = decide_chat(chat_service(**spec, runtime="vllm"), (MODELS, manifest))
    assert ready_outcome(plan) == ("Failed", "False", "InvalidSpec")
    assert says in planned_condition(plan, "Ready")["message"]


@pytest.mark.parametrize(
    ("spec", "quantization", "families"),
    [
        ({}, "fp8", {"pascal", "volta"}),
        ({}, "nvfp4", {"pascal", "volta"}),
        ({"runtime": "sglang"}, "nvfp4", {"pascal", "volta", "turing", "ampere", "ada", "ada-lovelace", "hopper"}),
        ({}, "bfloat16", None),
        ({"hardware": {"products": ["NVIDIA-L4"]}}, "fp8", None),
    ],
)
def test_pods_avoid_devices_of_architectures_that_lack_the_quantization(
    spec: Obj, quantization: str, families: set[str] | None
) -> None:
    manifest = model(
        status={"format": "safetensors", "gguf": {"quantization": quantization}}, source="hf://acme/weights"
    )
    hardware = {"accelerator": "nvidia", **spec.get("hardware", {})}
    made = chat_service(**{"runtime": "vllm", **spec, "hardware": hardware}, resources={"memory": "4Gi"})
    (deployment,) = list_applied(decide_chat(made, (MODELS, manifest)), DEPLOYMENTS)
    terms = deployment["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = terms.get("requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{}]})
    expressions = required["nodeSelectorTerms"][0].get("matchExpressions", [])
    avoided = [
        (expression["operator"], set(expression["values"]))
        for expression in expressions
        if expression["key"] == "nvidia.com/gpu.family"
    ]
    assert avoided == ([] if families is None else [("NotIn", families)])


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"runtime": "quantum"}, "runtime quantum does not exist: use one of "),
        ({"runtime": "llamacpp"}, "runtime llamacpp does not exist: did you mean llama.cpp? Else use one of "),
        ({"hardware": {"accelerator": "nvida"}}, "accelerator nvida does not exist: did you mean nvidia? Else use one"),
        ({"hardware": {"accelerator": "tpu"}}, "hardware.accelerator tpu does not exist: use one of amd, cpu, "),
        (
            {"runtime": "tgi", **METAL},
            "runtime tgi runs in pods only, and accelerator metal is outside of the ",
        ),
        ({"hardware": {"accelerator": "intel-gaudi"}}, "runtime llama.cpp has no image for accelerator intel-gaudi: "),
        ({"extraArgs": ["--host", "0.0.0.0"]}, "runtime llama.cpp does not take --host in extraArgs: it takes -t "),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(spec: Obj, says: str) -> None:
    manifest = (
        model(source="hf://acme/weights", status={"format": "safetensors"}) if spec.get("runtime") == "tgi" else model()
    )
    plan = decide_chat(chat_service(**spec), (MODELS, manifest))
    assert ready_outcome(plan) == ("Failed", "False", "InvalidSpec")
    assert says in planned_condition(plan, "Ready")["message"]


@pytest.mark.parametrize(
    ("runtime", "source", "status"),
    [
        ("ollama", "hf://acme/tiny/tiny-00001-of-00002.gguf", {"file": "tiny-00001-of-00002.gguf"}),
        ("ollama", "hf://acme/tiny", {"file": "tiny-00001-of-00002.gguf"}),
        ("ollama", "https://models.example/tiny-00001-of-00002.gguf", {"file": ""}),
        ("omlx", "hf://acme/tiny", {"file": "tiny.gguf"}),
    ],
)
@pytest.mark.parametrize("place", [METAL, {"hardware": {"accelerator": "cpu"}}], ids=["host", "pod"])
def test_gguf_files_that_a_daemon_cannot_load_are_refused(runtime: str, source: str, status: Obj, place: Obj) -> None:
    files = [] if source.endswith(".gguf") else ["*.gguf"]
    manifest = model(status={"format": "gguf", **status}, source=source, files=files, memoryBytes=2 << 30)
    plan = decide_chat(chat_service(runtime=runtime, **place), (MODELS, manifest))
    assert ready_outcome(plan) == ("Failed", "False", "InvalidSpec")
    message = planned_condition(plan, "Ready")["message"]
    assert f"runtime {runtime} cannot serve a GGUF " in message
    assert "set runtime to llama.cpp" in message


def test_ollama_serves_the_one_file_that_patterns_choose() -> None:
    manifest = model(status={"format": "gguf", "file": "tiny.gguf"}, source="hf://acme/tiny", files=["*Q4_K_M*.gguf"])
    plan = decide_chat(chat_service(runtime="ollama", hardware={"accelerator": "cpu"}), (MODELS, manifest))
    assert ready_outcome(plan)[2] != "InvalidSpec"


@pytest.mark.parametrize(
    ("products", "remarks"),
    [
        (["NVIDIA-H100-80GB-HBM3"], ["runtime vllm emulates nvfp4 on NVIDIA-H100-80GB-HBM3"]),
        (["NVIDIA-B200"], []),
        ([], ["nvfp4 with vllm needs", "set hardware.products"]),
    ],
)
def test_emulated_quantization_is_remarked(products: list[str], remarks: list[str]) -> None:
    manifest = model(status={"format": "safetensors", "gguf": {"quantization": "nvfp4"}}, source="hf://acme/weights")
    hardware = {"accelerator": "nvidia", "products": products}
    plan = decide_chat(chat_service(runtime="vllm", hardware=hardware), (MODELS, manifest))
    assert list_applied(plan, DEPLOYMENTS)
    message = planned_condition(plan, "ModelReady")["message"]
    assert [remark for remark in remarks if remark in message] == remarks
    assert ("emulates" in message) == any("emulates" in each for each in remarks)


def test_vllm_on_the_processor_is_remarked() -> None:
    """Whoever forgets hardware.accelerator gets it for a Model of safetensors."""
    manifest = model(status={"format": "safetensors"}, source="hf://acme/weights")
    remarked = planned_condition(decide_chat(chat_service(), (MODELS, manifest)), "ModelReady")["message"]
    assert "runtime vllm runs on the processor" in remarked
    assert "set hardware.accelerator" in remarked
    nvidia = decide_chat(chat_service(hardware={"accelerator": "nvidia"}), (MODELS, manifest))
    assert "processor" not in planned_condition(nvidia, "ModelReady")["message"]


def test_devices_that_are_too_small_are_remarked_if_larger_ones_are_beside_them() -> None:
    layout = model()["status"]["layout"] | {"tensorBytes": 40 * GIB}
    manifest = model(
        status={"format": "safetensors", "layout": layout, "sizeBytes": 40 * GIB}, source="hf://acme/weights"
    )
    small, large = gpu_node(23034), gpu_node(81559)
    large[1]["metadata"] |= {"name": "gpu-2", "uid": "n-2"}

    def remarked(*nodes: tuple[Resource, Obj], **hardware: object) -> str:
        chat = chat_service(hardware={"accelerator": "nvidia", **hardware})
        message: str = planned_condition(decide_chat(chat, (MODELS, manifest), *nodes), "ModelReady")["message"]
        return message

    assert "the smallest nvidia device of the cluster has 22.5 GiB: set hardware.memory to " in remarked(small, large)
    assert "smallest" not in remarked(large)
    assert "smallest" not in remarked(small, large, memory="60Gi")
    assert "smallest" not in remarked(small, large, products=["NVIDIA-A100-SXM4-80GB"])


def test_tiers_of_memory_count_devices_whatever_the_node_gives() -> None:
    layout = model()["status"]["layout"] | {"tensorBytes": 64 * GIB}
    manifest = model(
        status={"format": "safetensors", "layout": layout, "sizeBytes": 64 * GIB}, source="hf://acme/weights"
    )

    def list_tiers(accelerator: str) -> list[str]:
        chat = chat_service(hardware={"accelerator": accelerator}, resources={"memory": "7Gi"})
        view = build_view(Snapshot(store(chat, (MODELS, manifest)), NOW), KEY, as_service(chat[1]), SETTINGS)
        labels = _list_labels(view) or {}
        return sorted(name.partition("vram-tier-")[2] for name in labels if "vram-tier" in name)

    assert "48-g" not in list_tiers("nvidia")
    assert "80-g" in list_tiers("nvidia")
    assert "8-g" in list_tiers("cpu"), "what is stated is all that a pod without devices takes"


def test_memory_above_any_device_is_named_with_the_schedulers_words() -> None:
    chat = chat_service(hardware={"accelerator": "nvidia", "memory": "10Ti"})
    there = chat_deployment(chat, (MODELS, model()), gpu_node(81559), replicas=1, ready=0)
    words = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    pod = chat_pod(conditions=[reason], phase="Pending")
    plan = decide_chat(chat, (MODELS, model()), gpu_node(81559), (DEPLOYMENTS, there), (PODS, pod))
    message = planned_condition(plan, "Ready")["message"]
    assert words in message
    assert "hardware.memory is 10Ti, and the largest nvidia device of the cluster has 79.6 GiB: lower it" in message
