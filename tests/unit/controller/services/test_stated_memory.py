"""Memory that a Model states: what its header says counts, before any replica is made."""

import msgspec
import pytest

from controller.reconcile.plan import Snapshot
from controller.services.reconciler import _list_labels
from controller.services.service_view import build_view
from crds.serving import ServingOptions
from crds.weights_header import Layout
from fitness.memory import Workload, estimate
from kube.client import Obj
from kube.resources import DEPLOYMENTS, ENDPOINT_SLICES, METAL_HOSTS, METAL_PROCESSES, MODELS, NODES, PODS, Resource
from tests.support.api_objects import GIB, NOW, as_service, host, model, planned_condition, slice_of, store
from tests.support.service_decisions import (
    KEY,
    OK,
    SERVING,
    SETTINGS,
    chat_deployment,
    chat_pod,
    chat_service,
    decide_chat,
    list_applied,
    ready_outcome,
)


@pytest.mark.parametrize("accelerator", ["cpu", "nvidia", "metal"])
@pytest.mark.parametrize(
    ("stated", "layout", "says"),
    [
        (1, True, "by its header, serving it takes at least 1.3 GiB"),
        (GIB, True, ", or lower contextLength or parallel"),
        (
            GIB // 2,
            False,
            f"the file alone has 1.0 GiB: raise spec.memoryBytes of Model tiny, which is 512.0 MiB, above {GIB}",
        ),
    ],
)
def test_memory_that_is_understated_for_an_inspected_model_is_refused(
    accelerator: str, stated: int, says: str, *, layout: bool
) -> None:
    understated = model(memoryBytes=stated, status=None if layout else {"layout": None})
    made = chat_service(hardware={"accelerator": accelerator}, contextLength=131072)
    plan = decide_chat(made, (MODELS, understated), (METAL_HOSTS, host()))
    assert ready_outcome(plan) == ("Failed", "False", "MemoryUnderstated")
    message = planned_condition(plan, "Ready")["message"]
    assert says in message
    assert "raise spec.memoryBytes of Model tiny" in message
    assert list_applied(plan, DEPLOYMENTS) == []
    assert METAL_PROCESSES not in [resource for resource, _ in plan.create]


def test_memory_is_stated_in_bytes_or_as_a_quantity() -> None:
    plans = [decide_chat(chat_service(), (MODELS, model(memoryBytes=stated))) for stated in (3 * GIB, "3Gi", "3072Mi")]
    first, *others = (
        [deployment["spec"]["template"]["spec"] for deployment in list_applied(plan, DEPLOYMENTS)] for plan in plans
    )
    assert first
    assert others == [first, first]


def test_memory_that_is_stated_close_to_the_estimate_or_for_the_pod_itself_is_taken() -> None:
    """Versions differ a little in their estimates, and what a pod requests is between its owner and Kubernetes."""
    needed = estimate(Workload(msgspec.convert(model()["status"]["layout"], Layout)), ServingOptions())
    assert needed
    close = needed.total_bytes * 95 // 100
    (obj,) = list_applied(decide_chat(chat_service(), (MODELS, model(memoryBytes=close))), DEPLOYMENTS)
    assert obj["spec"]["template"]["spec"]["initContainers"][0]["resources"]["requests"]["memory"] == str(close)
    requested = chat_service(resources={"memory": "1Gi"})
    assert list_applied(decide_chat(requested, (MODELS, model(memoryBytes=1))), DEPLOYMENTS)


