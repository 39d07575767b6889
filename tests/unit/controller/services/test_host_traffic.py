"""The tokens per second of a service are the sum of its pods and its hosts, and cost little to follow."""

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.reconcile.plan import Leading, Snapshot
from controller.reconcile.triggers import deciding_process
from controller.services.host_traffic import (
    HostTraffic,
    add_host_tokens,
    find_host_tokens,
    take_host_tokens,
)
from controller.services.traffic import MOST_TOKENS_PER_SECOND, UNKNOWN_TRAFFIC, Traffic
from crds.rate import MOST_REPORTED
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, ObjectKey
from tests.support import virtual_time
from tests.support.api_objects import NAMESPACE, NOW, host, process, store
from tests.support.background import running

rates = st.none() | st.floats(0, MOST_TOKENS_PER_SECOND)


def generating(name: str, rate: str, *, on: str = "studio-1", phase: str = "Ready") -> Obj:
    made = process(name, host=on, phase=phase)
    made["status"]["tokensPerSecond"] = rate
    return made


def sum_of(*processes: Obj, hosts: tuple[Obj, ...] = (host("studio-1"),)) -> float | None:
    there = store(*((METAL_PROCESSES, each) for each in processes), *((METAL_HOSTS, each) for each in hosts))
    return find_host_tokens(Snapshot(there, NOW), NAMESPACE, "uid-chat")


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
    of_pods = Traffic(3, 20, pods)
    found = add_host_tokens(of_pods, hosts, Traffic(tokens_per_second=shown))
    assert found[:2] == (3, 20)
    if hosts is None:
        assert found == of_pods
        return
    total = min((pods or 0) + hosts, MOST_TOKENS_PER_SECOND)
    assert found.tokens_per_second in (total, shown)
    if found.tokens_per_second != total:
        assert shown is not None
        assert abs(total - shown) <= 0.1 * max(total, shown)


@given(pods=rates, hosts=rates)
def test_another_leader_shows_the_same_sum(pods: float | None, hosts: float | None) -> None:
    shown = add_host_tokens(Traffic(tokens_per_second=pods), hosts, UNKNOWN_TRAFFIC)
    again = add_host_tokens(take_host_tokens(shown, hosts), hosts, shown)
    assert again == shown


def test_number_of_a_process_decides_no_replica() -> None:
    before, after = generating("a", "1"), generating("a", "2")
    after["status"]["performance"] = {"tokensPerSecond": "3"}
    assert deciding_process(before) == deciding_process(after)
    assert deciding_process(before) != deciding_process(generating("a", "1", phase="Failed"))


def test_service_with_many_processes_is_decided_again_once_a_minute() -> None:
    there, versions = store(), itertools.count(100)
    traffic, enqueued = HostTraffic(there), list[object]()
    recorder: Any = None
    client: Any = None
    leading = Leading(client, there, recorder, lambda resource, key: enqueued.append((resource, key)))

    def put(name: str, rate: int) -> None:
        made = generating(name, str(rate))
        there.put(METAL_PROCESSES, {**made, "metadata": {**made["metadata"], "resourceVersion": str(next(versions))}})

    async def main() -> None:
        async with running(traffic.run(leading)):
            for second in range(600):
                put(f"p{second % 20}", second)
                await asyncio.sleep(1)
            assert 9 <= len(enqueued) <= 11
            assert set(enqueued) == {(INFERENCE_SERVICES, ObjectKey(NAMESPACE, "chat"))}
            enqueued.clear()
            await asyncio.sleep(120)
            enqueued.clear()
            put("p19", 599)
            await asyncio.sleep(120)
            assert enqueued == [], "the number is the same"

    put("p0", 1)
    virtual_time.run(main())
