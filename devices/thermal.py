"""Thermal level of the host, by the system's own scale: from a certain level on the system throttles."""

import re
import sys
from pathlib import Path
from typing import Final, Literal

from devices import proc
from devices.tools import output_or_empty

ThermalLevel = Literal["nominal", "moderate", "heavy", "trapping", "sleeping"]
"""macOS's own levels. From moderate on the system slows down; trapping: it is about to sleep; sleeping: it sleeps."""

COMMAND: Final = ("/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel")
"""`pmset -g therm` has no level on Apple Silicon, and powermetrics needs root."""
_LEVELS: Final[tuple[ThermalLevel, ...]] = ("nominal", "moderate", "heavy", "trapping", "sleeping")
_LEVEL_OF_TRIP_TYPE: Final[dict[str, ThermalLevel]] = {"passive": "moderate", "hot": "heavy", "critical": "trapping"}
"""Linux's trip points: from passive on the kernel throttles, at hot it warns, at critical it shuts down."""
_COLDEST_MILLIDEGREES: Final = 1000
"""Firmware states 0 or below for an unused trip point."""


def read() -> ThermalLevel | None:
    """Read the thermal level now; None when it could not be read."""
    return parse_notifyutil(output_or_empty(*COMMAND)) if sys.platform == "darwin" else _read_zones()


def parse_notifyutil(text: str) -> ThermalLevel | None:
    """Parse `notifyutil -g NAME`, which prints the name and a number, and its errors on standard output too."""
    match = re.search(rf"^{re.escape(COMMAND[-1])} ([0-4])\n", text, re.MULTILINE)
    return _LEVELS[int(match[1])] if match else None


def _read_zones(zones: Path = Path("/sys/class/thermal")) -> ThermalLevel | None:
    """Return the worst level of all thermal zones of Linux; None if no zone has both a temperature and a trip point.

    A zone has a sensor and trip points: temperatures from which on the kernel does something. The level of a zone is
    that of the worst trip point that it has reached, or nominal.
    """
    worst_index: int | None = None
    for zone in sorted(zones.glob("thermal_zone*")):
        temperature = _read_millidegrees(zone / "temp")
        for path in zone.glob("trip_point_*_temp"):
            trip_type = proc.read_limited(path.with_name(path.name.replace("_temp", "_type"))).strip()
            level = _LEVEL_OF_TRIP_TYPE.get(trip_type)
            trip_point = _read_millidegrees(path)

            # Skipped are unknown kinds of trip points, and those below 1 °C, which firmware states for unused ones.
            if temperature is None or level is None or trip_point is None or trip_point < _COLDEST_MILLIDEGREES:
                continue

            index = _LEVELS.index(level) if temperature >= trip_point else 0  # 0: nominal
            worst_index = index if worst_index is None else max(worst_index, index)
    return None if worst_index is None else _LEVELS[worst_index]


def _read_millidegrees(path: Path) -> int | None:
    """Return the number in a file, or None."""
    text = proc.read_limited(path).strip()
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
