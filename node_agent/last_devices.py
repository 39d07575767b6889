"""The devices that a node had last: a tool that fails once does not make them vanish.

A probe that has problems and does not find all devices of the probe before it keeps those, for a limited time. A probe
without problems is believed at once, so a device that is really gone is reported with the next probe.
"""

from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from crds.nodefitness import NodeFitnessStatus
from devices.node_hardware import HardwareReading

KEPT_SECONDS: Final = 600.0
"""Time for which devices are kept that a failing tool does not find; after it they are unknown."""

DevicesState = Literal["read", "kept", "unknown"]


class ReportedHardware(NamedTuple):
    """The hardware as this agent reports it."""

    hardware: NodeFitnessStatus
    problems: tuple[str, ...]
    devices_state: DevicesState
    """kept: the devices are those of an earlier probe. unknown: a tool has failed for too long."""
    believed: NodeFitnessStatus
    """The hardware of the last probe whose devices were believed."""
    believed_at_seconds: float
    """When that was, on the monotonic clock."""


def keep_last_devices(last: ReportedHardware | None, reading: HardwareReading, now_seconds: float) -> ReportedHardware:
    """Return the hardware to report after a probe: as it was read, or with the devices of an earlier probe.

    1. A probe without problems, or one that finds all earlier devices, is believed.
    2. Otherwise a tool has probably failed: the earlier devices are kept for `KEPT_SECONDS`.
    3. After that time, devices that the probe did find are believed; if it found none, the devices are unknown.

    Args:
        last: the hardware that was reported before; None: none yet.
        reading: the hardware by this probe.
        now_seconds: the monotonic clock.
    """
    hardware, problems = reading
    # as_read: report what this probe has read, and believe it from now on
    as_read = ReportedHardware(hardware, problems, "read", believed=hardware, believed_at_seconds=now_seconds)

    if last is None or not problems:
        return as_read
    # last.believed: the hardware of the last probe whose devices were believed
    finds_earlier_devices = _list_ids(last.believed) <= _list_ids(hardware)
    if finds_earlier_devices:
        return as_read

    if now_seconds - last.believed_at_seconds < KEPT_SECONDS:
        kept = _replace_devices(hardware, last.believed)
        return last._replace(hardware=kept, problems=problems, devices_state="kept")
    if hardware.devices:
        # Another source has devices, such as the labels of another labeller.
        return as_read

    unknown = replace(hardware, vendor="", source="", device_class="", driver="")
    return last._replace(hardware=unknown, problems=problems, devices_state="unknown")


def _list_ids(hardware: NodeFitnessStatus) -> set[tuple[str, str]]:
    """Return the identity of each device or partition."""
    return {(device.id, device.partition) for device in hardware.devices}


def _replace_devices(hardware: NodeFitnessStatus, earlier: NodeFitnessStatus) -> NodeFitnessStatus:
    """Return the hardware with the devices of an earlier probe, and all facts about devices that go with them.

    Free memory, utilization and temperature are left out: they were true at that moment only.
    """
    devices = [
        replace(device, free_bytes=None, utilization_percent=None, temperature_celsius=None)
        for device in earlier.devices
    ]
    return replace(
        hardware,
        vendor=earlier.vendor,
        source=earlier.source,
        device_class=earlier.device_class,
        driver=earlier.driver,
        devices=devices,
        int4=earlier.int4,
        fp8=earlier.fp8,
    )
