"""Power source and charge of the battery."""

import re
import sys
from typing import Final, Literal, NamedTuple

import psutil

from devices.tools import output_or_empty

PowerSource = Literal["ac", "battery", "ups"]

COMMAND: Final = ("/usr/bin/pmset", "-g", "batt")
_SOURCES: Final[dict[str, PowerSource]] = {"AC Power": "ac", "Battery Power": "battery", "UPS Power": "ups"}


class Power(NamedTuple):
    """Power source and battery; a fact that could not be read is None."""

    source: PowerSource | None = None
    battery_percent: int | None = None
    """Also None if there is no battery."""


def read() -> Power:
    """Read the power source and the battery now."""
    return parse_pmset(output_or_empty(*COMMAND)) if sys.platform == "darwin" else _read_battery()


def parse_pmset(text: str) -> Power:
    """Read `pmset -g batt`: the source in the first line, then one line for each battery and UPS.

    The battery's state and its remaining time are not read: the word `charging` is part of `discharging`, and
    an estimate is not always printed.
    """
    source = re.search(r"^Now drawing from '([^']+)'\n", text, re.MULTILINE)
    percent = re.search(r"^ -InternalBattery-[0-9]+ [^\t\n]*\t([0-9]{1,3})%;[^\n]*\n", text, re.MULTILINE)
    return Power(_SOURCES.get(source[1]) if source else None, _check_percent(int(percent[1])) if percent else None)


def _read_battery() -> Power:
    """Read the source and the battery of a Linux host; both are None without a battery."""
    try:
        battery = psutil.sensors_battery()
    except (OSError, ValueError):
        battery = None
    if battery is None:
        return Power()
    # psutil's third value, None, is an unknown source.
    source: PowerSource | None = {True: "ac", False: "battery"}.get(battery.power_plugged)  # type: ignore[assignment]
    return Power(source, _check_percent(int(battery.percent)))


def _check_percent(number: int) -> int | None:
    """Return the number if it is a percentage, or None."""
    return number if 0 <= number <= 100 else None  # noqa: PLR2004 - %
