"""The cost of a decision does not grow with what else there is: objects read are counted, not seconds."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import pytest

from controller.hosts.reconciler import HostInputs, decide_host
from controller.placement.cell_registry import CellRegistry
from controller.placement.nodes import declare_nodes
from controller.reconcile.indexes import declare_indexes
from controller.reconcile.plan import Snapshot
from controller.services import diagnosis
from controller.services.metal_processes import list_hosts, observe_hosts
from controller.services.preconditions import ServiceProblem
from controller.services.reconciler import decide_service
from controller.services.service_view import ServiceInputs
from crds.metalprocess import MetalProcess
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    PODS,
    ObjectKey,
    Resource,
)
from kube.store import Store
from tests.support.api_objects import GIB, NOW, as_service, host, model, process, service, slice_of
from tests.support.service_decisions import KEY, METAL, chat_deployment, chat_service


class CountedObjects(tuple[Obj, ...]):  # noqa: SLOT001 - it has an attribute
    """The answer of an index, which counts its objects when they are looked at."""

    store: "CountingStore"

    def __iter__(self) -> Iterator[Obj]:
        self.store.reads += len(self)
        return super().__iter__()


class CountingStore(Store):
    """A store that counts the objects that a decision looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self._counted: dict[tuple[Resource, str, str], tuple[Sequence[Obj], CountedObjects]] = {}

    def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj | None:
        self.reads += 1
        return super().get(resource, name, namespace)

    def list(self, resource: Resource, namespace: str | None = None) -> list[Obj]:
        objects = super().list(resource, namespace)
        self.reads += len(objects)
        return objects

    def by_index(self, resource: Resource, name: str, value: str) -> Sequence[Obj]:
        objects = super().by_index(resource, name, value)
        cached = self._counted.get((resource, name, value))
        if cached is None or cached[0] is not objects:
            counted = CountedObjects(objects)
            counted.store = self
            cached = self._counted[resource, name, value] = objects, counted
        return cached[1]


def other_service(number: int, on_metal: bool) -> list[tuple[Resource, Obj]]:
    """Return another service of the same Model with its children."""
    name = f"other-{number}"
    pod = {"metadata": {"name": name, "namespace": "team", "uid": f"pod-{name}", "resourceVersion": "1", "labels": {}}}
    pod["metadata"]["labels"] = {"inference.pomona.dev/service": name}
    bound = process(f"{name}-1-0", host="studio-9", phase="Ready")
    bound["metadata"]["ownerReferences"][0] |= {"name": name, "uid": f"uid-{name}"}
    return [
        (INFERENCE_SERVICES, service(name, hardware=METAL["hardware"] if on_metal else {})),
        (METAL_PROCESSES, bound) if on_metal else (PODS, pod),
        (ENDPOINT_SLICES, slice_of(name, "studio-9")),
    ]


def count_reads(decide: Callable[[Snapshot], object], objects: list[tuple[Resource, Obj]], others: int) -> int:
    store = CountingStore()
    declare_indexes(store)
    declare_nodes(store, VENDORS)
    everything = [*objects, *(pair for number in range(others) for pair in other_service(number, bool(number % 2)))]
    for resource, obj in everything:
        store.put(resource, deepcopy(obj))
    decide(Snapshot(store, NOW))  # sums over the processes of a host are computed once, until one of them changes
    store.reads = 0
    decide(Snapshot(store, NOW))
    return store.reads


def decide_chat(snapshot: Snapshot) -> object:
    inputs = ServiceInputs()
    return decide_service(Snapshot(snapshot.store, NOW, inputs), KEY)


def decide_studio(snapshot: Snapshot) -> object:
    return decide_host(Snapshot(snapshot.store, NOW, HostInputs("Alive", {}, None)), ObjectKey("", "studio-1"))


