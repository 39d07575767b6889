"""A slice of a time-sliced device is no whole one: a replica gets it only if its part of the memory is enough."""

import pytest

from controller.placement.cell_registry import CellRegistry
from controller.placement.explanation import RefusalCounter, explain
from controller.placement.nodes import DeviceSizes, declare_nodes, find_device_sizes
from controller.placement.observed_units import observe_units
from controller.placement.planner import PlanRules, Round, plan
from controller.placement.standing import WaitFacts, describe_wait, find_largest, sort_refusals
from controller.placement.units import Unit
from controller.placement.wake_rules import decisive_facts
from crds.meta import QUEUE_GATE
from crds.size import GIB, MIB
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import ACCELERATOR_POOLS, DEPLOYMENTS, INFERENCE_SERVICES, NODES, PODS
from kube.store import Store
from tests.support.api_objects import NOW, pool, service, store
from tests.support.queue_objects import deployment_of
from tests.unit.controller.placement.test_cell_registry import node

GPU, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"
LABELS = {"nvidia.com/gpu.memory": "24576", "nvidia.com/gpu.product": "NVIDIA-A10-SHARED"}
SLICED = LABELS | {"nvidia.com/gpu.sharing-strategy": "time-slicing", "nvidia.com/gpu.replicas": "4"}
MPS = SLICED | {"nvidia.com/gpu.sharing-strategy": "mps"}
WHOLE = LABELS | {"nvidia.com/gpu.sharing-strategy": "none", "nvidia.com/gpu.replicas": "1"}


def gpu_node(labels: dict[str, str], resource: str = GPU) -> Obj:
    allocatable = {"cpu": "64", "memory": "512Gi", "pods": "110", resource: "4"}
    return node("n", labels=labels, status={"allocatable": allocatable})


def chat(device_bytes: int | None, *, observed: int = 1) -> Obj:
    status: Obj = {"observedGeneration": observed, "accelerator": "nvidia"}
    stated = {} if device_bytes is None else {"deviceMemoryBytes": device_bytes}
    return service("chat", status=status | stated)


def waiting_pod(resource: str = GPU, number: int = 1) -> Obj:
    owner = {"kind": "ReplicaSet", "name": "chat-h", "uid": "r", "controller": True}
    labels = {"inference.pomona.dev/service": "chat", "pod-template-hash": "h"}
    metadata = {"name": "chat-h-1", "namespace": "team", "uid": "p", "labels": labels, "ownerReferences": [owner]}
    container = {"resources": {"requests": {resource: str(number)}}}
    spec = {"containers": [container], "schedulingGates": [{"name": QUEUE_GATE}]}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


def play(
    labels: dict[str, str], served: Obj, pod: Obj, *pools: Obj, resource: str = GPU
) -> tuple[CellRegistry, Unit, Round]:
    cluster = store(
        (NODES, gpu_node(labels, resource)),
        *((ACCELERATOR_POOLS, pool) for pool in pools),
        (INFERENCE_SERVICES, served),
        (DEPLOYMENTS, deployment_of("chat")),
        (PODS, pod),
    )
    cells = CellRegistry(cluster, VENDORS, lambda _host: True)
    (unit,) = observe_units(cluster, VENDORS, NOW).units
    return cells, unit, plan(cells.list_cells(), [unit], PlanRules(), 0.0)


def find_refusals(labels: dict[str, str], served: Obj, pod: Obj, *pools: Obj, resource: str = GPU) -> dict[str, int]:
    cells, unit, made = play(labels, served, pod, *pools, resource=resource)
    return {} if made.actions else dict(RefusalCounter(cells.list_cells(), made).count(unit))


OVERCOMMIT = pool("nvidia", memoryOvercommitPercent=150)


