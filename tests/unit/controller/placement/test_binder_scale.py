"""Numbers of hosts and processes that the binder looks at for one decision, however many wait."""

from collections.abc import Callable, Collection, Iterable, Sequence

import pytest

from controller.placement import binder
from controller.placement.binder import Binding, WaitingProcess, bind, decide_bindings, list_waiting
from controller.placement.capacity import HostCapacity, eligible_hosts
from crds.metalprocess import MetalProcess
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES, ObjectKey
from tests.support.api_objects import GIB, condition, host, process, store


def wants(name: str, gib: int) -> WaitingProcess:
    key = ObjectKey("team", name)
    return WaitingProcess(key, name, "1", "normal", "2026-01-01T00:00:00Z", "llama.cpp", gib * GIB, frozenset())


def capacity(name: str, gib: int) -> HostCapacity:
    return HostCapacity(name, frozenset({"llama.cpp"}), gib * GIB)


def given_to_others(obj: Obj) -> Obj:
    return obj | {"spec": {"namespaces": ["other"]}}


def with_a_refused_address(obj: Obj) -> Obj:
    return obj | {"status": obj["status"] | {"conditions": [condition("AddressAccepted", "False")]}}


@pytest.mark.parametrize("change", [given_to_others, with_a_refused_address])
def test_processes_that_may_use_no_free_host_are_not_looked_at(
    change: Callable[[Obj], Obj], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []

    def list_counted(processes: Sequence[MetalProcess]) -> list[WaitingProcess]:
        looked_at.extend(each.metadata.name for each in processes)
        return list_waiting(processes)

    monkeypatch.setattr(binder, "list_waiting", list_counted)
    waits = [(METAL_PROCESSES, process(f"a-b-{number}")) for number in range(10)]
    elsewhere = process("far-0", namespace="other")
    free_hosts = [(METAL_HOSTS, change(host(f"host-{number}"))) for number in range(3)]
    assert decide_bindings(store(*free_hosts, *waits), lambda _: True) == []
    assert looked_at == []
    bindings = decide_bindings(store(*free_hosts, *waits, (METAL_PROCESSES, elsewhere)), lambda _: True)
    assert len(bindings) == len(looked_at) == (1 if change is given_to_others else 0)


def test_hosts_are_compared_once_for_processes_that_may_use_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def find_counted(
        runtime: str,
        namespace: str,
        avoid: Collection[str | None],
        among: Iterable[HostCapacity],
        features: frozenset[str],
    ) -> list[HostCapacity]:
        calls.append(runtime)
        return eligible_hosts(runtime, namespace, avoid, among, features)

    monkeypatch.setattr(binder, "eligible_hosts", find_counted)
    waits = [wants(f"p{number:02}", 3) for number in range(20)]
    hosts = [capacity("one", 8), capacity("two", 7)]
    assert [each.host for each in bind(waits, hosts)] == ["one", "two", "one", "two"]
    assert len(calls) == 1
    avoiding = wants("z", 1)._replace(avoid=frozenset({"two"}))
    assert Binding(avoiding, "one") in bind([*waits, avoiding], hosts)
    assert len(calls) == 3
