"""A view that was read once says what the user may not read, and names each machine and bad measurement."""

from collections.abc import Collection
from typing import Any, cast

import pytest
import structlog

from controller.placement.cluster_copy import open_queue_view
from controller.placement.cluster_view import ClusterView
from devices.vendors import VENDORS
from fitness.performance_store import LABEL_BENCHMARK, build_config_map
from kube.client import Client, Obj, ObjectList
from kube.errors import Forbidden, NotFound
from kube.resources import CONFIG_MAPS, METAL_HOSTS, MODELS, NODES, PODS, RESOURCE_SLICES, Resource
from tests.support.density_worlds import GPU, build_view, cpu_node, gpu_node, host, pod
from tests.support.queue_objects import pinned, queue_pod


class Server:
    """An API server with a node and two pods, which refuses some kinds and does not know others."""

    def __init__(self, refused: Collection[Resource], unknown: Collection[Resource]) -> None:
        self.refused, self.unknown = refused, unknown

    async def list(self, resource: Resource, *_: Any, label_selector: str = "", **_reading: Any) -> ObjectList:
        if resource in self.refused:
            raise Forbidden(f"list {resource}", status=403)
        if resource in self.unknown:
            raise NotFound(f"list {resource}", status=404)
        items = [obj for kind, obj in gpu_node("g1", 2) if kind == resource]
        if resource == PODS and "!=" in label_selector:
            taken = {"name": "f", "namespace": "team", "uid": "f"}
            return ObjectList([{"metadata": taken, "node": "g1", "amounts": {GPU: 1}}], "1")
        return ObjectList(items, "1")


async def read(
    refused: Collection[Resource] = (), unknown: Collection[Resource] = ()
) -> tuple[ClusterView, list[Resource]]:
    view = open_queue_view(VENDORS)
    return view, list(await view.read_once(cast("Client", Server(refused, unknown))))


async def test_kind_that_the_user_may_not_read_is_said_and_the_others_are_read() -> None:
    view, refused = await read((MODELS, METAL_HOSTS), (RESOURCE_SLICES,))
    assert refused == [METAL_HOSTS, MODELS]
    assert view.registry.find_cell("node/g1") is not None


async def test_pods_of_others_are_not_asked_for_by_a_user_who_may_read_none() -> None:
    for refused, free in (((), 1), ((PODS,), 2)):
        view, _ = await read(refused)
        cell = view.registry.find_cell("node/g1")
        assert cell is not None
        assert cell.free[GPU] == free


async def test_kind_that_every_cluster_has_is_an_error_if_it_is_missing() -> None:
    with pytest.raises(NotFound):
        await read(unknown=(NODES,))


def test_host_with_the_name_of_a_node_has_another_one() -> None:
    view = build_view([*gpu_node("one"), host("one"), host("two")])
    assert {name: machine.cell.id for name, machine in view.list_machines().items()} == {
        "one": "node/one",
        "host/one": "host/one",
        "two": "host/two",
    }
    view.store.remove(NODES, None, "one")
    assert set(view.list_machines()) == {"one", "two"}


def test_node_without_devices_is_no_cell_of_the_queue() -> None:
    view = build_view([*gpu_node("g1"), *cpu_node("c1")])
    assert [cell.id for cell in view.registry.list_cells()] == ["node/g1"]
    assert set(view.list_machines()) == {"g1", "c1"}


def test_pod_that_the_queue_has_pinned_takes_its_devices_before_it_is_bound() -> None:
    view = build_view([*gpu_node("g1", 2), (PODS, pinned(queue_pod("p", gated=False), "g1"))])
    assert len(view.list_machines()["g1"].free_bytes) == 1


def test_pod_of_a_benchmark_takes_nothing_as_it_ends_for_every_unit() -> None:
    resource, running = pod("bench", "g1", {GPU: "1"})
    running["metadata"]["labels"][LABEL_BENCHMARK] = "true"
    view = build_view([*gpu_node("g1", 2), (resource, running), pod("p", "g1", {GPU: "1"}, "chat")])
    assert len(view.list_machines()["g1"].free_bytes) == 1


def test_damaged_measurement_is_named() -> None:
    config_map: Obj = build_config_map("0" * 16, {"nvidia-l4x1": '{"tokensPerSecond": -5}'})
    config_map["metadata"] |= {"uid": "bench", "resourceVersion": "1"}
    with structlog.testing.capture_logs() as logged:
        build_view([(CONFIG_MAPS, config_map)])
    (event,) = logged
    assert (event["event"], "nvidia-l4x1" in event["problem"]) == ("measurement_damaged", True)
