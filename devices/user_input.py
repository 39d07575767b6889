"""Time since somebody last used keyboard, mouse or touch screen of this host."""

import re
import sys
from typing import Final

from devices.tools import output_or_empty

COMMAND: Final = ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOHIDSystem")
_NANOSECONDS: Final = 1e9


def read_idle_seconds() -> float | None:
    """Read the seconds since the last input; None if that could not be read, and always on Linux."""
    return parse_hid_idle(output_or_empty(*COMMAND)) if sys.platform == "darwin" else None


def parse_hid_idle(text: str) -> float | None:
    """Parse the property HIDIdleTime of IOHIDSystem, in nanoseconds; a registry with several systems has the least."""
    times = re.findall(r'^[ |]*"HIDIdleTime" = ([0-9]{1,20})$', text, re.MULTILINE)
    return min(map(int, times)) / _NANOSECONDS if times else None
