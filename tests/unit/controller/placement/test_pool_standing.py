"""The standing of pools: what is there, used, borrowed and lent, and each contradiction by name."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from controller.placement.pool_standing import PoolStanding, measure_pools
from controller.placement.pool_table import build_table
from controller.placement.units import Cell, Unit
from crds.acceleratorpool import AcceleratorPool
from crds.size import GIB
from devices.vendors import VENDORS
from kube.client import Obj
from tests.support.api_objects import pool
from tests.support.queue_decisions import runs, subtract_units
from tests.support.queue_units import gpus, host, node, pod, process

TEAM_A: dict[str, Any] = {"nodeSelector": {"team": "a"}}
CELLS = [node("n"), node("a", pool="team-a", labels={"team": "a"})]


def labels_of(cell: Cell) -> Mapping[str, str]:
    labels: Mapping[str, str] = cell.node["metadata"]["labels"] if cell.node is not None else {"team": "a"}
    return labels


def measure(
    *pools: Obj, cells: list[Cell] | None = None, units: list[Unit] | None = None
) -> Mapping[str, PoolStanding]:
    table = build_table((msgspec.convert(pool, AcceleratorPool) for pool in pools), VENDORS)
    held = units or []
    there = [subtract_units(cell, held) for cell in (CELLS if cells is None else cells)]
    return measure_pools(table, there, held, labels_of)


def problems(*pools: Obj, **facts: Any) -> dict[str, list[tuple[str, str]]]:
    standings = measure(*pools, **facts)
    return {
        name: [(problem.reason, problem.message) for problem in standing.problems]
        for name, standing in standings.items()
        if standing.problems
    }


def test_use_is_counted_by_home_and_by_whoever_holds_a_device() -> None:
    units = [
        runs("own", 2, "a", pools=("team-a",)),
        runs("guest", 3, "a", pools=("nvidia", "team-a")),
        runs("abroad", 1, "n", pools=("team-a", "nvidia")),
        pod("waits", pools=("team-a", "nvidia")),
        pod("waits-too", pools=("nvidia", "team-a")),
    ]
    standings = measure(pool("team-a", **TEAM_A), pool("nvidia"), units=units)
    assert standings["team-a"] == PoolStanding("devices", 1, 8, 5, borrowed=1, lent=3, waiting=1)
    assert standings["nvidia"] == PoolStanding("devices", 1, 8, 1, borrowed=3, lent=1, waiting=1)


def test_replica_of_an_earlier_spec_that_waits_no_longer_is_not_counted() -> None:
    units = [pod("new"), pod("old", is_superseded=True)]
    assert measure(pool("nvidia"), units=units)["nvidia"].waiting == 1


def test_devices_of_other_pods_are_used_too() -> None:
    taken = node("n", free=gpus(3))
    assert measure(pool("nvidia"), cells=[taken])["nvidia"].used == 5


def test_pool_of_hosts_counts_memory() -> None:
    units = [process("p", 16 * GIB, cells=("host/h",))]
    standings = measure(pool("metal", "metal"), cells=[host("h", 64 * GIB)], units=units)
    assert standings["metal"] == PoolStanding("memory", 1, 64 * GIB, 16 * GIB)


def test_pools_that_nobody_defines_have_no_standing() -> None:
    assert measure() == {}


def test_sound_pools_have_no_problem() -> None:
    quotas = [{"namespace": "team", "devices": 3, "memory": "4Gi"}]
    units = [runs("own", 3, "a", pools=("team-a",))]
    assert problems(pool("nvidia", nominal=8), pool("team-a", **TEAM_A, quotas=quotas, nominal=3), units=units) == {}


def test_pool_that_contradicts_itself_says_so() -> None:
    (problem,) = problems(pool("bad", "cpu"))["bad"]
    assert problem[0] == "InvalidSpec"


def test_selector_that_matches_nothing_is_found_unless_an_autoscaler_adds_nodes() -> None:
    nowhere: dict[str, Any] = {"nodeSelector": {"team": "nobody"}}
    message = "pool team-n has no node and no host: correct its accelerator and nodeSelector, or add one"
    assert problems(pool("team-n", **nowhere)) == {"team-n": [("NoCell", message)]}
    assert problems(pool("team-n", **nowhere, elastic={"maxWaiting": 1})) == {}


def test_later_pool_of_an_overlap_is_told() -> None:
    cells = [node(f"a{number}", pool="team-a", labels={"team": "a"}) for number in range(5)]
    (overlap,) = problems(
        pool("team-a", **TEAM_A), pool("team-b", **TEAM_A, elastic={"maxWaiting": 1}), cells=cells
    ).items()
    message = "pool team-a selects a0, a1, a2 and 2 more, too, and comes first by name: change one nodeSelector"
    assert overlap == ("team-b", [("Overlap", message)])


def test_overlap_of_hosts_is_found_by_their_labels() -> None:
    cells = [host("h", pool="macs-1")]
    selected: dict[str, Any] = {"nodeSelector": {"team": "a"}}
    by_pool = problems(pool("macs-1", "metal", **selected), pool("macs-2", "metal", **selected), cells=cells)
    assert [reason for reason, _ in by_pool["macs-2"]] == ["NoCell", "Overlap"]
    assert "macs-1" not in by_pool


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ({"nominal": 1}, "nominal is 1 device, but 2 are in use"),
        ({"borrowingLimit": 0}, "borrowingLimit is 0 devices, but 1 is in use"),
        ({"lendingLimit": 2}, "lendingLimit is 2 devices, but 3 are in use"),
        (
            {"quotas": [{"namespace": "team", "devices": 4}]},
            "the quota of namespace team is 4 devices, but 5 are in use",
        ),
        ({"quotas": [{"namespace": "*", "devices": 4}]}, "the quota of namespace team is 4 devices, but 5 are in use"),
        (
            {"quotas": [{"namespace": "team", "memory": 1}]},
            "the quota of namespace team is 1 B of memory, but 2 B are in",
        ),
    ],
)
def test_limit_below_what_runs_is_found(spec: Obj, limit: str) -> None:
    units = [
        runs("own", 2, "a", pools=("team-a",)),
        runs("guest", 3, "a", pools=("nvidia", "team-a")),
        runs("abroad", 1, "n", pools=("team-a", "nvidia")),
    ]
    ((reason, message),) = problems(pool("team-a", **TEAM_A, **spec), units=units)["team-a"]
    assert (reason, message.startswith(limit)) == ("LimitExceeded", True), message
