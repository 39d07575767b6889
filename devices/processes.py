"""Identity of processes: start times and boot ids that survive clock changes, so that a reused pid is recognized.

A pid alone is reused; psutil's create_time moves when the wall clock is set. The kernel's own values do not.
"""

import sys
from functools import cache
from pathlib import Path

from devices import libsystem

_STAT_STATE, _STAT_START = 0, 19  # fields 3 and 22 of /proc/PID/stat, counted after the command name


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine. Raises OSError when it cannot be read."""
    if sys.platform == "darwin":
        boot = libsystem.sysctl_text("kern.bootsessionuuid")
        if boot is None:
            raise OSError("the sysctl kern.bootsessionuuid cannot be read")
        return boot
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> str | None:
    """Return the start time of process `pid` as the kernel states it; None when it does not run or is a zombie.

    Start times are comparable within one boot only.

    Raises:
        OSError: the start time cannot be read, so the process may be running.
    """
    if sys.platform == "darwin":
        try:
            ticks = libsystem.start_abstime(pid)
        except PermissionError:
            return "of another user"  # so it is none of ours: the pid was reused
        return None if ticks is None else f"abstime {ticks}"

    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None


def parse_stat(text: str) -> str | None:
    """Read the start time, in clock ticks since boot, from /proc/PID/stat; None for a zombie or a dead process."""
    # The command name stands in parentheses and may itself contain spaces and parentheses.
    fields = text[text.rindex(")") + 1 :].split()
    return None if fields[_STAT_STATE] in {"Z", "X"} else fields[_STAT_START]
