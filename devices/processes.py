"""Which process is which: start times and boot ids that survive clock changes, so that a pid is never mistaken.

A pid alone is reused; psutil's create_time moves when the wall clock is set. The kernel's own values do not.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

_PROBE_TIMEOUT_SECONDS = 5.0
_STAT_STATE, _STAT_START = 0, 19  # fields 3 and 22 of /proc/PID/stat, counted after the command name


@cache
def boot_id() -> str:
    """Identify this boot of the machine; empty when the system does not tell."""
    if sys.platform == "darwin":
        return _output(["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"])
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> str | None:
    """Return when the live process `pid` was started, as the kernel tells it; None for none, and for a zombie.

    The text is for comparing within one boot only.
    """
    if sys.platform == "darwin":
        # lstart has the second in which the process began, as it was stored then.
        return parse_ps(_output(["/bin/ps", "-o", "state=,lstart=", "-p", str(pid)]))
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def parse_stat(text: str) -> str | None:
    """Read the start time, in clock ticks since boot, from /proc/PID/stat; None for a zombie or a dead process."""
    # The command name stands in parentheses and may itself contain spaces and parentheses.
    fields = text[text.rindex(")") + 1 :].split()
    return None if fields[_STAT_STATE] in {"Z", "X"} else fields[_STAT_START]


def parse_ps(text: str) -> str | None:
    """Read the start time from `ps -o state=,lstart=`; None for a zombie, or when ps knows no such process."""
    state, _, started = text.strip().partition(" ")
    return None if not started or state.startswith("Z") else " ".join(started.split())


def _output(argv: list[str]) -> str:
    """What a system tool prints; empty when it fails, hangs or is not there: unknown."""
    try:
        result = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_SECONDS,
            check=True,
            env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()
