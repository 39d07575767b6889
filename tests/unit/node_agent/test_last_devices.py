"""A tool that fails for a while takes no device from a node; a device that is gone is gone at once."""

from msgspec.structs import replace

from crds.nodefitness import NodeDevice, NodeFitnessStatus
from devices.node_hardware import HardwareReading
from node_agent.last_devices import KEPT_SECONDS, ReportedHardware, keep_last_devices

DEVICES = [NodeDevice(id=f"GPU-{number}", temperature_celsius=50, free_bytes=1) for number in range(2)]
NVIDIA = NodeFitnessStatus(
    observed_at="2026-11-26T22:00:00Z",
    vendor="nvidia",
    source="nvidia-smi",
    device_class="nvidia-l4x1",
    driver="580.1",
    devices=DEVICES,
    int4=True,
    cpu_cores=4,
)
READ = HardwareReading(NVIDIA)
CPU = NodeFitnessStatus(vendor="cpu", source="proc", device_class="cpu-x4", cpu_cores=4)
FAILED = HardwareReading(CPU, ("nvidia-smi printed garbage",))
PROBLEM = ("nvidia-smi hung",)


def report(reading: HardwareReading = READ) -> ReportedHardware:
    return keep_last_devices(None, reading, 0.0)


def test_device_that_a_probe_without_problems_does_not_find_is_gone() -> None:
    less = replace(NVIDIA, devices=DEVICES[:1])
    after = keep_last_devices(report(), HardwareReading(less), 30.0)
    assert (after.hardware, after.devices_state) == (less, "read")


def test_failing_tool_keeps_the_devices_without_their_values_of_then() -> None:
    after = keep_last_devices(report(), FAILED, 30.0)
    assert after.devices_state == "kept"
    kept = after.hardware
    assert (kept.vendor, kept.device_class, kept.driver, kept.int4) == ("nvidia", "nvidia-l4x1", "580.1", True)
    assert [device.id for device in kept.devices] == ["GPU-0", "GPU-1"]
    assert {(device.temperature_celsius, device.free_bytes) for device in kept.devices} == {(None, None)}
    assert after.problems == FAILED.problems


def test_tool_that_loses_one_of_its_devices_with_a_problem_keeps_both() -> None:
    after = keep_last_devices(report(), HardwareReading(replace(NVIDIA, devices=DEVICES[:1]), PROBLEM), 30.0)
    assert len(after.hardware.devices) == 2


def test_devices_are_unknown_after_the_time_limit_and_stay_so_while_the_tool_fails() -> None:
    state = report()
    for second in range(30, int(KEPT_SECONDS), 30):
        state = keep_last_devices(state, FAILED, float(second))
        assert state.devices_state == "kept"
    for later in (KEPT_SECONDS, KEPT_SECONDS + 3600):
        state = keep_last_devices(state, FAILED, later)
        assert (state.devices_state, state.hardware.devices, state.believed) == ("unknown", [], NVIDIA)
    assert keep_last_devices(state, READ, 9999.0).devices_state == "read"


def test_devices_of_another_source_are_believed_after_the_time_limit() -> None:
    labels = HardwareReading(replace(NVIDIA, source="labels", devices=[NodeDevice(id="0")]), PROBLEM)
    assert keep_last_devices(report(), labels, 30.0).hardware.source == "nvidia-smi"
    assert keep_last_devices(report(), labels, KEPT_SECONDS).hardware.source == "labels"


def test_problem_that_costs_no_device_changes_nothing() -> None:
    reading = READ._replace(problems=("the disk cannot be read",))
    assert keep_last_devices(report(), reading, 30.0)[:2] == reading
