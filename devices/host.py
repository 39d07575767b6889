"""This machine: its facts and its state, by the probes of its system."""

import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import NamedTuple

from devices import gpu, libsystem, linux, macos, power, pressure, processes, thermal
from devices.facts import HostFacts
from devices.gpu import Gpu
from devices.power import Power
from devices.pressure import PressureReading
from devices.thermal import ThermalLevel


class HostState(NamedTuple):
    """The facts that change all the time; a fact that could not be read is None."""

    pressure: PressureReading = PressureReading()
    thermal: ThermalLevel | None = None
    power: Power = Power()
    gpu: Gpu = Gpu()
    uptime_seconds: int | None = None
    """Seconds since the system was started, sleep included."""
    wired_limit_bytes: int | None = None
    """The owner's iogpu.wired_limit_mb in bytes, which he may change at any time; None if the system decides."""


def read() -> HostFacts:
    """Read the facts of this machine; a fact that could not be read is None. Blocks for up to a second."""
    facts = macos.read() if sys.platform == "darwin" else linux.read()
    boot_id = None
    with contextlib.suppress(OSError):
        boot_id = processes.boot_id()  # another one after each start of the machine
    return dataclasses.replace(facts, boot_id=boot_id, booted_at_seconds=round(time.time() - since_boot_seconds()))


def state() -> HostState:
    """Read the state of this machine; a fact that could not be read is None. Blocks for some 50 ms on macOS."""
    return HostState(
        pressure=pressure.read(),
        thermal=thermal.read(),
        power=power.read(),
        gpu=gpu.read() if sys.platform == "darwin" else Gpu(),
        uptime_seconds=int(since_boot_seconds()),
        wired_limit_bytes=macos.read_wired_limit_bytes() if sys.platform == "darwin" else None,
    )


def machine_id() -> str | None:
    """Return an id of this machine that a copy of its disk does not share; None if it cannot be read.

    On macOS it is the UUID of the hardware, on Linux /etc/machine-id, which whoever clones a machine has to renew.
    """
    if sys.platform == "darwin":
        return libsystem.host_uuid()
    try:
        return Path("/etc/machine-id").read_text().strip() or None
    except OSError:
        return None


def since_boot_seconds() -> float:
    """Return the seconds since the system was started, sleep included, independent of the wall clock."""
    # Not CLOCK_MONOTONIC: on Linux it stops during sleep, and on macOS it follows changes of the wall clock.
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
    return time.clock_gettime(time.CLOCK_BOOTTIME)