@pytest.mark.parametrize(
    ("labels", "takes", "pools", "refused"),
    [
        (SLICED, 6 * GIB, (), {}),
        (SLICED, 6 * GIB + 1, (), {"SliceTooSmall": 1}),
        (SLICED, 9 * GIB, (OVERCOMMIT,), {}),
        (SLICED, 9 * GIB + 1, (OVERCOMMIT,), {"SliceTooSmall": 1}),
        (SLICED, 9 * GIB, (pool("amd", "amd", memoryOvercommitPercent=150),), {"SliceTooSmall": 1}),
        # MPS holds each pod to its share, whatever is promised.
        (MPS, 6 * GIB + 1, (OVERCOMMIT,), {"SliceTooSmall": 1}),
        (SLICED, None, (OVERCOMMIT,), {"SliceTooSmall": 1}),
        (SLICED | {"nvidia.com/gpu.memory": "", "nvidia.com/gpu.product": ""}, 1, (), {"SliceTooSmall": 1}),
        (SLICED | {"nvidia.com/gpu.replicas": "many"}, 1, (), {"SliceTooSmall": 1}),
        # An earlier feature discovery has no label for the strategy.
        ({**SLICED, "nvidia.com/gpu.sharing-strategy": ""}, 7 * GIB, (), {"SliceTooSmall": 1}),
        (WHOLE, 100 * GIB, (), {}),
        (WHOLE, None, (), {}),
    ],
)
def test_slice_is_given_to_a_replica_for_which_it_is_enough(
    labels: dict[str, str], takes: int | None, pools: tuple[Obj, ...], refused: dict[str, int]
) -> None:
    assert find_refusals(labels, chat(takes), waiting_pod(), *pools) == refused


def test_several_slices_are_no_several_devices() -> None:
    assert find_refusals(SLICED, chat(GIB), waiting_pod(number=2)) == {"SharedDevices": 1}
    assert find_refusals(WHOLE, chat(GIB), waiting_pod(number=2)) == {}


def test_service_that_asks_for_a_slice_by_name_need_not_say_what_it_takes() -> None:
    pod = waiting_pod(SHARED)
    assert find_refusals(SLICED, chat(None), pod, resource=SHARED) == {}
    assert find_refusals(SLICED, chat(7 * GIB), pod, resource=SHARED) == {"SliceTooSmall": 1}


def test_memory_of_an_earlier_spec_counts_no_more_and_that_of_the_next_wakes_the_queue() -> None:
    earlier = chat(GIB, observed=0)
    assert find_refusals(SLICED, earlier, waiting_pod()) == {"SliceTooSmall": 1}
    assert decisive_facts(INFERENCE_SERVICES, earlier) != decisive_facts(INFERENCE_SERVICES, chat(GIB))
    assert decisive_facts(INFERENCE_SERVICES, chat(None)) != decisive_facts(INFERENCE_SERVICES, chat(GIB))


def test_user_sees_why_a_slice_is_too_small_and_what_would_help() -> None:
    cells, unit, made = play(SLICED, chat(15 * GIB // 2), waiting_pod())
    remedy = "lower contextLength or parallel, use a node whose devices are not shared, or raise "
    (row,) = explain(unit, cells.list_cells(), made, PlanRules())
    assert row.message == "a slice of its shared devices has 6.0 GiB, and the replica takes 7.5 GiB"
    assert row.remedy == f"{remedy}memoryOvercommitPercent of pool nvidia"
    counts = sort_refusals(RefusalCounter(cells.list_cells(), made).count(unit))
    message = describe_wait(unit, "NoSuchHardware", WaitFacts(counts, find_largest(unit, cells.list_cells())))
    assert "1 node has devices that pods share, with too little memory for each" in message


@pytest.mark.parametrize(
    ("labels", "pools", "expected"),
    [
        (SLICED, (), DeviceSizes(6 * GIB, 6 * GIB)),
        (SLICED, (OVERCOMMIT, pool("amd", "amd", memoryOvercommitPercent=400)), DeviceSizes(9 * GIB, 9 * GIB)),
        (MPS, (OVERCOMMIT,), DeviceSizes(6 * GIB, 6 * GIB)),
        (WHOLE, (OVERCOMMIT,), DeviceSizes(24576 * MIB, 24576 * MIB)),
        (SLICED | {"nvidia.com/gpu.replicas": "many"}, (), DeviceSizes()),
    ],
)
def test_device_of_a_node_with_slices_has_the_memory_of_a_slice(
    labels: dict[str, str], pools: tuple[Obj, ...], expected: DeviceSizes
) -> None:
    cluster = Store()
    declare_nodes(cluster, VENDORS)
    cluster.put(NODES, gpu_node(labels))
    for definition in pools:
        cluster.put(ACCELERATOR_POOLS, definition)
    assert find_device_sizes(cluster, "nvidia") == expected
