"""systemd as the service manager, of the system or of one user."""

from pathlib import Path
from typing import Final

from launchd.service_definition import UNIT, ServiceDefinition
from launchd.service_manager import ServiceError, ServiceManager, ServicePhase, ServiceState, run_command
from launchd.systemd_unit import read_unit, render_unit

SYSTEM_UNITS: Final = Path("/etc/systemd/system")
_PROPERTIES: Final = ("LoadState", "ActiveState", "SubState", "MainPID", "NRestarts", "Result", "ExecMainStatus")


class Systemd(ServiceManager):
    """systemd with the agent as its unit.

    Args:
        folder: the folder of the unit.
        user: True for the user's own systemd.
        program: systemctl.
    """

    parse = staticmethod(read_unit)
    render = staticmethod(render_unit)

    def __init__(self, folder: Path, *, user: bool, program: str = "systemctl") -> None:
        super().__init__(folder / UNIT, needs_root=not user)
        self._command = (program, *(["--user"] if user else []))

    def install(self, definition: ServiceDefinition) -> None:
        """Write the unit, and enable and start it, unless an agent with this unit runs. Raises ServiceError."""
        content, phase = self.render(definition), self.read_state().phase
        if phase == "running" and self.is_written(content):
            return
        if phase in {"running", "starting"}:
            # Before the unit is written: if a later step fails, the next call must not find the new unit and an old
            # agent that still runs, which it would take for the new one.
            self._call("stop", UNIT)
        self.write_definition(content)
        self._call("daemon-reload")
        self._call("enable", UNIT)
        self._call("restart", UNIT)

    def uninstall(self) -> None:
        """Stop and disable the unit, and remove its file. Raises ServiceError."""
        if self.definition_path.exists():
            self._call("disable", "--now", UNIT)
            self.remove_definition()
            self._call("daemon-reload")

    def restart(self) -> None:
        """End the agent and start it again. Raises ServiceError."""
        self._call("restart", UNIT)

    def read_state(self) -> ServiceState:
        """Return systemd's view of the unit. Raises ServiceError."""
        shown = self._call("show", UNIT, *(f"--property={name}" for name in _PROPERTIES))
        properties = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        pid, restarts = int(properties.get("MainPID", 0)), properties.get("NRestarts", "")
        return ServiceState(
            manager="systemd",
            job=UNIT,
            definition=str(self.definition_path),
            phase=_find_phase(properties, pid),
            pid=pid or None,
            # systemd counts only the starts after an end that nobody asked for.
            runs=int(restarts) + 1 if restarts.isdecimal() else None,
            last_exit=None if pid else f"{properties.get('ExecMainStatus', '?')} ({properties.get('Result', '?')})",
        )

    def _call(self, *arguments: str) -> str:
        """Call systemctl; return what it printed. Raises ServiceError: it ended with an error."""
        code, output = run_command([*self._command, *arguments])
        if code:
            printed = "; ".join(output.split("\n")).strip("; ")
            if "Failed to connect to bus" in printed and not self.needs_root:
                # As after `su`, which begins no session.
                printed += ": log in as this user, or call `sudo loginctl enable-linger USER` first"
            raise ServiceError(f"{' '.join(self._command)} {' '.join(arguments)} ended with {code}: {printed}")
        return output


def system_systemd() -> Systemd:
    """Return the systemd of the system."""
    return Systemd(SYSTEM_UNITS, user=False)


def user_systemd(home: Path) -> Systemd:
    """Return the systemd of this user."""
    return Systemd(home / ".config" / "systemd" / "user", user=True)


def _find_phase(properties: dict[str, str], pid: int) -> ServicePhase:
    """Return the phase of the unit with these properties; `pid` is its main process, or 0."""
    if properties.get("LoadState") != "loaded":
        return "absent"
    if properties.get("ActiveState") == "active" and pid:
        return "running"
    return "starting" if properties.get("ActiveState") in {"activating", "reloading"} else "stopped"