BASE = (chat_service(), (MODELS, model()))
WAITING = [chat_service(**METAL), (MODELS, model()), (METAL_HOSTS, host()), (METAL_HOSTS, host("studio-9", GIB))]
DECISIONS = {
    "a service in pods": (decide_chat, [*BASE, (DEPLOYMENTS, chat_deployment(*BASE))]),
    "a service that waits for a host": (decide_chat, [*WAITING, (METAL_PROCESSES, process("chat-1-0"))]),
    "a host": (decide_studio, [(METAL_HOSTS, host())]),
    "a drained host": (
        decide_studio,
        [
            (METAL_HOSTS, host() | {"spec": {"drain": True}}),
            (METAL_HOSTS, host("studio-9", GIB)),
            (METAL_PROCESSES, process("chat-1-0", host="studio-1", phase="Ready")),
            (METAL_PROCESSES, process("chat-1-1")),
        ],
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_decision_reads_the_same_whatever_else_there_is(name: str) -> None:
    decide, objects = DECISIONS[name]
    assert count_reads(decide, objects, 4) == count_reads(decide, objects, 200)


def count_reads_of_a_report(others: int) -> int:
    """Return the reads for the cell of a host whose agent has reported, beside other hosts and services."""
    store = CountingStore()
    declare_indexes(store)
    declare_nodes(store, VENDORS)
    hosts = [(METAL_HOSTS, host(f"other-{number}", GIB)) for number in range(others)]
    for resource, obj in [
        *WAITING,
        *hosts,
        *(pair for number in range(others) for pair in other_service(number, True)),
    ]:
        store.put(resource, deepcopy(obj))
    registry = CellRegistry(store, VENDORS, lambda _host: True)
    registry.list_cells()
    reported = host(free_bytes=GIB)
    reported["metadata"]["resourceVersion"] = "2"
    store.put(METAL_HOSTS, reported)
    store.reads = 0
    registry.list_cells()
    return store.reads


def test_cell_of_a_host_reads_the_same_whatever_else_there_is() -> None:
    assert count_reads_of_a_report(4) == count_reads_of_a_report(200) > 0


def test_drained_hosts_share_one_look_at_the_hosts() -> None:
    store = CountingStore()
    declare_indexes(store)
    _, objects = DECISIONS["a drained host"]
    others = [(METAL_HOSTS, host(f"other-{number}", GIB, address=f"10.0.0.{number}")) for number in range(200)]
    for resource, obj in [*objects, *others]:
        store.put(resource, deepcopy(obj))
    decide_studio(Snapshot(store, NOW))
    store.reads = 0
    decide_studio(Snapshot(store, NOW))
    assert store.reads < 50


def test_replicas_that_wait_alike_share_one_look_at_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    declare_indexes(store)
    declare_nodes(store, VENDORS)
    waiting = [process(f"chat-{number}-0") for number in range(3)]
    waiting.append(process("chat-3-0", gib=2))
    waiting.append(process("chat-4-0", host="studio-9"))
    for resource, obj in [*WAITING, *((METAL_PROCESSES, metal_process) for metal_process in waiting)]:
        store.put(resource, deepcopy(obj))
    hosts, diagnosed = list_hosts(store)[0], list[str]()
    find_problem = diagnosis.diagnose_process

    def diagnose(found: MetalProcess, *further: Any) -> ServiceProblem | None:
        diagnosed.append(found.metadata.name)
        return find_problem(found, *further)

    monkeypatch.setattr(diagnosis, "diagnose_process", diagnose)
    snapshot = Snapshot(store, NOW)
    chat = as_service(chat_service(replicas=5, **METAL)[1])
    replicas = observe_hosts(snapshot, chat, None, 5)
    assert len(hosts) == 2
    assert (replicas.total, sorted(diagnosed)) == (5, ["chat-0-0", "chat-3-0", "chat-4-0"])
    assert replicas.problem is not None


def test_services_that_wait_share_one_look_at_the_hosts() -> None:
    store = CountingStore()
    declare_indexes(store)
    declare_nodes(store, VENDORS)
    for resource, obj in [*WAITING, *((METAL_HOSTS, host(f"other-{number}", GIB)) for number in range(200))]:
        store.put(resource, deepcopy(obj))
    store.put(METAL_PROCESSES, process("chat-1-0"))
    decide_chat(Snapshot(store, NOW))
    store.reads = 0
    decide_chat(Snapshot(store, NOW))
    assert store.reads < 50
