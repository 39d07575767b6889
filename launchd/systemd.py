"""systemd as the service manager, of the system or of one user, and the unit of the agent."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from launchd.service_definition import RESTART_SECONDS, STOP_SECONDS, SUPERVISOR_VARIABLE, UNIT, ServiceDefinition
from launchd.service_manager import ServiceError, ServiceManager, ServicePhase, ServiceState, run_command

_PLAIN: Final = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_WORD: Final = re.compile(r'"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>\S+)')
_ESCAPES: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
_ESCAPED: Final = {escaped: plain for plain, escaped in _ESCAPES.items()}
_APPEND: Final = "append:"

_UNIT: Final = """\
[Unit]
Description=Pomona agent, which serves models of a cluster on this host
{network}# The agent backs off by itself, and must come back after any number of crashes.
StartLimitIntervalSec=0

[Service]
Type=exec
{user}ExecStart={command}
WorkingDirectory={home}
{environment}
# 0: stopped by `pomona agent stop`; 2 and 78: wrong options, which no restart mends; 143: ended by SIGTERM.
Restart=always
RestartSec={restart_seconds}
RestartPreventExitStatus=0 2 78
SuccessExitStatus=143
# Engines and proxy outlive the agent, and one that the kernel kills for its memory does not end the others.
KillMode=process
OOMPolicy=continue
TimeoutStopSec={stop_seconds}
UMask=0077
StandardOutput=append:{output}
StandardError=append:{output}
NoNewPrivileges=yes
LockPersonality=yes
RestrictSUIDSGID=yes
{protection}
[Install]
WantedBy={target}
"""
_NETWORK: Final = """\
Wants=network-online.target
After=network-online.target
# At a shutdown, the agent of a user who is not root asks systemd by it.
After=dbus.service
"""
_PROTECTION: Final = """\
ProtectSystem=full
ProtectControlGroups=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ReadWritePaths=-{folder}
"""


def render_unit(definition: ServiceDefinition) -> bytes:
    """Return the unit: of the system if the definition names a user, else of the user's own systemd."""
    environment = {**definition.environment, SUPERVISOR_VARIABLE: "systemd"}
    # _NETWORK and _PROTECTION are the lines that only a unit of the system has.
    text = _UNIT.format(
        network=_NETWORK if definition.user else "",
        user=f"User={definition.user}\n" if definition.user else "",
        command=" ".join(_quote_word(argument).replace("$", "$$") for argument in definition.arguments),
        home=_escape_specifiers(str(definition.home)),
        environment="\n".join(f"Environment={_quote_word(f'{name}={value}')}" for name, value in environment.items()),
        restart_seconds=RESTART_SECONDS,
        stop_seconds=STOP_SECONDS,
        output=_escape_specifiers(str(definition.output)),
        protection=_PROTECTION.format(folder=_quote_word(str(definition.folder))) if definition.user else "",
        target="multi-user.target" if definition.user else "default.target",
    )
    return text.encode()


def read_unit(content: bytes) -> ServiceDefinition:
    """Return the definition in a unit that `render_unit` of any version made. Raises ValueError: a line is missing."""
    # A unit has $$ and %% for the plain characters, see `render_unit`.
    environment = [word for line in _find_values(content, "Environment=") for word in _split_words(line)]
    return ServiceDefinition(
        arguments=tuple(word.replace("$$", "$") for word in _split_words(_find_value(content, "ExecStart="))),
        user=next(_find_values(content, "User="), None),
        home=Path(_find_value(content, "WorkingDirectory=").replace("%%", "%")),
        output=Path(_find_value(content, "StandardOutput=").removeprefix(_APPEND).replace("%%", "%")),
        sources=ServiceDefinition.select_sources(dict(word.split("=", 1) for word in environment)),
    )


def _find_values(content: bytes, key: str) -> Iterator[str]:
    """Return the values of a key, which ends with `=`, in the order of their lines."""
    # Not splitlines(): it also splits at what is no end of a line to systemd.
    lines = content.decode(errors="replace").split("\n")
    return (line.removeprefix(key) for line in lines if line.startswith(key))


def _find_value(content: bytes, key: str) -> str:
    """Return the first value of a key. Raises ValueError: there is none."""
    first = next(_find_values(content, key), None)
    if first is None:
        raise ValueError(f"no unit with {key}")
    return first


def _split_words(text: str) -> list[str]:
    """Return the words of a line, each without its quotes and escapes: the inverse of `_quote_word`."""
    words = []
    # _WORD matches a word with or without quotes; _ESCAPED has the character that each escape stands for.
    for match in _WORD.finditer(text):
        word = match["quoted"] if match["plain"] is None else match["plain"]
        words.append(re.sub(r"\\.", lambda escape: _ESCAPED[escape[0]], word.replace("%%", "%")))
    return words


def _quote_word(word: str) -> str:
    """Quote a word for a line of a unit: neither spaces nor specifiers change it."""
    escaped = _escape_specifiers("".join(_ESCAPES.get(character, character) for character in word))
    return escaped if _PLAIN.fullmatch(word) else f'"{escaped}"'


def _escape_specifiers(text: str) -> str:
    """Escape percent signs, which begin specifiers of systemd."""
    return text.replace("%", "%%")


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
