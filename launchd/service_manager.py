"""The service manager as the commands of the agent use it, whichever the system has."""

import contextlib
import os
import stat
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from launchd.service_definition import ServiceDefinition

ServicePhase = Literal["running", "starting", "stopped", "absent"]
"""`stopped`: loaded without a process; `absent`: not loaded."""
_CALL_SECONDS: Final = 120.0
_FILE_MODE: Final = 0o644


class ServiceError(Exception):
    """The service manager did not do what was asked; the message says why, and what to do."""


class ServiceState(msgspec.Struct, frozen=True, rename="camel"):
    """The service manager's view of the agent."""

    manager: Literal["launchd", "systemd"]
    job: str
    """The name by which the service manager's own commands know it, such as `system/dev.pomona.agent`."""
    definition: str
    """The path of its plist or unit."""
    phase: ServicePhase
    pid: int | None = None
    runs: int | None = None
    """Starts since it was loaded."""
    last_exit: str | None = None


class ServiceManager(ABC):
    """A service manager with the agent as its service. Every method blocks, and raises ServiceError.

    Args:
        definition_path: the path of the plist or unit.
        needs_root: True for a service of the system.
    """

    def __init__(self, definition_path: Path, *, needs_root: bool) -> None:
        self.definition_path, self.needs_root = definition_path, needs_root

    def read_definition(self) -> ServiceDefinition | None:
        """Return the installed definition; None if none is installed."""
        content = self._read_content()
        try:
            return self.parse(content) if content is not None else None  # as a plist or a unit
        except ValueError as error:
            raise ServiceError(f"{self.definition_path}: {error}: install the agent again") from error

    def read_arguments(self) -> tuple[str, ...] | None:
        """Return program and arguments of the installed agent; None if none is installed."""
        definition = self.read_definition()
        return definition.arguments if definition else None

    def find_outdated(self) -> ServiceDefinition | None:
        """Return the installed definition if this version would write it differently; else, or without one, None."""
        definition = self.read_definition()
        # It is up to date if this version would write what is on disk.
        if definition is None or self.render(definition) == self._read_content():
            return None
        return definition

    def is_written(self, content: bytes) -> bool:
        """Return whether the plist or unit has this content, and the owner and mode without which launchd refuses it.

        A file that a backup brought back may have another owner.
        """
        if self._read_content() != content:
            return False
        status = self.definition_path.lstat()
        is_usable = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == _FILE_MODE
        return is_usable and status.st_uid == os.geteuid()

    def write_definition(self, content: bytes) -> None:
        """Write the plist or unit, which every user may read, whole or not at all."""
        # Written beside its place, then renamed into it.
        path = self.definition_path
        temporary = path.with_name(f".{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:
                file.write(content)
                os.fchmod(file.fileno(), _FILE_MODE)
                # After a power cut an empty file would leave the machine without its agent.
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise ServiceError(f"cannot write {path}: {error.strerror or error}") from error

    def remove_definition(self) -> None:
        """Remove the plist or unit."""
        try:
            self.definition_path.unlink(missing_ok=True)
        except OSError as error:
            raise ServiceError(f"cannot remove {self.definition_path}: {error.strerror or error}") from error

    def _read_content(self) -> bytes | None:
        """Return the content of the plist or unit; None if there is none."""
        try:
            return self.definition_path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ServiceError(f"cannot read {self.definition_path}: {error.strerror or error}") from error

    @staticmethod
    @abstractmethod
    def parse(content: bytes) -> ServiceDefinition:
        """Read the content of a plist or unit. Raises ValueError if it is of something else."""

    @staticmethod
    @abstractmethod
    def render(definition: ServiceDefinition) -> bytes:
        """Return the content of the plist or unit."""

    @abstractmethod
    def install(self, definition: ServiceDefinition) -> None:
        """Write the definition and start the agent, in the place of another one; an equal one that runs is kept."""

    @abstractmethod
    def uninstall(self) -> None:
        """Stop the agent, and remove the definition. Engines go on, unless the agent was asked to stop them."""

    @abstractmethod
    def restart(self) -> None:
        """End the agent, if it runs, and start it again. Engines go on."""

    @abstractmethod
    def read_state(self) -> ServiceState:
        """Return the service manager's view of the agent."""


def run_command(argv: Sequence[str]) -> tuple[int, str]:
    """Run a command of the service manager; return its exit code and output. Raises ServiceError: it does not end."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_CALL_SECONDS)
    except FileNotFoundError as error:
        raise ServiceError(f"{argv[0]} is not on PATH: this system cannot keep the agent running") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceError(f"{' '.join(argv)}: {error}") from error
    return done.returncode, done.stdout + done.stderr
