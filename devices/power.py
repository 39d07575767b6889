"""Where the power comes from and how much is left: a laptop on battery is no place for a long answer."""

import re
import sys
from typing import Final, Literal, NamedTuple

import psutil

from devices.tools import told

Source = Literal["ac", "battery", "ups"]

COMMAND: Final = ("/usr/bin/pmset", "-g", "batt")
_SOURCES: Final[dict[str, Source]] = {"AC Power": "ac", "Battery Power": "battery", "UPS Power": "ups"}


class Power(NamedTuple):
    """One look."""

    source: Source | None = None
    battery_percent: int | None = None
    """None where there is no battery, too."""


def read() -> Power:
    """Look now."""
    return parse_pmset(told(*COMMAND)) if sys.platform == "darwin" else _linux()


def parse_pmset(text: str) -> Power:
    """Read `pmset -g batt`: the source in the first line, then one line for each battery and UPS.

    What a battery does, and for how long, is left out: `charging` is part of `discharging`, and there is not always an
    estimate.
    """
    source = re.search(r"^Now drawing from '([^']+)'\n", text, re.MULTILINE)
    percent = re.search(r"^ -InternalBattery-[0-9]+ [^\t\n]*\t([0-9]{1,3})%;[^\n]*\n", text, re.MULTILINE)
    return Power(_SOURCES.get(source[1]) if source else None, _percent(int(percent[1])) if percent else None)


def _linux() -> Power:
    try:
        battery = psutil.sensors_battery()
    except (OSError, ValueError):
        battery = None
    if battery is None:
        return Power()
    source: Source | None = {True: "ac", False: "battery"}.get(battery.power_plugged)  # type: ignore[assignment]
    return Power(source, _percent(int(battery.percent)))


def _percent(number: int) -> int | None:
    return number if 0 <= number <= 100 else None  # noqa: PLR2004 - %
