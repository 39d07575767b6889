"""The status of a MetalHost has the known facts, and is written only when they change by a step."""

import json
from contextlib import AbstractAsyncContextManager
from importlib import metadata

import msgspec
import pytest

from crds.metalhost import CoreLevel
from devices.facts import HostFacts
from devices.gpu import Gpu
from devices.host import HostState
from devices.power import Power
from devices.pressure import PressureReading
from kube.client import Client, Obj
from kube.transport import Request, Response, Stream
from metal_agent.assignments import STANDALONE, UNREADABLE, Assignment
from metal_agent.cluster.endpoint_slices import FIELD_MANAGER
from metal_agent.cluster.host_status import build_status, report_host
from metal_agent.memory.ledger import Ledger

GIB = 2**30


def body(facts: HostFacts, state: HostState) -> Obj:
    status: Obj = msgspec.to_builtins(build_status(facts, state, "10.0.0.7", Ledger(8 * GIB), []))
    return status


def test_known_facts_of_a_mac_are_in_the_status() -> None:
    facts = HostFacts(
        chip="Apple M5 Pro",
        core_levels=(CoreLevel(name="Super", cores=6), CoreLevel(name="Performance", cores=12)),
        memory_bandwidth_bytes_per_second=307 * 10**9,
        booted_at_seconds=1795262400,
    )
    state = HostState(
        pressure=PressureReading("warn", 0, None), thermal="heavy", power=Power("battery", 0), gpu=Gpu(used_bytes=0)
    )
    status = body(facts, state)
    assert status["coreLevels"] == [{"name": "Super", "cores": 6}, {"name": "Performance", "cores": 12}]
    assert status["memoryBandwidthBytesPerSecond"] == 307_000_000_000
    assert status["bootedAt"] == "2026-11-21T12:00:00Z"
    assert (status["memoryPressure"], status["thermalLevel"], status["powerSource"]) == ("warn", "heavy", "battery")
    # These zeros were measured.
    assert (status["swapUsedBytes"], status["gpuUsedBytes"], status["batteryPercent"]) == (0, 0, 0)


def test_unknown_facts_are_absent() -> None:
    status = body(HostFacts(), HostState())
    assert status.keys() == {
        "address", "agentVersion", "availableBytes", "available", "budgetBytes",
    }  # fmt: skip


def test_version_is_that_of_the_running_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    running = metadata.version("pomona")
    monkeypatch.setattr(metadata, "version", lambda _name: "9.9.9")  # an update has replaced the files
    assert body(HostFacts(), HostState())["agentVersion"] == running


def standalone(uid: str) -> Assignment:
    return Assignment(f"{STANDALONE}{uid}", "default", uid, UNREADABLE)


def test_over_committed_host_does_not_report_unclaimed_memory_as_free() -> None:
    # Of a budget of 8 GiB, 11 are in use; `pomona up` left 2 of them, which the cluster could take.
    left = standalone("left")
    ledger = Ledger(8 * GIB, {"cluster": 9 * GIB, left.uid: 2 * GIB})
    status = build_status(HostFacts(), HostState(), "10.0.0.7", ledger, [left])
    assert status.available_bytes == 0
    ledger.release("cluster")
    status = build_status(HostFacts(), HostState(), "10.0.0.7", ledger, [left])
    assert status.available_bytes == 8 * GIB


class OneHost:
    """An API server with one MetalHost, which takes its status as server-side apply does."""

    def __init__(self) -> None:
        self.host: Obj = {"metadata": {"name": "mac-1", "uid": "uid", "resourceVersion": "1"}}
        self.written: list[Obj] = []

    async def request(self, request: Request) -> Response:
        if request.method == "PATCH":
            self.written.append(json.loads(request.body or b"")["status"])
            owned: Obj = {"f:status": {f"f:{name}": {} for name in self.written[-1]}}
            entry = {"manager": FIELD_MANAGER, "operation": "Apply", "subresource": "status", "fieldsV1": owned}
            self.host = {"metadata": {**self.host["metadata"], "managedFields": [entry]}, "status": self.written[-1]}
        return Response(200, json.dumps(self.host).encode())

    def stream(self, request: Request, *, idle_seconds: float) -> AbstractAsyncContextManager[Stream]:
        raise NotImplementedError

    async def reconnect(self) -> None:
        pass

    async def close(self) -> None:
        pass


def weights(*found: str) -> list[str]:
    return build_status(HostFacts(), HostState(), "10.0.0.7", Ledger(8 * GIB), [], weights=found).weights


def test_weights_that_were_used_last_are_reported_in_an_order_that_a_use_does_not_change() -> None:
    assert weights("c", "a", "b") == weights("b", "c", "a") == ["a", "b", "c"]
    used = [f"{number:064x}" for number in reversed(range(300))]
    assert weights(*used) == sorted(used[:128])


async def test_status_with_the_same_weights_is_not_written_again() -> None:
    api = OneHost()
    for digests in (("b", "a"), ("a", "b"), ("a", "b", "c")):
        status = build_status(HostFacts(), HostState(), "10.0.0.7", Ledger(8 * GIB), [], weights=digests)
        await report_host(Client(api), "mac-1", status)
    assert [each["weights"] for each in api.written] == [["a", "b"], ["a", "b", "c"]]
