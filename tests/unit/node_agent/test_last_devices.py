"""A tool that fails for a while takes no device from a node; a device that is gone is gone at once."""

from datetime import UTC, datetime

from crds.nodefitness import NodeDevice
from devices.node_hardware import NodeHardware
from node_agent.last_devices import KEPT_SECONDS, KnownHardware, keep_last_devices

NOW = datetime(2026, 11, 26, 22, 0, tzinfo=UTC)
DEVICES = tuple(NodeDevice(id=f"GPU-{number}", temperature_celsius=50, free_bytes=1) for number in range(2))
FOUND = NodeHardware("nvidia", "nvidia-smi", "nvidia-l4x1", "580.1", DEVICES, True, True, cpu_cores=4)
FAILED = NodeHardware("cpu", "proc", "cpu-x4", cpu_cores=4, problems=("nvidia-smi printed garbage",))
PROBLEM = ("nvidia-smi hung",)


def known(found: NodeHardware = FOUND) -> KnownHardware:
    return keep_last_devices(None, found, NOW, 0.0)


def test_device_that_a_probe_without_problems_does_not_find_is_gone() -> None:
    less = FOUND._replace(devices=DEVICES[:1])
    after = keep_last_devices(known(), less, NOW, 30.0)
    assert (after.hardware, after.standing) == (less, "found")


def test_failing_tool_keeps_the_devices_without_their_values_of_then() -> None:
    after = keep_last_devices(known(), FAILED, NOW, 30.0)
    assert after.standing == "kept"
    kept = after.hardware
    assert (kept.vendor, kept.device_class, kept.driver, kept.int4) == ("nvidia", "nvidia-l4x1", "580.1", True)
    assert [device.id for device in kept.devices] == ["GPU-0", "GPU-1"]
    assert {(device.temperature_celsius, device.free_bytes) for device in kept.devices} == {(None, None)}
    assert kept.problems == FAILED.problems


def test_tool_that_loses_one_of_its_devices_with_a_problem_keeps_both() -> None:
    after = keep_last_devices(known(), FOUND._replace(devices=DEVICES[:1], problems=PROBLEM), NOW, 30.0)
    assert len(after.hardware.devices) == 2


def test_devices_are_unknown_after_the_time_limit_and_stay_so_while_the_tool_fails() -> None:
    state = known()
    for second in range(30, int(KEPT_SECONDS), 30):
        state = keep_last_devices(state, FAILED, NOW, float(second))
        assert state.standing == "kept"
    for later in (KEPT_SECONDS, KEPT_SECONDS + 3600):
        state = keep_last_devices(state, FAILED, NOW, later)
        assert (state.standing, state.hardware.devices, state.found_at) == ("unknown", (), NOW)
    assert keep_last_devices(state, FOUND, NOW, 9999.0).standing == "found"


def test_devices_of_another_source_are_believed_after_the_time_limit() -> None:
    labels = NodeHardware("nvidia", "labels", "c", devices=(NodeDevice(id="0"),), problems=PROBLEM)
    assert keep_last_devices(known(), labels, NOW, 30.0).hardware.source == "nvidia-smi"
    assert keep_last_devices(known(), labels, NOW, KEPT_SECONDS).hardware.source == "labels"


def test_problem_that_costs_no_device_changes_nothing() -> None:
    hardware = FOUND._replace(problems=("the disk cannot be read",))
    assert keep_last_devices(known(), hardware, NOW, 30.0).hardware == hardware
