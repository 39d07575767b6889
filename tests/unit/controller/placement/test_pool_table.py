"""AcceleratorPools: which node or host belongs to which, what is refused, and the pools that a unit may use."""

from typing import Any

import msgspec
import pytest

from controller.placement.observed_units import observe_units
from controller.placement.pool_limits import PoolQuota, PoolRules
from controller.placement.pool_table import PoolTable, build_table, read_pools
from controller.placement.units import NodeRequirement
from controller.placement.wake_rules import is_decisive
from crds.acceleratorpool import AcceleratorPool
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import ACCELERATOR_POOLS, DEPLOYMENTS, INFERENCE_SERVICES, METAL_PROCESSES, PODS
from kube.store import Store
from tests.support.api_objects import GIB, NOW, pool, process, store
from tests.support.queue_objects import deployment_of, queue_pod, queued_service

TEAM_A: dict[str, Any] = {"nodeSelector": {"team": "a"}}


def table(*pools: Obj) -> PoolTable:
    return build_table((msgspec.convert(pool, AcceleratorPool) for pool in pools), VENDORS)


def refusal(spec: Obj, name: str = "team-a") -> str:
    pool_table = table(pool(name, **spec))
    assert pool_table.defined == ()
    (refused,) = pool_table.refused
    assert refused.name == name
    return refused.message


def test_node_that_nobody_selects_is_in_the_pool_of_its_accelerator() -> None:
    assert table().find_pool("nvidia", {"team": "a"}) == "nvidia"
    pool_table = table(pool("nvidia", nominal=4), pool("team-a", **TEAM_A), pool("amd-a", "amd", **TEAM_A))
    assert pool_table.find_pool("nvidia", {"team": "b"}) == "nvidia"
    assert pool_table.find_pool("nvidia", {"team": "a", "zone": "z"}) == "team-a"
    assert pool_table.find_pool("amd", {"team": "a"}) == "amd-a"


def test_node_that_several_pools_select_is_in_the_first_by_name() -> None:
    pool_table = table(pool("b", **TEAM_A), pool("a", nodeSelector={"zone": "z"}), pool("c", **TEAM_A))
    assert pool_table.list_selecting("nvidia", {"team": "a", "zone": "z"}) == ["a", "b", "c"]
    assert pool_table.find_pool("nvidia", {"team": "a"}) == "b"


def test_pool_of_the_name_of_its_accelerator_limits_the_implicit_one() -> None:
    pool_table = table(pool("nvidia", nominal=4, elastic={"maxWaiting": 2}, **TEAM_A))
    assert pool_table.rules == {"nvidia": PoolRules(nominal=4, elastic=2)}
    assert pool_table.list_pools("nvidia") == ("nvidia",)


def test_limits_are_read() -> None:
    quotas = [{"namespace": "x", "devices": 3}, {"namespace": "*", "memory": "1Gi"}]
    spec: Obj = {"nominal": "8", "borrowingLimit": 2, "lendingLimit": 0, "quotas": quotas}
    pool_table = table(pool("team-a", **TEAM_A, **spec), pool("macs", "metal", nominal="64Gi", nodeSelector={"a": "b"}))
    assert pool_table.rules == {
        "macs": PoolRules(nominal=64 * GIB, node_labels=(("a", "b"),)),
        "team-a": PoolRules(8, 2, 0, 0, (("team", "a"),)),
    }
    assert pool_table.quotas == {("x", "team-a"): PoolQuota(3), ("*", "team-a"): PoolQuota(memory_bytes=GIB)}


@pytest.mark.parametrize(
    ("spec", "name", "message"),
    [
        ({"accelerator": "nvidai"}, "team-a", "accelerator nvidai does not exist: use one of amd, "),
        ({"accelerator": "cpu"}, "team-a", "accelerator cpu has no devices: use one of amd, "),
        ({"accelerator": "nvidia"}, "amd", "amd is the name of another accelerator, whose pool has it: choose another"),
    ],
)
def test_pool_that_contradicts_itself_is_as_good_as_absent(spec: Obj, name: str, message: str) -> None:
    assert refusal(spec, name).startswith(message)


