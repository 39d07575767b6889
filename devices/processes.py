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
    """Identify this boot of the machine. Raises OSError when the system does not tell."""
    if sys.platform == "darwin":
        return _output(["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"])
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> str | None:
    """Return when the live process `pid` was started, as the kernel tells it; None for none, and for a zombie.

    The text is for comparing within one boot only.

    Raises:
        OSError: the system does not tell, so that the process may well be there.
    """
    if sys.platform == "darwin":
        # lstart has the second in which the process began, as it was stored then. Of ourselves there is always a line,
        # so that no line at all is a failure, and not the absence of `pid`.
        ours = os.getpid()
        return parse_ps(_output(["/bin/ps", "-o", "pid=,state=,lstart=", "-p", f"{pid},{ours}"]), pid)
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def parse_stat(text: str) -> str | None:
    """Read the start time, in clock ticks since boot, from /proc/PID/stat; None for a zombie or a dead process."""
    # The command name stands in parentheses and may itself contain spaces and parentheses.
    fields = text[text.rindex(")") + 1 :].split()
    return None if fields[_STAT_STATE] in {"Z", "X"} else fields[_STAT_START]


def parse_ps(text: str, pid: int) -> str | None:
    """Read the start time from `ps -o pid=,state=,lstart=`; None for a zombie, or when ps knows no such process."""
    for line in text.splitlines():
        found, state, *started = line.split()
        if found == str(pid):
            return None if state.startswith("Z") else " ".join(started)
    return None


def _output(argv: list[str]) -> str:
    """What a system tool prints, which is never nothing. Raises OSError."""
    try:
        result = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_SECONDS,
            check=True,
            env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
            # Otherwise it forks, and a fork of a macOS process with threads may crash. Ours are not inheritable anyway.
            close_fds=False,
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"{argv[0]} does not tell: {error}") from error
    if not (text := result.stdout.strip()):
        raise OSError(f"{argv[0]} tells nothing")
    return text
