"""Numbers of cells and objects that a round of the queue looks at, however many wait and whatever else there is."""

from collections.abc import Callable

import pytest

from controller.placement import observed_units
from controller.placement.actions import Admit
from controller.placement.cell_registry import CellRegistry
from controller.placement.observed_units import observe_units
from controller.placement.planner import PlanRules, Round, plan
from controller.placement.process_units import build_process_replica
from controller.placement.units import Cell, HostRequirement
from crds.metalprocess import MetalProcess
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES
from kube.store import Store
from tests.support.api_objects import GIB, NOW, condition, host, process, store


def given_to_others(obj: Obj) -> Obj:
    return obj | {"spec": {"namespaces": ["other"]}}


def with_a_refused_address(obj: Obj) -> Obj:
    return obj | {"status": obj["status"] | {"conditions": [condition("AddressAccepted", "False")]}}


def play_round(known: Store) -> Round:
    cells = CellRegistry(known, VENDORS, lambda _host: True).list_cells()
    return plan(cells, observe_units(known, VENDORS, NOW).units, PlanRules(), NOW.timestamp())


def count_comparisons(monkeypatch: pytest.MonkeyPatch, known: Store) -> int:
    count = 0
    refuse = HostRequirement.refuse

    def count_refusal(self: HostRequirement, cell: Cell) -> str:
        nonlocal count
        count += 1
        return refuse(self, cell)

    with monkeypatch.context() as patched:
        patched.setattr(HostRequirement, "refuse", count_refusal)
        play_round(known)
    return count


def waits(number: int, gib: int = 3) -> Obj:
    return process(f"p{number:03}-1-0", gib=gib, serviceName=f"p{number:03}")


def test_hosts_are_compared_once_for_units_that_may_use_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [(METAL_HOSTS, host("one", 8 * GIB)), (METAL_HOSTS, host("two", 7 * GIB))]
    counts = [
        count_comparisons(monkeypatch, store(*hosts, *((METAL_PROCESSES, waits(index)) for index in range(number))))
        for number in (10, 100)
    ]
    assert counts[0] == counts[1] > 0
    (action,) = play_round(store(*hosts, (METAL_PROCESSES, waits(0)))).actions
    assert isinstance(action, Admit)


@pytest.mark.parametrize("change", [given_to_others, with_a_refused_address])
def test_units_that_may_use_no_free_host_cost_one_look(
    change: Callable[[Obj], Obj], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [(METAL_HOSTS, change(host(f"host-{number}"))) for number in range(3)]
    counts = [
        count_comparisons(monkeypatch, store(*hosts, *((METAL_PROCESSES, waits(index)) for index in range(number))))
        for number in (1, 100)
    ]
    assert counts[0] == counts[1]


def test_round_reads_only_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def build_counted(process: MetalProcess, *arguments: object) -> object:
        read.append(process.metadata.name)
        return build_process_replica(process, *arguments)  # type: ignore[arg-type] # passed on as they came

    cluster = store((METAL_HOSTS, host("one", GIB)), *((METAL_PROCESSES, waits(number)) for number in range(20)))
    monkeypatch.setattr(observed_units, "build_process_replica", build_counted)
    play_round(cluster)
    assert len(read) == 20
    read.clear()
    changed = waits(7)
    changed["metadata"]["resourceVersion"] = "8"
    cluster.put(METAL_PROCESSES, changed)
    play_round(cluster)
    assert read == ["p007-1-0"]
