"""The volumes of many waiting pods cost what they have in common once, and several are read at once."""

import asyncio

import pytest

from controller.placement import bound_volumes
from controller.placement.bound_volumes import BoundVolumes, NodeSelection
from controller.placement.cell_registry import CellRegistry
from controller.placement.node_rules import matches_term
from controller.placement.pod_requests import find_taken_node
from devices.vendors import VENDORS
from kube.client import Client, Obj
from kube.errors import NotFound, Unreachable
from kube.resources import METAL_HOSTS, NODES, PODS, PVCS, Resource
from tests.support.api_objects import host, store
from tests.unit.controller.placement.test_bound_volumes import HOSTNAME, claim, node, pod, term


def test_term_that_names_a_node_by_any_label_is_compared_with_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def match(one: Obj, other: Obj) -> bool:
        compared.append(other["metadata"]["name"])
        return matches_term(one, other)

    monkeypatch.setattr(bound_volumes, "matches_term", match)
    nodes = NodeSelection([node(name, place=name) for name in ("a", "b", "c")])
    assert nodes.select([term("place", "In", "b")]) == {"b"}
    assert compared == ["b"]


def test_pods_that_wait_for_one_volume_do_not_look_at_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [pod(f"w{number}") for number in range(5)]
    cluster = store(
        (NODES, node("a")),
        (PVCS, claim("", "ReadWriteOnce")),
        *((PODS, replica) for replica in (pod("x", "a"), *waiting)),
    )
    volumes = BoundVolumes(cluster, CellRegistry(cluster, VENDORS, lambda _host: True))
    seen: list[str] = []

    def count(each: Obj) -> str:
        seen.append(each["metadata"]["name"])
        return find_taken_node(each)

    monkeypatch.setattr(bound_volumes, "find_taken_node", count)
    assert [volumes.find_nodes(replica) for replica in waiting] == [frozenset({"a"})] * 5
    assert len([name for name in seen if name.startswith("w")]) == 5
    cluster.put(PODS, pod("y", "b"))
    assert volumes.find_nodes(waiting[0]) == frozenset({"a", "b"})


def pinned_volume(*hosts: str) -> Obj:
    return {"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [term(HOSTNAME, "In", *hosts)]}}}}


class VolumeApi(Client):
    """An API server that has only PersistentVolumes, of which some cannot be read now."""

    def __init__(self, volumes: dict[str, Obj], unreachable: str = "") -> None:
        self.volumes, self.unreachable = volumes, unreachable
        self.read: list[str] = []
        self.reading = self.most_at_once = 0

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        self.reading += 1
        self.most_at_once = max(self.most_at_once, self.reading)
        await asyncio.sleep(0)
        self.reading -= 1
        if name == self.unreachable:
            raise Unreachable(f"get {resource} {name}")
        self.read.append(name)
        if name not in self.volumes:
            raise NotFound(f"get {resource} {namespace}/{name}", status=404, reason="NotFound", message="")
        return self.volumes[name]


async def test_hosts_are_looked_at_once_for_all_volumes() -> None:
    looked: list[str] = []

    def is_alive(host: str) -> bool:
        looked.append(host)
        return True

    cluster = store((NODES, node("a")), (NODES, node("b")), (METAL_HOSTS, host()), (PVCS, claim("pv-1")))
    volumes = BoundVolumes(cluster, CellRegistry(cluster, VENDORS, is_alive))
    assert volumes.find_nodes(pod("w")) == frozenset()
    assert await volumes.read_once(VolumeApi({"pv-1": pinned_volume("a.lan", "c.lan")}))
    assert volumes.find_nodes(pod("w")) == frozenset({"a"})
    looked.clear()
    assert [volumes.find_nodes(pod(f"w{number}")) for number in range(5)] == [frozenset({"a"})] * 5
    assert looked == []
    cluster.put(NODES, node("c"))
    assert volumes.find_nodes(pod("w")) == frozenset({"a", "c"})


async def test_volumes_are_read_several_at_once_and_no_one_that_waits_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bound_volumes, "_MANY_READ", 4)
    now = 0.0
    cluster = store((NODES, node("a")))
    pods = []
    for number in range(20):
        bound = claim(f"pv-{number}")
        bound["metadata"] |= {"name": f"c{number}", "uid": f"c{number}"}
        cluster.put(PVCS, bound)
        pods.append(pod(f"w{number}", spec={"volumes": [{"persistentVolumeClaim": {"claimName": f"c{number}"}}]}))
    volumes = BoundVolumes(cluster, CellRegistry(cluster, VENDORS, lambda _host: True), lambda: now)
    client = VolumeApi({f"pv-{number}": pinned_volume("a.lan") for number in range(20)}, "pv-3")
    for replica in pods:
        volumes.find_nodes(replica)
    with pytest.raises(Unreachable):
        await volumes.read_once(client)
    client.unreachable = ""
    await volumes.read_once(client)
    assert client.most_at_once == bound_volumes.READS_AT_ONCE
    assert [volumes.find_nodes(replica) for replica in pods] == [frozenset({"a"})] * 20
    assert sorted(client.read) == sorted(f"pv-{number}" for number in range(20))
    assert not await volumes.read_once(client)
    now = 2 * bound_volumes.BOUND_SECONDS
    for number in range(40):
        pods[0]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] = f"of-a-user-{number}"
        volumes.find_nodes(pods[0])
        await volumes.read_once(client)
    assert volumes.find_nodes(pods[1]) == frozenset()
