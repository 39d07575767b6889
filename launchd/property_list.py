"""The plist of the agent: a LaunchDaemon, or a LaunchAgent for owners without administrator rights.

The keys, their types and their reasons are those of launchd.plist(5).
"""

import plistlib
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from launchd.service_definition import LABEL, RESTART_SECONDS, STOP_SECONDS, SUPERVISOR_VARIABLE, ServiceDefinition

_OWNER_ONLY = 0o077


def render_plist(definition: ServiceDefinition) -> bytes:
    """Return the plist: of a LaunchDaemon if the definition names a user, else of a LaunchAgent."""
    keys: dict[str, Any] = {
        "Label": LABEL,
        "ProgramArguments": list(definition.arguments),
        "WorkingDirectory": str(definition.home),
        "EnvironmentVariables": {**definition.environment, SUPERVISOR_VARIABLE: "launchd"},
        "RunAtLoad": True,
        # Not after `pomona agent stop`, nor after an error that no restart mends: both end with 0.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_SECONDS,
        "ExitTimeOut": STOP_SECONDS,
        # Every other type throttles processor and disk, of the engines as well.
        "ProcessType": "Interactive",
        # Engines and proxy outlive the agent; they have sessions of their own besides.
        "AbandonProcessGroup": True,
        # The limit of open files is raised by the agent itself: a daemon's plist would change it for the whole system.
        "Umask": _OWNER_ONLY,
        "StandardOutPath": str(definition.output),
        "StandardErrorPath": str(definition.output),
    }

    if definition.user:
        keys["UserName"] = definition.user
    else:
        # Background: after a login by ssh there is no Aqua session.
        keys["LimitLoadToSessionType"] = ["Aqua", "Background"]
    return plistlib.dumps(keys)


def read_plist(content: bytes) -> ServiceDefinition:
    """Return the definition in a plist that any version has made. Raises ValueError: it is no plist of an agent."""
    try:
        keys = plistlib.loads(content)
        return ServiceDefinition(
            arguments=tuple(map(str, keys["ProgramArguments"])),
            user=keys.get("UserName"),
            home=Path(keys["WorkingDirectory"]),
            output=Path(keys["StandardOutPath"]),
            sources=ServiceDefinition.select_sources(keys["EnvironmentVariables"]),
        )
    except (plistlib.InvalidFileException, ExpatError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no plist of an agent: {error}") from error
