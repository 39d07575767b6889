"""Settings of a Mac that decide whether it is a server: sleep, firewall, FileVault, and quarantine of a program.

The tools print no format that Apple promises; a line that is not recognised is unknown.
"""

import re
from typing import Final, NamedTuple

from devices.tools import output_or_empty

POWER: Final = ("/usr/bin/pmset", "-g")
FIREWALL: Final = ("/usr/libexec/ApplicationFirewall/socketfilterfw", "--getglobalstate")
FILE_VAULT: Final = ("/usr/bin/fdesetup", "status")
QUARANTINE: Final = ("/usr/bin/xattr", "-p", "com.apple.quarantine")
_APPROVED: Final = 0x0040
"""The flag of a quarantine that the owner has lifted by opening the file; the mark itself stays."""


class MacSettings(NamedTuple):
    """The settings; one that could not be read is None."""

    sleep_minutes: int | None = None
    """Minutes without use until the Mac sleeps; 0: never."""
    restarts: bool | None = None
    """It starts again after a power cut; None for a Mac with a battery, too."""
    firewall_state: int | None = None
    """0: off, 1: on, 2: on, and it blocks all incoming connections."""
    file_vault: bool | None = None
    """The disk is encrypted, and locked after a start until somebody logs in."""


def read() -> MacSettings:
    """Read the settings of this Mac. Blocks for some 100 ms."""
    power = output_or_empty(*POWER)
    return MacSettings(
        sleep_minutes=parse_sleep_minutes(power),
        restarts=parse_restart(power),
        firewall_state=parse_firewall_state(output_or_empty(*FIREWALL)),
        file_vault=parse_file_vault(output_or_empty(*FILE_VAULT)),
    )


def is_quarantined(path: str) -> bool:
    """Return True if macOS refuses to run a file because it came from a browser and was not opened by its owner yet.

    The browser has marked it with an attribute that begins with hexadecimal flags. A mark that cannot be read counts.
    """
    flags = output_or_empty(*QUARANTINE, path).strip().partition(";")[0]
    try:
        # _APPROVED: the bit that is set once the owner has opened the file. No flags: there is no mark.
        return bool(flags) and not int(flags, 16) & _APPROVED
    except ValueError:
        return True


def parse_sleep_minutes(text: str) -> int | None:
    """Read `pmset -g`: the line ` sleep  1 (sleep prevented by ...)`, or `SleepDisabled  1`, which outdoes it.

    Return the minutes until the Mac sleeps, 0 if it never does; None: neither line is there.
    """
    if re.search(r"^\s*SleepDisabled\s+1\s*$", text, re.MULTILINE):
        return 0
    match = re.search(r"^ sleep\s+(\d+)\b", text, re.MULTILINE)
    return int(match[1]) if match else None


def parse_restart(text: str) -> bool | None:
    """Read `pmset -g`: the line ` autorestart  0`, which only a Mac without a battery has."""
    match = re.search(r"^ autorestart\s+([01])\b", text, re.MULTILINE)
    return None if match is None else match[1] == "1"


def parse_firewall_state(text: str) -> int | None:
    """Read `socketfilterfw --getglobalstate`: `Firewall is enabled. (State = 1)`."""
    match = re.search(r"\(State = ([012])\)", text)
    return int(match[1]) if match else None


def parse_file_vault(text: str) -> bool | None:
    """Read `fdesetup status`: `FileVault is On.` or `FileVault is Off.`, with more lines while it changes."""
    match = re.search(r"^FileVault is (On|Off)\.", text, re.MULTILINE)
    return None if match is None else match[1] == "On"
