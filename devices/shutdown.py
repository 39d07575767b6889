"""Detection of a shutdown or restart of this machine: the SIGTERM of a service manager says no reason."""

import os
import sys
from typing import Final

from devices import libsystem, tools

_MANAGER_SECONDS: Final = 2.0
"""Time for systemd to answer; at a shutdown it is busy, and the agent has to end in time."""
_USER_MANAGER_VARIABLE: Final = "MANAGERPID"
"""Environment variable that the systemd of a user gives to its units."""


def is_shutting_down() -> bool:
    """Return True if this machine shuts down or restarts; False if it does not, or cannot say so. Blocks for 2 s."""
    if sys.platform == "darwin":
        return bool(libsystem.sysctl_int("kern.willshutdown"))  # an older macOS has none
    systemctl = tools.find_program("systemctl")
    return systemctl is not None and is_stopping(_read_manager_state(systemctl))


def is_stopping(manager_state: str) -> bool:
    """Decide by the output of `systemctl is-system-running`: `stopping` while shutdown.target is queued or active."""
    return manager_state.strip() == "stopping"


def _read_manager_state(systemctl: str) -> str:
    """Return the state of the systemd that runs this process, such as `running` or `stopping`; "" if it fails.

    That is the systemd of the user if it has started this process: it stops at the user's last logout, too, and ends
    the engines then.
    """
    # _USER_MANAGER_VARIABLE: the user's systemd sets it for what it starts
    user_option = ("--user",) if os.environ.get(_USER_MANAGER_VARIABLE) else ()
    # `is-system-running` itself fails with every state but `running`.
    argv = (systemctl, *user_option, "show", "--property=SystemState", "--value")
    try:
        return tools.output(*argv, timeout_seconds=_MANAGER_SECONDS)
    except OSError:
        return ""
