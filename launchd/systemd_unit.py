"""The unit of the agent for systemd: of the system, or of the user's own systemd."""

import re
from typing import Final

from launchd.service_definition import RESTART_SECONDS, STOP_SECONDS, SUPERVISOR_VARIABLE, ServiceDefinition

_PLAIN: Final = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_WORD: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')
_ESCAPES: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
_ESCAPED: Final = {escaped: plain for plain, escaped in _ESCAPES.items()}
_EXEC_START: Final = "ExecStart="

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
    text = _UNIT.format(
        network=_NETWORK if definition.user else "",
        user=f"User={definition.user}\n" if definition.user else "",
        command=" ".join(_quote_word(each).replace("$", "$$") for each in definition.arguments),
        home=_escape_specifiers(str(definition.home)),
        environment="\n".join(f"Environment={_quote_word(f'{name}={value}')}" for name, value in environment.items()),
        restart_seconds=RESTART_SECONDS,
        stop_seconds=STOP_SECONDS,
        output=_escape_specifiers(str(definition.output)),
        protection=_PROTECTION.format(folder=_quote_word(str(definition.folder))) if definition.user else "",
        target="multi-user.target" if definition.user else "default.target",
    )
    return text.encode()


def read_unit_arguments(content: bytes) -> tuple[str, ...]:
    """Return program and arguments of a unit that `render_unit` made. Raises ValueError: it is none."""
    for line in content.decode(errors="replace").splitlines():
        if line.startswith(_EXEC_START):
            words = _WORD.finditer(line.removeprefix(_EXEC_START))
            return tuple(_unquote_word(word[1] if word[2] is None else word[2]) for word in words)
    raise ValueError(f"no unit with {_EXEC_START}")


def _quote_word(word: str) -> str:
    """Quote a word for a line of a unit: neither spaces nor specifiers change it."""
    escaped = _escape_specifiers("".join(_ESCAPES.get(each, each) for each in word))
    return escaped if _PLAIN.fullmatch(word) else f'"{escaped}"'


def _unquote_word(word: str) -> str:
    plain = word.replace("$$", "$").replace("%%", "%")
    return re.sub(r"\\.", lambda found: _ESCAPED[found[0]], plain)


def _escape_specifiers(text: str) -> str:
    return text.replace("%", "%%")
