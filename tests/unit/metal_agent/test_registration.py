import msgspec
import pytest

from devices.facts import CoreLevel, HostFacts
from devices.gpu import Gpu
from devices.host import HostState
from devices.power import Power
from devices.pressure import Reading
from kube.client import Obj
from metal_agent.ledger import Ledger
from metal_agent.registration import settled, status

GIB = 2**30


def body(facts: HostFacts, state: HostState) -> Obj:
    found: Obj = msgspec.to_builtins(status(facts, state, "10.0.0.7", Ledger(8 * GIB), []))
    return found


def test_what_is_known_of_a_mac_is_told() -> None:
    facts = HostFacts(
        chip="Apple M5 Pro",
        core_levels=(CoreLevel("Super", 6), CoreLevel("Performance", 12)),
        memory_bandwidth_bytes_per_second=307 * 10**9,
        booted_at_seconds=1795262400,
    )
    state = HostState(
        pressure=Reading("warn", 0, None), thermal="heavy", power=Power("battery", 0), gpu=Gpu(used_bytes=0)
    )
    found = body(facts, state)
    assert found["coreLevels"] == [{"name": "Super", "cores": 6}, {"name": "Performance", "cores": 12}]
    assert found["memoryBandwidthBytesPerSecond"] == 307_000_000_000
    assert found["bootedAt"] == "2026-11-21T12:00:00Z"
    assert (found["memoryPressure"], found["thermalLevel"], found["powerSource"]) == ("warn", "heavy", "battery")
    # These zeros were measured.
    assert (found["swapUsedBytes"], found["gpuUsedBytes"], found["batteryPercent"]) == (0, 0, 0)


def test_what_is_not_known_is_absent() -> None:
    found = body(HostFacts(), HostState())
    assert found.keys() == {
        "address", "agentVersion", "availableBytes", "available", "budgetBytes",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "now", "written"),
    [
        (5 * GIB, 5 * GIB + 900, 5 * GIB),
        (5 * GIB, 6 * GIB - 1, 5 * GIB),
        (5 * GIB, 6 * GIB, 6 * GIB),
        (5 * GIB, 4 * GIB, 4 * GIB),
        (None, 900, 900),
        (5 * GIB, None, None),
    ],
)
def test_what_moves_all_the_time_is_written_by_steps(before: int | None, now: int | None, written: int | None) -> None:
    wanted = {"chip": "Apple M5"} | ({} if now is None else {"swapUsedBytes": now})
    observed = {} if before is None else {"swapUsedBytes": before}
    assert settled(wanted, observed) == {"chip": "Apple M5"} | ({} if written is None else {"swapUsedBytes": written})
