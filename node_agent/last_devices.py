"""The devices that a node had last: a tool that fails once does not make them vanish.

A probe that has problems and does not find all devices that were found before keeps those, for a limited time. A probe
without problems is believed at once, so a device that is really gone is reported with the next probe.
"""

from datetime import datetime
from typing import Final, Literal, NamedTuple

from msgspec import structs

from devices.node_hardware import NodeHardware

KEPT_SECONDS: Final = 600.0
"""Time for which devices are kept that a failing tool does not find; after it they are unknown."""

DeviceStanding = Literal["found", "kept", "unknown"]


class KnownHardware(NamedTuple):
    """The hardware as this agent reports it."""

    hardware: NodeHardware
    standing: DeviceStanding
    """kept: the devices are those of an earlier probe. unknown: a tool has failed for too long."""
    last_found: NodeHardware
    """The hardware of the last probe that was believed."""
    found_at: datetime
    """When that was."""
    found_at_seconds: float
    """The same on the monotonic clock."""


def keep_last_devices(
    last: KnownHardware | None, node_hardware: NodeHardware, now: datetime, now_seconds: float
) -> KnownHardware:
    """Return the hardware to report after a probe.

    Args:
        last: the hardware that was reported before; None: none yet.
        node_hardware: the hardware by this probe.
        now: the wall clock, for people.
        now_seconds: the monotonic clock.
    """
    if last is None or not node_hardware.problems or _list_ids(last.last_found) <= _list_ids(node_hardware):
        return KnownHardware(node_hardware, "found", node_hardware, now, now_seconds)
    if now_seconds - last.found_at_seconds < KEPT_SECONDS:
        return last._replace(hardware=_with_devices_of(last.last_found, node_hardware), standing="kept")
    if node_hardware.devices:
        # Another source knows devices, such as the labels of another labeller.
        return KnownHardware(node_hardware, "found", node_hardware, now, now_seconds)
    return last._replace(hardware=node_hardware, standing="unknown")


def _list_ids(hardware: NodeHardware) -> set[tuple[str, str]]:
    return {(device.id, device.partition) for device in hardware.devices}


def _with_devices_of(last: NodeHardware, hardware: NodeHardware) -> NodeHardware:
    """Return what was found, with the devices of `last` but without their values of that moment."""
    devices = [
        structs.replace(device, free_bytes=None, utilization_percent=None, temperature_celsius=None)
        for device in last.devices
    ]
    return hardware._replace(
        vendor=last.vendor,
        source=last.source,
        device_class=last.device_class,
        driver=last.driver,
        devices=tuple(devices),
        int4=last.int4,
        fp8=last.fp8,
    )
