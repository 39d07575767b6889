"""The definition of the agent as a service: everything that its plist or its unit says, without the form of either."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

SYSTEM_LOGS: Final = Path("/Library/Logs/Pomona") if sys.platform == "darwin" else Path("/var/log/pomona")
"""Folder of root for the output of a service of the system: root opens the file, and a user could plant a link."""
LABEL: Final = "dev.pomona.agent"
"""The label of the job of launchd."""
UNIT: Final = "pomona-agent.service"
"""The name of the unit of systemd."""
SUPERVISOR_VARIABLE: Final = "POMONA_SUPERVISOR"
"""Environment variable of the agent that names its service manager, launchd or systemd."""
PROGRAM: Final = Path(sys.prefix) / "bin" / "pomona"
"""The program of the service. Commands with sudo name it in full: root has another PATH."""
STATE_OPTION: Final = "--state-dir"
PROGRAM_FOLDERS: Final = "/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
"""PATH of the service, with the folders of Homebrew, which neither launchd nor systemd has in its own."""
STOP_SECONDS: Final = 60
"""Time for the agent to end after SIGTERM; launchd's own is 5 s."""
RESTART_SECONDS: Final = 10
"""The least time between two starts."""


class ServiceDefinition(msgspec.Struct, frozen=True):
    """One agent as a service. It has no secret: every user can read the file.

    Args:
        arguments: program and arguments; the program and `--state-dir` are absolute.
        user: the user of a service of the system; None for a service of the user's own.
        home: the home folder of that user.
        output: the file for standard output and standard error; its folder exists.
        sources: environment variables that say from where weights come, such as the mirror of a hub.
    """

    arguments: tuple[str, ...]
    user: str | None
    home: Path
    output: Path
    sources: Mapping[str, str] = {}

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that both forms have."""
        return {"HOME": str(self.home), "PATH": PROGRAM_FOLDERS, **self.sources}

    @staticmethod
    def select_sources(environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a service's environment that are those of `sources`."""
        always_set = {"HOME", "PATH", SUPERVISOR_VARIABLE}
        return {name: value for name, value in environment.items() if name not in always_set}

    @property
    def folder(self) -> Path:
        """The state folder."""
        return find_state_folder(self.arguments)


def find_option(arguments: Sequence[str], option: str) -> str | None:
    """Return the value of an option in the arguments of an agent; None if it is not among them."""
    return arguments[arguments.index(option) + 1] if option in arguments[:-1] else None


def find_state_folder(arguments: Sequence[str]) -> Path:
    """Return the state folder that the arguments of an agent name. Raises ValueError: they name none."""
    folder = find_option(arguments, STATE_OPTION)
    if folder is None:
        raise ValueError(f"the arguments of the agent have no {STATE_OPTION}")
    return Path(folder)
