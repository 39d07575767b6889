"""Partitions of devices, such as NVIDIA's MIG, are devices of their own: a whole one does not stand in for them."""

from controller.placement.actions import Admit
from controller.placement.cell_registry import CellRegistry
from controller.placement.explanation import RefusalCounter, explain
from controller.placement.planner import PlanRules, Round, plan
from controller.placement.pod_units import build_requirement
from controller.placement.pool_limits import sum_of_cell
from controller.placement.standing import WaitFacts, describe_wait, find_largest, sort_refusals
from controller.placement.units import Unit, UnitKey
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import NODES, ObjectKey
from tests.support.api_objects import store
from tests.unit.controller.placement.test_cell_registry import node

MIG = "nvidia.com/mig-1g.10gb"
MEMORY = {"cpu": "64", "memory": "512Gi", "pods": "110"}
WHOLE = node("whole", status={"allocatable": MEMORY | {"nvidia.com/gpu": "8"}})
MIXED = node(
    "mixed", status={"allocatable": MEMORY | {"nvidia.com/gpu": "1", MIG: "7", "rdma/hca_shared_devices": "1k"}}
)
RULES = PlanRules()


def cells(*nodes: Obj) -> CellRegistry:
    return CellRegistry(store(*((NODES, node) for node in nodes)), VENDORS, lambda _host: True)


def unit(name: str, resource: str = MIG, amount: int = 1) -> Unit:
    return Unit(
        key=UnitKey("pod", "team", name),
        uid=name,
        service=ObjectKey("team", name),
        enqueued_at=0.0,
        parts=({resource: amount, "pods": 1},),
        pools=("nvidia",),
        requirement=build_requirement({}, None),
    )


def round_of(known: CellRegistry, *units: Unit) -> Round:
    return plan(known.list_cells(), units, RULES, 0.0)


def test_partition_is_given_by_the_node_that_has_it_until_all_are_taken() -> None:
    registry = cells(WHOLE, MIXED)
    made = round_of(registry, *(unit(f"u{number}") for number in range(8)))
    admitted = [action.cells for action in made.actions if isinstance(action, Admit)]
    assert admitted == [("node/mixed",)] * 7
    assert made.blocked["u7"].feasible == 1
    counts = sort_refusals(RefusalCounter(registry.list_cells(), made).count(unit("u7")))
    assert counts.short == {MIG: 1}
    rows = {
        explanation.cell: explanation.message for explanation in explain(unit("u7"), registry.list_cells(), made, RULES)
    }
    assert rows == {
        "node/whole": f"1 of {MIG} needed, 0 in all",
        "node/mixed": f"1 of {MIG} needed, 0 left",
    }


def test_missing_partition_is_named() -> None:
    registry, wants = cells(WHOLE), unit("u")
    made = round_of(registry, wants)
    assert made.blocked["u"].feasible == 0
    counts = sort_refusals(RefusalCounter(registry.list_cells(), made).count(wants))
    facts = WaitFacts(counts, find_largest(wants, registry.list_cells()))
    assert describe_wait(wants, "NoSuchHardware", facts) == (
        f"no node can ever run it: it needs {MIG}: 1, of which no node of pool nvidia has any: "
        "ask for devices that are there, or add such a node"
    )


def test_pool_counts_whole_devices_and_partitions_and_no_other_resource() -> None:
    assert sum(sum_of_cell(cell, cell.total) for cell in cells(WHOLE, MIXED).list_cells()) == 16
