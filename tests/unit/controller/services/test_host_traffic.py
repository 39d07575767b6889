"""The traffic of a service is the sum of its pods and its hosts, and costs little to follow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.reconcile.plan import Snapshot
from controller.services.traffic import (
    MOST_REQUESTS_REPORTED,
    MOST_TOKENS_PER_SECOND,
    UNKNOWN_TRAFFIC,
    Traffic,
    add_host_traffic,
    find_host_traffic,
)
from crds.rate import MOST_REPORTED
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES
from tests.support.api_objects import NAMESPACE, NOW, host, process, store

rates = st.none() | st.floats(0, MOST_TOKENS_PER_SECOND)


def generating(name: str, rate: str, *, on: str = "studio-1", phase: str = "Ready") -> Obj:
    made = process(name, host=on, phase=phase)
    made["status"]["tokensPerSecond"] = rate
    return made


def traffic_of(*processes: Obj, hosts: tuple[Obj, ...] = (host("studio-1"),)) -> Traffic:
    there = store(
        *((METAL_PROCESSES, process) for process in processes), *((METAL_HOSTS, machine) for machine in hosts)
    )
    return find_host_traffic(Snapshot(there, NOW), NAMESPACE, "uid-chat")


def sum_of(*processes: Obj, hosts: tuple[Obj, ...] = (host("studio-1"),)) -> float | None:
    return traffic_of(*processes, hosts=hosts).tokens_per_second


def answering(name: str, requests: int, average: int | None, **options: str) -> Obj:
    made = generating(name, "1", **options)
    made["status"] |= {"requestsPerMinute": requests} | ({} if average is None else {"averageLatencyMs": average})
    return made


def test_requests_are_summed_and_their_time_is_weighted() -> None:
    assert traffic_of(answering("a", 30, 100), answering("b", 10, 500)) == Traffic(40, 200, 2)
    assert traffic_of(answering("a", 0, None), generating("b", "3")) == Traffic(0, None, 4), "unknown is not 0"
    assert traffic_of(answering("a", 30, 100), answering("b", 10, 500, phase="Failed")) == Traffic(30, 100, 1)
    assert traffic_of(answering("a", 2**31 - 1, 5)) == Traffic(MOST_REQUESTS_REPORTED, 5, 1)
    assert traffic_of(answering("a", -7, 5)) == traffic_of(answering("a", 7, -5)) == UNKNOWN_TRAFFIC, "no counts"


def test_pods_and_hosts_of_a_service_are_shown_together() -> None:
    pods, hosts = Traffic(30, 100, 5.0), Traffic(10, 500, 7.0)
    shown = add_host_traffic(pods, hosts, UNKNOWN_TRAFFIC)
    assert shown == Traffic(40, 200, 12.0)
    assert add_host_traffic(UNKNOWN_TRAFFIC, hosts, UNKNOWN_TRAFFIC) == hosts
    assert add_host_traffic(pods, hosts._replace(requests_per_minute=11), shown) == shown


def test_processes_that_serve_on_hosts_that_live_are_summed() -> None:
    assert sum_of() is None
    assert sum_of(process("a", host="studio-1", phase="Ready")) is None, "unknown is not 0"
    assert sum_of(generating("a", "0.0")) == 0
    assert sum_of(generating("a", "12.5"), generating("b", "7"), process("c", host="studio-1")) == 19.5
    assert sum_of(generating("a", "12.5", phase="Stopping")) is None
    assert sum_of(generating("a", "12.5"), hosts=(host("studio-1", ready="False"),)) is None, "it is lost"
    assert sum_of(generating("a", "12.5"), hosts=()) is None
    assert sum_of(generating("a", "9999999999999999")) == MOST_REPORTED


@pytest.mark.parametrize("rate", ["NaN", "-1", "1e300", "inf", "1" * 17, " 1"])
def test_number_that_is_none_counts_nothing(rate: str) -> None:
    assert sum_of(generating("a", rate)) is None
    assert sum_of(generating("a", rate), generating("b", "7")) == 7


@given(pods=rates, hosts=rates, shown=rates)
def test_sum_is_what_is_shown_or_differs_from_it_by_more_than_a_tenth(
    pods: float | None, hosts: float | None, shown: float | None
) -> None:
    of_pods, of_hosts = Traffic(tokens_per_second=pods), Traffic(tokens_per_second=hosts)
    rate = add_host_traffic(of_pods, of_hosts, Traffic(tokens_per_second=shown)).tokens_per_second
    if hosts is None:
        assert rate == pods
        return
    total = min((pods or 0) + hosts, MOST_TOKENS_PER_SECOND)
    assert rate in (total, shown)
    if rate != total:
        assert shown is not None
        assert abs(total - shown) <= 0.1 * max(total, shown)
