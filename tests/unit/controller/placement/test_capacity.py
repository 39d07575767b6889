"""The capacity of a host, from its report and the processes that are bound to it."""

import pytest

from controller.placement.capacity import MOST_HOST_BYTES, HostCapacity, list_capacities
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES
from tests.support.api_objects import GIB, as_host, condition, host, process, store


def capacity_of(observed: Obj, *processes: Obj) -> HostCapacity:
    cluster = store((METAL_HOSTS, observed), *((METAL_PROCESSES, process) for process in processes))
    (capacity,) = list_capacities(cluster, [as_host(observed)])
    return capacity


def free(host_name: str, *processes: Obj, listed: tuple[str, ...] = ()) -> int:
    observed = host(host_name, 10 * GIB, processes=[{"uid": uid} for uid in listed])
    return capacity_of(observed, *processes).free_bytes // GIB


def test_capacity_is_reported_memory_less_bindings_the_host_has_not_seen() -> None:
    assert free("one") == 10
    assert free("one", process("a", host="one", gib=3)) == 7
    assert free("one", process("a", host="one", gib=3), listed=("uid-a",)) == 10
    assert free("one", process("a", host="two", gib=3), process("b", gib=3)) == 10
    assert free("one", process("a", host="one", gib=99)) == 0


def test_deleted_process_holds_memory_until_its_host_reports_stopped() -> None:
    leaving = {"host": "one", "gib": 4, "deletionTimestamp": "2026-11-21T12:00:00Z"}
    assert free("one", process("a", phase="Stopping", **leaving)) == 6  # type: ignore[arg-type] # fields of one object
    assert free("one", process("a", phase="Stopped", **leaving)) == 10  # type: ignore[arg-type] # fields of one object
    assert free("one", process("a", host="one", gib=4, phase="Rejected")) == 10


def test_host_whose_memory_is_not_known_has_none() -> None:
    assert capacity_of(host("one", None)).free_bytes == 0


@pytest.mark.parametrize(
    ("budget_bytes", "available_bytes", "expected"),
    [
        (2**63 - 1, 2**63 - 1, (MOST_HOST_BYTES, MOST_HOST_BYTES)),
        (-(2**63), 2**63 - 1, (0, MOST_HOST_BYTES)),
        (10 * GIB, -(2**63), (10 * GIB, 0)),
    ],
)
def test_amounts_that_no_host_has_are_not_believed(
    budget_bytes: int, available_bytes: int, expected: tuple[int, int]
) -> None:
    """With them, the sums in the status of a pool were no numbers of the API any more, and were not written."""
    capacity = capacity_of(host("one", available_bytes, budgetBytes=budget_bytes))
    assert (capacity.budget_bytes, capacity.free_bytes) == expected


def test_namespaces_are_those_that_an_administrator_gives() -> None:
    assert capacity_of(host("one") | {"spec": {"namespaces": ["other"]}}).namespaces == {"other"}
    assert capacity_of(host("one")).accepts("team")


def test_host_is_closed_while_its_address_is_refused_and_open_until_that_is_decided() -> None:
    refused = host("one", conditions=[condition("AddressAccepted", "False", message="it is that of a node")])
    assert (capacity_of(refused).is_open, capacity_of(refused).address_problem) == (False, "it is that of a node")
    assert capacity_of(host("one", conditions=[condition("AddressAccepted", "Unknown")])).is_open