def test_pods_that_serve_a_model_whose_memory_is_understated_go_on() -> None:
    understated = (MODELS, model(memoryBytes=GIB // 2))
    there = (DEPLOYMENTS, chat_deployment(chat_service(), (MODELS, model(memoryBytes=2 * GIB))))
    reached = ((PODS, chat_pod()), (ENDPOINT_SLICES, slice_of("chat", "x")))
    plan = decide_chat(chat_service(status=SERVING), understated, there, *reached, answer=OK)
    assert (plan.delete, plan.patch) == ((), ())
    assert ready_outcome(plan) == ("Degraded", "True", "MemoryUnderstated")
    assert "raise spec.memoryBytes" in planned_condition(plan, "Ready")["message"]


# In pods with devices, container and devices are two figures.

NVIDIA: Obj = {"hardware": {"accelerator": "nvidia", "count": 2}}
PULLED: Obj = {"format": "ollama", "layout": None, "sizeBytes": None}
FORMS: dict[str, Obj] = {
    "header": model(memoryBytes=70 * GIB),
    "no layout": model(memoryBytes=70 * GIB, status={"layout": None}),
    "ollama": model(source="ollama://qwen3:72b", memoryBytes=70 * GIB, status=PULLED),
}


def gpu_node(memory_mib: int) -> tuple[Resource, Obj]:
    labels = {"nvidia.com/gpu.memory": str(memory_mib)}
    metadata = {"name": "gpu-1", "uid": "n", "resourceVersion": "1", "labels": labels}
    return NODES, {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": "8", "memory": "64Gi"}}}


def requested_memory(deployment: Obj) -> int:
    """Return the bytes that the engine's container requests of its node."""
    pod = deployment["spec"]["template"]["spec"]
    engine = pod["initContainers"][0]
    return int(engine["resources"]["requests"]["memory"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("context", [4096, 2_000_000])
@pytest.mark.parametrize("smallest", [{"hardware": {"accelerator": "nvidia", "memory": "24Gi", "count": 2}}, NVIDIA])
def test_stated_memory_that_fits_into_no_device_is_refused_with_what_would(
    form: str, context: int, smallest: Obj
) -> None:
    plan = decide_chat(chat_service(**smallest, contextLength=context), (MODELS, FORMS[form]), gpu_node(24_564))
    is_stated = "memory" in smallest["hardware"]
    assert ready_outcome(plan) == ("Failed" if is_stated else "Pending", "False", "DeviceTooSmall")
    message = planned_condition(plan, "Ready")["message"]
    assert "a replica needs 35.4 GiB on each of 2 devices (35.0 GiB as the share of spec.memoryBytes); " in message
    assert ": a hardware.count of 4 " in message
    assert ("remove spec.memoryBytes" in message) is (form == "header")
    assert list_applied(plan, DEPLOYMENTS) == []


@pytest.mark.parametrize("form", FORMS)
def test_container_beside_devices_requests_what_the_engine_keeps_in_memory_of_the_node(form: str) -> None:
    plan = decide_chat(chat_service(**NVIDIA), (MODELS, FORMS[form]), gpu_node(49_140))
    (applied,) = list_applied(plan, DEPLOYMENTS)
    assert requested_memory(applied) < 4 * GIB
    stated = chat_service(**NVIDIA, resources={"memory": "9Gi"})
    (applied,) = list_applied(decide_chat(stated, (MODELS, FORMS[form]), gpu_node(49_140)), DEPLOYMENTS)
    pod = applied["spec"]["template"]["spec"]
    engine = pod["initContainers"][0]
    assert engine["resources"]["requests"]["memory"] == "9Gi"


def test_header_decides_if_it_says_more_than_is_stated() -> None:
    """The stated bytes hold for some context, and the service states another one."""
    base = chat_service(hardware={"accelerator": "nvidia"}, contextLength=2_000_000)
    by_header = planned_condition(decide_chat(base, (MODELS, model()), gpu_node(2560)), "Ready")["message"]
    needed = estimate(
        Workload(msgspec.convert(model()["status"]["layout"], Layout)), ServingOptions(context_length=2_000_000)
    )
    assert needed
    close = (MODELS, model(memoryBytes=needed.total_bytes * 95 // 100))
    assert (
        planned_condition(decide_chat(base, close, gpu_node(2560)), "Ready")["message"].partition(";")[0]
        == (by_header.partition(";")[0])
    )


def test_container_without_devices_requests_the_stated_memory() -> None:
    (applied,) = list_applied(decide_chat(chat_service(), (MODELS, FORMS["ollama"])), DEPLOYMENTS)
    assert requested_memory(applied) == 70 * GIB


def test_engine_that_pomona_does_not_know_requests_the_stated_memory() -> None:
    spec: Obj = {"runtime": "generic", "image": "registry.example/engine:1", "container": {}, **NVIDIA}
    (applied,) = list_applied(decide_chat(chat_service(**spec), (MODELS, FORMS["header"])), DEPLOYMENTS)
    assert requested_memory(applied) == 70 * GIB


def test_companion_with_stated_memory_counts_for_the_devices() -> None:
    adapter = model(source="https://models.example/adapter.gguf", memoryBytes=60 * GIB)
    adapter["metadata"] |= {"name": "adapter", "uid": "uid-adapter"}
    chat = chat_service(**NVIDIA, adapters=[{"modelRef": "adapter"}])
    plan = decide_chat(chat, (MODELS, model()), (MODELS, adapter), gpu_node(24_564))
    assert ready_outcome(plan)[2] == "DeviceTooSmall"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("resources", [{}, {"memory": "7Gi"}])
def test_tiers_of_memory_count_what_is_stated(form: str, resources: Obj) -> None:
    chat = chat_service(**NVIDIA, resources=resources)
    view = build_view(Snapshot(store(chat, (MODELS, FORMS[form])), NOW), KEY, as_service(chat[1]), SETTINGS)
    tiers = {name.partition("vram-tier-")[2] for name in _list_labels(view) or {} if "vram-tier" in name}
    assert "80-g" in tiers
    assert "48-g" not in tiers


@pytest.mark.parametrize("hardware", [{}, {"accelerator": "nvidia"}], ids=["processor", "devices"])
def test_quantity_above_the_largest_of_kubernetes_is_capped(hardware: Obj) -> None:
    memory = "9" * 32
    spec = {"resources": {"memory": memory}, "hardware": hardware | ({"memory": memory} if hardware else {})}
    plan = decide_chat(chat_service(**spec), (MODELS, model()))
    assert plan.status is not None
    assert plan.status["memory"] == "8388608.0 TiB"
    (deployment,) = list_applied(plan, DEPLOYMENTS)
    assert deployment["metadata"]["name"] == KEY.name
