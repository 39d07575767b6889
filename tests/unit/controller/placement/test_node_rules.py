"""The rules by which a node admits a pod, as Kubernetes' scheduler reads them."""

from typing import Any

import pytest

from controller.placement import node_rules
from controller.placement.node_rules import admits
from controller.placement.units import NodeRequirement
from kube.client import Obj
from tests.support import queue_units


def node(*taints: Obj, **spec: Any) -> Obj:
    labels = {"product": "L4", "slots": "4"}
    return {"metadata": {"name": "gpu-1", "labels": labels}, "spec": {"taints": list(taints), **spec}}


def taint(effect: str = "NoSchedule", key: str = "team", value: str = "a") -> Obj:
    return {"key": key, "value": value, "effect": effect}


def selecting(*terms: Obj) -> Obj:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    return {"affinity": {"nodeAffinity": required}}


def label(operator: str, *values: str, key: str = "product") -> Obj:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def test_node_without_rules_admits_a_pod_without_any() -> None:
    assert admits({"metadata": {"name": "gpu-1"}}, {})
    assert admits(node(), {"affinity": {"podAffinity": {}}, "nodeSelector": {}})


@pytest.mark.parametrize(
    ("tolerations", "admitted"),
    [
        ([], False),
        ([{"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"}], True),
        ([{"key": "team", "value": "a"}], True),
        ([{"key": "team", "value": "b"}], False),
        ([{"key": "team", "operator": "Exists"}], True),
        ([{"operator": "Exists"}], True),
        ([{"operator": "Exists", "effect": "NoExecute"}], False),
        ([{"key": "other", "operator": "Exists"}], False),
        ([{"key": "other"}, {"key": "team", "operator": "Exists", "effect": "NoSchedule"}], True),
    ],
    ids=str,
)
def test_taint_is_tolerated(tolerations: list[Obj], admitted: bool) -> None:
    assert admits(node(taint()), {"tolerations": tolerations}) == admitted


@pytest.mark.parametrize(
    ("effect", "admitted"), [("NoSchedule", False), ("NoExecute", False), ("PreferNoSchedule", True)]
)
def test_some_taints_keep_pods_off(effect: str, admitted: bool) -> None:
    assert admits(node(taint(effect)), {}) == admitted


def test_cordoned_node_admits_what_tolerates_that() -> None:
    assert not admits(node(unschedulable=True), {})
    assert admits(node(unschedulable=True), {"tolerations": [{"operator": "Exists"}]})
    assert admits(node(unschedulable=False), {})


@pytest.mark.parametrize(
    ("spec", "admitted"),
    [
        ({"nodeSelector": {"product": "L4"}}, True),
        ({"nodeSelector": {"product": "L4", "zone": "a"}}, False),
        (selecting(label("In", "H100", "L4")), True),
        (selecting(label("In", "H100")), False),
        (selecting(label("In", "H100"), label("Exists")), True),
        (selecting(label("NotIn", "L4")), False),
        (selecting(label("NotIn", "a", key="zone")), True),
        (selecting(label("DoesNotExist", key="zone")), True),
        (selecting(label("DoesNotExist")), False),
        (selecting(label("Exists", key="zone")), False),
        (selecting(label("Gt", "3", key="slots")), True),
        (selecting(label("Gt", "4", key="slots")), False),
        (selecting(label("Lt", "5", key="slots")), True),
        (selecting(label("Gt", "0", key="product")), False),
        (selecting(label("Lt", "5", key="zone")), False),
        (
            selecting({"matchExpressions": [*label("Exists")["matchExpressions"], *label("In")["matchExpressions"]]}),
            False,
        ),
        (selecting({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-1"]}]}), True),
        (selecting({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-2"]}]}), False),
        (selecting({}), False),
    ],
    ids=str,
)
def test_selected_nodes(spec: Obj, admitted: bool) -> None:
    assert admits(node(), spec) == admitted


def test_rules_are_read_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules that a tenant's 256 pods may state took half a minute of each round of a cluster of 1,000 nodes."""
    read = list[Obj]()
    term = label("Exists", key="zone")
    original = node_rules._read_term

    def read_term(each: Obj) -> Any:
        read.append(each)
        return original(each)

    monkeypatch.setattr(node_rules, "_read_term", read_term)
    requirement = NodeRequirement("", selecting(term))
    cells = [queue_units.node("n1"), queue_units.node("n2", labels={"zone": "a"})]
    refusals = [requirement.refuse(cell) for cell in cells]
    assert (refusals, read) == (["NodeRules", ""], [term])
