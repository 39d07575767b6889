"""A waiting pod is given no node on which its volumes cannot be."""

import asyncio
from typing import Any

import pytest

from controller.placement import bound_volumes
from controller.placement.bound_volumes import BoundVolumes, NodeSelection, list_nodes_of_sharing
from controller.placement.cell_registry import CellRegistry
from controller.placement.pod_requests import find_taken_node
from crds.meta import ENQUEUED_AT
from devices.vendors import VENDORS
from kube.client import Client, Obj
from kube.errors import NotFound, Unreachable
from kube.resources import METAL_HOSTS, NODES, PODS, PVCS, Resource
from tests.support.api_objects import host, store

HOSTNAME = "kubernetes.io/hostname"
MARK = {"volume.inference.pomona.dev/weights": "true"}


def node(name: str, version: int = 1, **labels: str) -> Obj:
    allocatable = {"nvidia.com/gpu": "8"}
    metadata = {
        "name": name,
        "uid": name,
        "resourceVersion": str(version),
        "labels": {HOSTNAME: f"{name}.lan"} | labels,
    }
    return {"metadata": metadata, "status": {"allocatable": allocatable}}


def term(key: str, operator: str, *values: str) -> Obj:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ([term(HOSTNAME, "In", "a.lan")], {"a"}),
        ([term(HOSTNAME, "In", "a.lan", "c.lan", "gone.lan")], {"a", "c"}),
        ([term("zone", "In", "north")], {"a", "b"}),
        ([term(HOSTNAME, "In", "a.lan"), term("zone", "In", "south")], {"a", "c"}),
        ([{"matchExpressions": [*term(HOSTNAME, "In", "a.lan", "c.lan")["matchExpressions"]]}], {"a", "c"}),
        ([term(HOSTNAME, "NotIn", "a.lan")], {"b", "c"}),
        (
            [
                {
                    "matchExpressions": [
                        *term(HOSTNAME, "In", "a.lan", "c.lan")["matchExpressions"],
                        *term("zone", "In", "south")["matchExpressions"],
                    ]
                }
            ],
            {"c"},
        ),
        ([{}], set()),
    ],
)
def test_volume_is_on_the_nodes_that_its_affinity_selects(terms: list[Obj], expected: set[str]) -> None:
    nodes = NodeSelection([node("a", zone="north"), node("b", zone="north"), node("c", zone="south")])
    assert nodes.select(terms) == expected
    assert nodes.select(terms) == expected


def pod(name: str, node_name: str = "", **fields: Any) -> Obj:
    spec: Obj = {"nodeName": node_name} if node_name else {}
    spec |= {"volumes": [{"persistentVolumeClaim": {"claimName": "weights"}}], **fields.pop("spec", {})}
    metadata = {"name": name, "namespace": "team", "uid": name, "resourceVersion": "1", **fields}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


def beside(*labels: Obj) -> Obj:
    terms = [{"labelSelector": {"matchLabels": each}, "topologyKey": HOSTNAME} for each in labels]
    return {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}


PINNED: Obj = {
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["b"]}]}]
            }
        }
    }
}
ENDING = {"deletionTimestamp": "2026-11-21T12:00:00Z"}
ONE = ("ReadWriteOnce",)


@pytest.mark.parametrize(
    ("waiting", "modes", "others", "expected"),
    [
        (pod("w"), ONE, [], None),
        (pod("w"), ONE, [pod("w", "a")], None),
        (pod("w"), ONE, [pod("x", "a")], {"a"}),
        (pod("w"), ("ReadWriteOnce", "ReadWriteMany"), [pod("x", "a")], None),
        (pod("w"), (), [pod("x", "a")], None),
        (pod("w"), ONE, [pod("x")], None),
        (pod("w"), ONE, [pod("x", spec=PINNED, annotations={ENQUEUED_AT: "2026-11-21T12:00:00Z"})], {"b"}),
        (pod("w"), ONE, [pod("x", "a", **ENDING)], None),
        # The scheduler counts a pod that ends, and no pod with another mark.
        (pod("w", spec=beside(MARK)), ONE, [pod("x", "a", labels=MARK, **ENDING)], {"a"}),
        (pod("w", spec=beside(MARK)), ONE, [pod("x", "a", labels={next(iter(MARK)): "1f"})], None),
        (pod("w", spec=beside(MARK)), ("ReadWriteMany",), [pod("x", "a", labels=MARK), pod("y", "b")], {"a"}),
    ],
)
def test_pod_follows_those_that_have_its_volume(
    waiting: Obj, modes: tuple[str, ...], others: list[Obj], expected: set[str] | None
) -> None:
    assert list_nodes_of_sharing(waiting, modes, others) == expected


def claim(volume: str = "", *modes: str) -> Obj:
    metadata = {"name": "weights", "namespace": "team", "uid": "claim", "resourceVersion": "1"}
    return {"metadata": metadata, "spec": {"accessModes": list(modes), "volumeName": volume}}


