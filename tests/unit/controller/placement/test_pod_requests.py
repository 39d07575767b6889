"""The requests of pods are those by which Kubernetes' scheduler fills nodes."""

from typing import Any

import pytest

from controller.placement.pod_requests import count_allocatable, count_requests, find_taken_node
from crds.meta import ENQUEUED_AT, QUEUE_GATE
from kube.client import Obj

GIB = 2**30


def container(cpu: str = "", memory: str = "", **more: Any) -> Obj:
    requests = {name: value for name, value in (("cpu", cpu), ("memory", memory)) if value}
    return {"resources": {"requests": requests | more.pop("devices", {})}, **more}


def sidecar(cpu: str) -> Obj:
    return container(cpu, restartPolicy="Always")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"containers": [{}]}, {"pods": 1}),
        ({"containers": [container("500m", "1Gi"), container("1")]}, {"cpu": 1500, "memory": GIB, "pods": 1}),
        (
            {"containers": [container(devices={"nvidia.com/mig-1g.10gb": "2"})]},
            {"nvidia.com/mig-1g.10gb": 2, "pods": 1},
        ),
        ({"containers": [container("1")], "initContainers": [container("3")]}, {"cpu": 3000, "pods": 1}),
        ({"containers": [container("1")], "initContainers": [container("500m")]}, {"cpu": 1000, "pods": 1}),
        ({"containers": [container("1")], "initContainers": [sidecar("500m")]}, {"cpu": 1500, "pods": 1}),
        # An init container runs beside the sidecars that were started before it, and not beside later ones.
        ({"containers": [container("1")], "initContainers": [sidecar("1"), container("3")]}, {"cpu": 4000, "pods": 1}),
        ({"containers": [container("1")], "initContainers": [container("3"), sidecar("1")]}, {"cpu": 3000, "pods": 1}),
        ({"containers": [container("1")], "overhead": {"cpu": "250m"}}, {"cpu": 1250, "pods": 1}),
        (
            {"containers": [container("1", devices={"a.b/c": "1"})], **container("4", devices={"a.b/c": "9"})},
            {"cpu": 4000, "a.b/c": 1, "pods": 1},
        ),
        ({"containers": [container("1n")]}, {"cpu": 1, "pods": 1}),
        ({"containers": [container("much")]}, {"cpu": 0, "pods": 1}),
    ],
)
def test_requests_are_those_that_the_scheduler_counts(spec: Obj, expected: dict[str, int]) -> None:
    assert count_requests(spec) == expected


def test_allocatable_is_rounded_down() -> None:
    assert count_allocatable({"cpu": "3920m", "memory": "1.5", "pods": "9"}) == {"cpu": 3920, "memory": 1, "pods": 9}


def pinned(*terms_of: str) -> Obj:
    """Return a spec with a term for each text, which names the nodes to which the term is pinned, as `a+b`."""
    names_of = [[name for name in text.split("+") if name] for text in terms_of]
    terms = [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]} for name in names]}
        for names in names_of
    ]
    required = {"nodeSelectorTerms": terms}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


NOTED = {"annotations": {ENQUEUED_AT: "2026-11-21T12:00:00Z"}}
DELETED = {"deletionTimestamp": "2026-11-21T12:00:00Z"}


@pytest.mark.parametrize(
    ("metadata", "spec", "phase", "expected"),
    [
        ({}, {}, "Pending", ""),
        ({}, {"nodeName": "a"}, "Running", "a"),
        (DELETED, {"nodeName": "a"}, "Running", "a"),
        ({}, {"nodeName": "a"}, "Failed", ""),
        ({}, {"nodeName": "a"}, "Succeeded", ""),
        (NOTED, pinned("a"), "Pending", "a"),
        ({}, pinned("a"), "Pending", ""),
        ({"annotations": {"mine": "1"}}, pinned("a"), "Pending", ""),
        (NOTED, pinned("a", "a"), "Pending", "a"),
        (NOTED, pinned("a", "b"), "Pending", ""),
        # A tenant's own pin to another node, which the queue has narrowed to none, beside a term that it pinned.
        (NOTED, pinned("elsewhere+a", "a"), "Pending", "a"),
        (NOTED, pinned("a+a", "a"), "Pending", "a"),
        (NOTED, pinned("a+b"), "Pending", ""),
        (NOTED, pinned("a", ""), "Pending", ""),
        (NOTED, {"nodeName": "b", **pinned("a")}, "Running", "b"),
        (DELETED | NOTED, pinned("a"), "Pending", ""),
        (NOTED, {"schedulingGates": [{"name": QUEUE_GATE}], **pinned("a")}, "Pending", ""),
        (NOTED, {"schedulingGates": [{"name": "example.com/other"}], **pinned("a")}, "Pending", "a"),
    ],
)
def test_pod_takes_room_where_it_is_bound_or_was_pinned(metadata: Obj, spec: Obj, phase: str, expected: str) -> None:
    pod = {"metadata": {"name": "p", **metadata}, "spec": spec, "status": {"phase": phase}}
    assert find_taken_node(pod) == expected
