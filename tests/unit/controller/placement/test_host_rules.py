"""Taints and labels of hosts: tolerated and selected by the same rules as those of nodes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.placement.capacity import HostCapacity, list_eligible_hosts
from controller.placement.displacement import find_displacements, read_orders
from controller.placement.explanation import explain
from controller.placement.node_rules import admits, find_untolerated
from controller.placement.planner import PlanRules, plan
from controller.placement.queued_service import QueuedServiceSpec, read_host_demands
from controller.placement.units import HostRequirement
from crds.meta import Toleration
from crds.metalhost import HostTaint, MetalHostSpec
from kube.client import Obj
from kube.resources import METAL_HOSTS
from tests.support.api_objects import GIB, as_process, condition, host, process, store
from tests.support.waiting_units import host_cell, waiting_process

RESEARCH = HostTaint("dedicated", "NoSchedule", "research")
LLAMA = frozenset({"llama.cpp"})

WORDS = st.sampled_from(["", "a", "b"])
TAINTS = st.lists(
    st.builds(HostTaint, st.sampled_from(["a", "b"]), st.sampled_from(["NoSchedule", "NoExecute"]), WORDS), max_size=3
)
TOLERATIONS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "key": WORDS,
            "operator": st.sampled_from(["Exists", "Equal"]),
            "value": WORDS,
            "effect": st.sampled_from(["", "NoSchedule", "NoExecute", "PreferNoSchedule"]),
        },
    ),
    max_size=3,
)


@given(TAINTS, TOLERATIONS)
def test_host_admits_what_a_node_with_the_same_taints_admits(taints: list[HostTaint], tolerations: list[Obj]) -> None:
    node = {"metadata": {"name": "a"}, "spec": {"taints": [msgspec.to_builtins(taint) for taint in taints]}}
    tolerated = msgspec.convert(tolerations, list[Toleration])
    assert (find_untolerated(taints, tolerated) is None) == admits(node, {"tolerations": tolerations})


@pytest.mark.parametrize(
    ("demands", "refusal"),
    [
        ({}, "LabelMissing"),
        ({"selector": frozenset({("room", "lab")})}, ""),
        ({"selector": frozenset({("room", "attic")})}, "LabelMissing"),
        ({"tolerations": ()}, "Taint"),
        ({"tolerations": (Toleration("dedicated", value="other"),)}, "Taint"),
        ({"tolerations": (Toleration("dedicated", "Exists"),)}, ""),
    ],
)
def test_host_with_other_labels_or_taints_is_refused(demands: Obj, refusal: str) -> None:
    rules: Obj = {"selector": frozenset({("room", "x")}), "tolerations": (Toleration(operator="Exists"),)}
    if demands:
        rules = {"selector": frozenset(), "tolerations": rules["tolerations"], **demands}
    requirement = HostRequirement("llama.cpp", "team", **rules)
    labels = frozenset({("room", "lab"), ("floor", "2")})
    assert requirement.refuse(host_cell("a", labels=labels, taints=(RESEARCH,))) == refusal
    capacity = HostCapacity("a", LLAMA, 4 * GIB, labels=labels, taints=(RESEARCH,))
    assert requirement.refuse_host(capacity) == refusal
    assert bool(list_eligible_hosts(requirement, (), [capacity])) == (not refusal)


def test_requirements_that_differ_in_a_rule_share_no_search() -> None:
    plain = HostRequirement("llama.cpp", "team")
    others = [
        HostRequirement("llama.cpp", "team", selector=frozenset({("room", "lab")})),
        HostRequirement("llama.cpp", "team", tolerations=(Toleration("dedicated"),)),
    ]
    assert len({requirement.identity for requirement in (plain, *others)}) == 3
    assert len({requirement.shape for requirement in (plain, *others)}) == 3


@pytest.mark.parametrize(
    ("fields", "message", "remedy"),
    [
        (
            {"taints": (RESEARCH,)},
            "the service does not tolerate the taint dedicated=research:NoSchedule",
            "add it to spec.tolerations, or pomona host taint a dedicated-",
        ),
        ({}, "the host lacks room=lab of nodeSelector", "kubectl label metalhost a room=lab"),
    ],
)
def test_explanation_names_the_rule_and_the_way_out(fields: Obj, message: str, remedy: str) -> None:
    selector = frozenset() if fields else frozenset({("room", "lab")})
    unit = waiting_process("one", 2, requirement=HostRequirement("llama.cpp", "team", selector=selector))
    cells = [host_cell("a", **fields)]
    (explanation,) = explain(unit, cells, plan(cells, [unit], PlanRules(), 0.0), PlanRules())
    assert (explanation.message, explanation.remedy) == (message, remedy)


def test_command_for_a_label_runs_nothing_that_a_tenant_states() -> None:
    selector = frozenset({("room", "$(reboot)"), ("rack", "a")})
    unit = waiting_process("one", 2, requirement=HostRequirement("llama.cpp", "team", selector=selector))
    cells = [host_cell("a")]
    (explanation,) = explain(unit, cells, plan(cells, [unit], PlanRules(), 0.0), PlanRules())
    assert explanation.remedy == "kubectl label metalhost a rack=a 'room=$(reboot)'"


def test_tolerations_that_cannot_be_read_tolerate_nothing() -> None:
    assert read_host_demands(QueuedServiceSpec(tolerations=[{"operator": "Newer"}])).tolerations == ()
    assert read_host_demands(QueuedServiceSpec(tolerations=[{"key": "a"}], node_selector={"b": "c"})) == (
        frozenset({("b", "c")}),
        (Toleration("a"),),
    )


EVICTING = MetalHostSpec(taints=[HostTaint("dedicated", "NoExecute")])
UNDER_PRESSURE: Obj = {"conditions": [condition("DisruptionTarget", "True", "MemoryPressure", "moves")]}


@pytest.mark.parametrize(
    ("fields", "spec", "moved", "cause", "says"),
    [
        ({}, MetalHostSpec(), (), None, ""),
        ({}, MetalHostSpec(unschedulable=True, taints=[RESEARCH]), (), None, ""),
        ({}, MetalHostSpec(drain=True), (), "Drain", "host a is drained"),
        ({}, EVICTING, (), "Taint", "host a has the taint dedicated:NoExecute"),
        (UNDER_PRESSURE, MetalHostSpec(), (), "MemoryPressure", "host a: moves"),
        (UNDER_PRESSURE, MetalHostSpec(drain=True), (), "Drain", ""),
        ({"conditions": [condition("DisruptionTarget", "False", "Recovered")]}, MetalHostSpec(), (), None, ""),
        ({}, MetalHostSpec(), ("uid-one",), "Rebalance", "host a is left for a better one"),
        ({}, MetalHostSpec(), ("uid-two",), None, ""),
    ],
)
def test_each_cause_displaces_a_process(
    fields: Obj, spec: MetalHostSpec, moved: tuple[str, ...], cause: str | None, says: str
) -> None:
    orders = read_orders(store((METAL_HOSTS, host("a") | {"spec": msgspec.to_builtins(spec)})))
    bound = as_process(process("one", host="a", phase="Ready", **fields))
    displacement = find_displacements([bound], orders, (), moved).get("uid-one")
    assert (displacement and displacement.cause) == cause
    assert displacement is None or says in displacement.message
    if cause == "Taint":
        tolerated = (Toleration("dedicated", "Exists"),)
        assert find_displacements([bound], orders, tolerated, ()) == {}