def volumes(*objects: tuple[Any, Obj]) -> BoundVolumes:
    known = store((NODES, node("a")), (NODES, node("b")), *objects)
    return BoundVolumes(known, CellRegistry(known, VENDORS, lambda _host: True), lambda: 0.0)


def test_pod_whose_claim_is_not_bound_goes_anywhere() -> None:
    assert volumes((PVCS, claim())).find_nodes(pod("w")) is None
    assert volumes().find_nodes(pod("w", spec={"volumes": []})) is None


def test_pod_waits_until_its_volume_and_a_claim_of_a_user_were_read() -> None:
    assert volumes((PVCS, claim("pv-1", "ReadWriteMany"))).find_nodes(pod("w")) == frozenset()
    assert volumes().find_nodes(pod("w")) == frozenset()


def test_pod_stays_where_its_volume_is_mounted() -> None:
    found = volumes((PVCS, claim("", "ReadWriteOnce")), (PODS, pod("x", "a")), (PODS, pod("w")))
    assert found.find_nodes(pod("w")) == frozenset({"a"})


def test_pod_of_two_volumes_that_are_apart_has_no_node() -> None:
    other = claim("", "ReadWriteOnce")
    other["metadata"] |= {"name": "adapter", "uid": "other"}
    mounts = [{"persistentVolumeClaim": {"claimName": name}} for name in ("weights", "adapter")]
    beside_adapter = pod("y", "b", spec={"volumes": mounts[1:]})
    claims = ((PVCS, claim("", "ReadWriteOnce")), (PVCS, other))
    found = volumes(*claims, (PODS, pod("x", "a")), (PODS, beside_adapter))
    assert found.find_nodes(pod("w", spec={"volumes": mounts[:1]})) == frozenset({"a"})
    assert found.find_nodes(pod("w", spec={"volumes": mounts})) == frozenset()


def test_pods_that_wait_for_one_volume_do_not_look_at_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [pod(f"w{number}") for number in range(5)]
    known = store(
        (NODES, node("a")),
        (PVCS, claim("", "ReadWriteOnce")),
        *((PODS, each) for each in (pod("x", "a"), *waiting)),
    )
    found = BoundVolumes(known, CellRegistry(known, VENDORS, lambda _host: True))
    seen: list[str] = []

    def count(each: Obj) -> str:
        seen.append(each["metadata"]["name"])
        return find_taken_node(each)

    monkeypatch.setattr(bound_volumes, "find_taken_node", count)
    assert [found.find_nodes(each) for each in waiting] == [frozenset({"a"})] * 5
    assert len([each for each in seen if each.startswith("w")]) == 5
    known.put(PODS, pod("y", "b"))
    assert found.find_nodes(waiting[0]) == frozenset({"a", "b"})


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

    known = store((NODES, node("a")), (NODES, node("b")), (METAL_HOSTS, host()), (PVCS, claim("pv-1")))
    found = BoundVolumes(known, CellRegistry(known, VENDORS, is_alive))
    assert found.find_nodes(pod("w")) == frozenset()
    assert await found.read_once(VolumeApi({"pv-1": pinned_volume("a.lan", "c.lan")}))
    assert found.find_nodes(pod("w")) == frozenset({"a"})
    looked.clear()
    assert [found.find_nodes(pod(f"w{number}")) for number in range(5)] == [frozenset({"a"})] * 5
    assert looked == []
    known.put(NODES, node("c"))
    assert found.find_nodes(pod("w")) == frozenset({"a", "c"})


async def test_volumes_are_read_several_at_once_and_no_one_that_waits_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bound_volumes, "_MANY_READ", 4)
    now = 0.0
    known = store((NODES, node("a")))
    pods = []
    for number in range(20):
        bound = claim(f"pv-{number}")
        bound["metadata"] |= {"name": f"c{number}", "uid": f"c{number}"}
        known.put(PVCS, bound)
        pods.append(pod(f"w{number}", spec={"volumes": [{"persistentVolumeClaim": {"claimName": f"c{number}"}}]}))
    found = BoundVolumes(known, CellRegistry(known, VENDORS, lambda _host: True), lambda: now)
    client = VolumeApi({f"pv-{number}": pinned_volume("a.lan") for number in range(20)}, "pv-3")
    for each in pods:
        found.find_nodes(each)
    with pytest.raises(Unreachable):
        await found.read_once(client)
    client.unreachable = ""
    await found.read_once(client)
    assert client.most_at_once == bound_volumes.READS_AT_ONCE
    assert [found.find_nodes(each) for each in pods] == [frozenset({"a"})] * 20
    assert sorted(client.read) == sorted(f"pv-{number}" for number in range(20))
    assert not await found.read_once(client)
    now = 2 * bound_volumes.BOUND_SECONDS
    for number in range(40):
        pods[0]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] = f"of-a-user-{number}"
        found.find_nodes(pods[0])
        await found.read_once(client)
    assert found.find_nodes(pods[1]) == frozenset()
