"""The exit codes of the agent, by which a service manager decides whether to start it again, and the reason of its end.

systemd knows codes, launchd success and failure only: under launchd an agent that no restart mends ends with 0. The
reason of the end is kept in a file, which `pomona agent status` shows.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from artifacts import durable
from launchd.service_definition import SUPERVISOR_VARIABLE

STOPPED: Final = 0
"""Everything was stopped on request: the agent stays down."""
TEMPORARY: Final = 75
"""EX_TEMPFAIL: another start may succeed."""
PERMANENT: Final = 78
"""EX_CONFIG: every start with these options fails in the same way."""
TERMINATED: Final = 143
"""SIGTERM under a service manager: whoever sent it, the agent is started again unless the service was stopped."""

ServiceManagerName = Literal["launchd", "systemd"]
_FILE: Final = "last-exit.json"


class AgentExit(msgspec.Struct, frozen=True, rename="camel"):
    """The last end of an agent: its exit code by meaning, the reason, and the time as RFC 3339."""

    code: int
    message: str
    ended_at: str


def read_supervisor(environ: Mapping[str, str] = os.environ) -> ServiceManagerName | None:
    """Return the service manager that started this agent; None in a terminal."""
    supervisor = environ.get(SUPERVISOR_VARIABLE)
    return next((name for name in get_args(ServiceManagerName) if name == supervisor), None)


def exit_status(code: int, supervisor: ServiceManagerName | None) -> int:
    """Return the exit status for `code`: launchd restarts after every failure, so PERMANENT becomes a success there."""
    return STOPPED if supervisor == "launchd" and code == PERMANENT else code


def save_exit(folder: Path, ended: AgentExit) -> None:
    """Keep the end of an agent in its state folder. Raises OSError."""
    durable.write(folder / _FILE, ended)


def load_exit(folder: Path) -> AgentExit | None:
    """Return the last end of an agent; None if there was none since its last start. Raises OSError."""
    return durable.read(folder / _FILE, AgentExit)


def forget_exit(folder: Path) -> None:
    """Forget the last end: an agent runs again. Raises OSError."""
    (folder / _FILE).unlink(missing_ok=True)
