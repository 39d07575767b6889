"""The patches of the queue, applied to objects as a JSON patch is."""

from datetime import UTC, datetime
from typing import Any

import pytest

from controller.placement.effects import admit_pod, annotate, bind_process, build_eviction, find_gate
from controller.placement.queue_places import find_own_place, format_place
from controller.placement.units import NodeRequirement
from crds.meta import ADMITTED_AT, ENQUEUED_AT, NOMINATED, QUEUE_GATE
from kube.client import Obj
from tests.support.api_objects import process
from tests.support.json_patches import apply_patch

PINNED = {"key": "metadata.name", "operator": "In", "values": ["n7"]}
SELECTED = {"key": "zone", "operator": "In", "values": ["a"]}


def gated(**spec: Any) -> Obj:
    metadata = {"name": "chat-1", "namespace": "team", "uid": "u-1"}
    return {"metadata": metadata, "spec": {"schedulingGates": [{"name": "other"}, {"name": QUEUE_GATE}], **spec}}


def read_terms(pod: Obj) -> Any:
    return pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]


@pytest.mark.parametrize(
    ("affinity", "terms"),
    [
        (None, [{"matchFields": [PINNED]}]),
        ({"podAffinity": {}}, [{"matchFields": [PINNED]}]),
        ({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}, [{"matchFields": [PINNED]}]),
        (
            [{"matchExpressions": [SELECTED]}, {"matchFields": [SELECTED]}],
            [{"matchExpressions": [SELECTED], "matchFields": [PINNED]}, {"matchFields": [SELECTED, PINNED]}],
        ),
    ],
)
def test_a_pod_is_pinned_beside_the_rules_that_it_has(affinity: Any, terms: Any) -> None:
    if isinstance(affinity, list):
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": affinity}}}
    pod = gated(**({} if affinity is None else {"affinity": affinity}))
    admitted = apply_patch(pod, admit_pod(pod, "n7"))
    assert read_terms(admitted) == terms
    assert admitted["spec"]["schedulingGates"] == [{"name": "other"}]
    assert find_gate(admitted) is None
    left = {name: rules for name, rules in admitted["spec"]["affinity"].items() if name != "nodeAffinity"}
    assert left == {name: rules for name, rules in (affinity or {}).items() if name != "nodeAffinity"}


def test_a_pod_for_an_autoscaler_is_free_to_go_anywhere() -> None:
    admitted = apply_patch(gated(), admit_pod(gated(), ""))
    assert admitted["spec"] == {"schedulingGates": [{"name": "other"}]}


IN_POOL = [{"key": "team/pool", "operator": "In", "values": ["a"]}, {"key": "x", "operator": "In", "values": ["1"]}]


@pytest.mark.parametrize(
    ("affinity", "terms"),
    [
        (None, [{"matchExpressions": IN_POOL}]),
        (
            [{"matchExpressions": [SELECTED]}, {"matchFields": [SELECTED]}],
            [{"matchExpressions": [SELECTED, *IN_POOL]}, {"matchFields": [SELECTED], "matchExpressions": IN_POOL}],
        ),
    ],
)
def test_a_pod_for_an_autoscaler_of_a_pool_keeps_to_nodes_of_the_pool(affinity: Any, terms: Any) -> None:
    if affinity is not None:
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": affinity}}}
    pod = gated(**({} if affinity is None else {"affinity": affinity}))
    labels = (("team/pool", "a"), ("x", "1"))
    admitted = apply_patch(pod, admit_pod(pod, "", labels))
    assert read_terms(admitted) == terms
    requirement = NodeRequirement("", {"affinity": admitted["spec"]["affinity"]})
    assert [requirement.demands(label_set) for label_set in (labels, labels[:1], (("x", "2"),))] == [True, True, False]
    assert not NodeRequirement("", {}).demands(labels)


def test_a_pod_demands_labels_only_if_each_of_its_terms_does() -> None:
    terms = [{"matchExpressions": IN_POOL}, {"matchExpressions": [SELECTED]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    requirement = NodeRequirement("", {"affinity": {"nodeAffinity": required}})
    assert not requirement.demands((("team/pool", "a"),))


@pytest.mark.parametrize(
    "changed",
    [
        {"metadata": {"name": "chat-1", "namespace": "team", "uid": "another"}},
        {"spec": {"schedulingGates": [{"name": "other"}]}},
        {"spec": {"schedulingGates": [{"name": QUEUE_GATE}, {"name": "other"}]}},
        {"spec": {}},
    ],
)
def test_a_patch_for_a_pod_that_has_changed_fails(changed: Obj) -> None:
    with pytest.raises(LookupError):
        apply_patch(gated() | changed, admit_pod(gated(), "n7"))


def test_a_pod_without_the_gate_is_not_admitted() -> None:
    with pytest.raises(ValueError, match="team/chat-1 has no gate"):
        admit_pod({"metadata": {"name": "chat-1", "namespace": "team", "uid": "u"}, "spec": {}}, "n7")


def test_an_admitted_pod_is_not_nominated_any_more() -> None:
    pod = gated()
    pod["metadata"]["annotations"] = {NOMINATED: "{}", "mine": "kept"}
    assert set(apply_patch(pod, admit_pod(pod, ""))["metadata"]["annotations"]) == {"mine", ENQUEUED_AT}


@pytest.mark.parametrize("node", ["n7", ""])
def test_an_admitted_pod_has_its_place_noted(node: str) -> None:
    pod = gated()
    pod["metadata"] |= {"annotations": {"mine": "kept"}, "creationTimestamp": "2026-11-21T12:00:00Z"}
    place = format_place(find_own_place(pod))
    noted = apply_patch(pod, admit_pod(pod, node))
    assert noted["metadata"]["annotations"] == {"mine": "kept", ENQUEUED_AT: place}
    inherited = pod | {"metadata": pod["metadata"] | {"annotations": {ENQUEUED_AT: "2026-11-21T11:00:00Z"}}}
    kept = apply_patch(inherited, admit_pod(inherited, node))["metadata"]["annotations"]
    assert kept == {ENQUEUED_AT: "2026-11-21T11:00:00Z"}


def test_a_process_is_bound_with_the_time_of_its_admission() -> None:
    waiting = process("chat-1-0")
    bound = apply_patch(waiting, bind_process(waiting, "studio-1", datetime(2026, 1, 2, tzinfo=UTC)))
    assert bound["spec"]["hostName"] == "studio-1"
    assert bound["metadata"]["annotations"][ADMITTED_AT] == "2026-01-02T00:00:00Z"
    newer = waiting | {"metadata": waiting["metadata"] | {"resourceVersion": "99"}}
    with pytest.raises(LookupError):
        apply_patch(newer, bind_process(waiting, "studio-1", datetime(2026, 1, 2, tzinfo=UTC)))


def test_annotations_are_merged_for_one_object_and_no_successor() -> None:
    assert annotate(gated(), {NOMINATED: None}) == {"metadata": {"uid": "u-1", "annotations": {NOMINATED: None}}}
    assert build_eviction(gated())["deleteOptions"] == {"preconditions": {"uid": "u-1"}}