def test_accelerator_of_a_pool_is_known() -> None:
    pool_table = table(pool("team-a", **TEAM_A), pool("bad", "cpu"))
    names = ("team-a", "nvidia", "metal", "bad", "cpu", "gone")
    assert [pool_table.find_accelerator(name) for name in names] == ["nvidia", "nvidia", "metal", "", "", ""]


def test_status_of_a_pool_changes_nothing_that_is_derived_from_pools() -> None:
    cluster = store((ACCELERATOR_POOLS, pool("team-a", **TEAM_A)))
    first = read_pools(cluster, VENDORS)
    reported = pool("team-a", **TEAM_A, status={"cells": 3})
    reported["metadata"]["resourceVersion"] = "2"
    cluster.put(ACCELERATOR_POOLS, reported)
    assert read_pools(cluster, VENDORS) is first
    cluster.put(ACCELERATOR_POOLS, pool("team-a", version=3, nominal=1, **TEAM_A))
    assert read_pools(cluster, VENDORS) is not first
    same, later = pool("a", version=1), pool("a", version=2)
    assert not is_decisive(cluster, ACCELERATOR_POOLS, pool("a", version=1), same)
    assert is_decisive(cluster, ACCELERATOR_POOLS, same, later)


def queue(*pools: Obj, **spec: Any) -> Store:
    return store(
        (INFERENCE_SERVICES, queued_service(**spec)),
        (DEPLOYMENTS, deployment_of()),
        (PODS, queue_pod("one")),
        *((ACCELERATOR_POOLS, pool) for pool in pools),
    )


def pools_now(known: Store) -> tuple[str, ...]:
    (unit,) = observe_units(known, VENDORS, NOW).units
    return unit.pools


def test_unit_may_use_all_pools_of_its_accelerator_unless_its_service_names_some() -> None:
    pools = [pool("z", nodeSelector={"z": "1"}), pool("a", nodeSelector={"a": "1"}), pool("amd-a", "amd", **TEAM_A)]
    assert pools_now(queue(*pools)) == ("nvidia", "a", "z")
    assert pools_now(queue(*pools, scheduling={"pools": ["z", "nvidia", "z"]})) == ("z", "nvidia")
    assert pools_now(queue(scheduling={"pools": ["gone"]})) == ("gone",)


def test_units_follow_pools_that_come_and_go() -> None:
    store = queue()
    assert pools_now(store) == ("nvidia",)
    store.put(ACCELERATOR_POOLS, pool("team-a", **TEAM_A))
    assert pools_now(store) == ("nvidia", "team-a")
    store.remove(ACCELERATOR_POOLS, None, "team-a")
    assert pools_now(store) == ("nvidia",)


def test_pod_that_was_admitted_without_a_node_still_tells_its_rules() -> None:
    admitted = queue_pod("one", gated=False)
    admitted["spec"]["affinity"] = {"nodeAffinity": {}}
    cluster = store((INFERENCE_SERVICES, queued_service()), (DEPLOYMENTS, deployment_of()), (PODS, admitted))
    (unit,) = observe_units(cluster, VENDORS, NOW).units
    assert isinstance(unit.requirement, NodeRequirement)
    assert (unit.state, unit.cells, set(unit.requirement.pod_spec)) == ("running", (), {"affinity"})


def test_process_may_use_all_pools_of_hosts_unless_its_service_names_some() -> None:
    def read(**spec: Any) -> tuple[str, ...]:
        macs = pool("team-a", "metal", **TEAM_A)
        services = (INFERENCE_SERVICES, queued_service(**spec)) if spec else (ACCELERATOR_POOLS, macs)
        return pools_now(store((METAL_PROCESSES, process("chat-1")), (ACCELERATOR_POOLS, macs), services))

    assert read() == ("metal",), "a process without a service"
    assert read(replicas=1) == ("metal", "team-a")
    assert read(scheduling={"pools": ["team-a"]}) == ("team-a",)
