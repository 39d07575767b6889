"""A waiting pod is given no node on which its volumes cannot be."""

from typing import Any

import pytest

from controller.placement.bound_volumes import BoundVolumes, NodeSelection, list_nodes_of_sharing
from controller.placement.cell_registry import CellRegistry
from controller.placement.standing import CellCounts, WaitFacts, describe_wait
from controller.placement.units import NodeRequirement
from crds.meta import ENQUEUED_AT
from crds.queue_status import QueueReason
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import NODES, PODS, PVCS
from tests.support.api_objects import store
from tests.support.waiting_units import GPU, waiting_unit

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
    terms = [{"labelSelector": {"matchLabels": label}, "topologyKey": HOSTNAME} for label in labels]
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
    cluster = store((NODES, node("a")), (NODES, node("b")), *objects)
    return BoundVolumes(cluster, CellRegistry(cluster, VENDORS, lambda _host: True), lambda: 0.0)


def test_pod_whose_claim_is_not_bound_goes_anywhere() -> None:
    assert volumes((PVCS, claim())).find_nodes(pod("w")) is None
    assert volumes().find_nodes(pod("w", spec={"volumes": []})) is None


def test_pod_waits_until_its_volume_and_a_claim_of_a_user_were_read() -> None:
    assert volumes((PVCS, claim("pv-1", "ReadWriteMany"))).find_nodes(pod("w")) == frozenset()
    assert volumes().find_nodes(pod("w")) == frozenset()


def test_place_of_volumes_is_known_once_claims_and_volumes_were_read() -> None:
    assert not volumes((PVCS, claim("pv-1", "ReadWriteMany"))).has_read(pod("w"))
    assert not volumes().has_read(pod("w"))
    assert volumes((PVCS, claim())).has_read(pod("w")), "a claim that is not bound has no volume"
    assert volumes().has_read(pod("w", spec={"volumes": []}))


def test_pod_stays_where_its_volume_is_mounted() -> None:
    bound_volumes = volumes((PVCS, claim("", "ReadWriteOnce")), (PODS, pod("x", "a")), (PODS, pod("w")))
    assert bound_volumes.find_nodes(pod("w")) == frozenset({"a"})


def test_pod_of_two_volumes_that_are_apart_has_no_node() -> None:
    other = claim("", "ReadWriteOnce")
    other["metadata"] |= {"name": "adapter", "uid": "other"}
    mounts = [{"persistentVolumeClaim": {"claimName": name}} for name in ("weights", "adapter")]
    beside_adapter = pod("y", "b", spec={"volumes": mounts[1:]})
    claims = ((PVCS, claim("", "ReadWriteOnce")), (PVCS, other))
    bound_volumes = volumes(*claims, (PODS, pod("x", "a")), (PODS, beside_adapter))
    assert bound_volumes.find_nodes(pod("w", spec={"volumes": mounts[:1]})) == frozenset({"a"})
    assert bound_volumes.find_nodes(pod("w", spec={"volumes": mounts})) == frozenset()


@pytest.mark.parametrize(
    ("bound_to", "addition"), [(None, "add a node, or"), (frozenset({"a"}), "add a node that can mount its volume, or")]
)
def test_service_is_told_which_node_would_help(bound_to: frozenset[str] | None, addition: str) -> None:
    unit = waiting_unit("chat", requirement=NodeRequirement("any", {}, bound_to))
    cases: dict[QueueReason, CellCounts] = {
        "InsufficientDevices": CellCounts({}, {}, {GPU: 1}, 0),
        "CellsClosed": CellCounts({}, {"Cordoned": 1}, {}, 0),
    }
    for reason, counts in cases.items():
        assert addition in f"{describe_wait(unit, reason, WaitFacts(counts))}, or"
