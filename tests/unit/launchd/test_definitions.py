"""Plist and unit of the agent: they can be read back, have keys and types of the manuals, and hold no secret."""

import plistlib
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchd.property_list import read_plist, render_plist
from launchd.service_definition import LABEL, ServiceDefinition
from launchd.service_manager import ServiceError
from launchd.systemd import Systemd, read_unit, render_unit

# Keys of launchd.plist(5), and the types that it states.
MANUAL: dict[str, type | tuple[type, ...]] = {
    "Label": str,
    "UserName": str,
    "LimitLoadToSessionType": (str, list),
    "ProgramArguments": list,
    "KeepAlive": (bool, dict),
    "RunAtLoad": bool,
    "WorkingDirectory": str,
    "EnvironmentVariables": dict,
    "Umask": (int, str),
    "ExitTimeOut": int,
    "ThrottleInterval": int,
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "ProcessType": str,
    "AbandonProcessGroup": bool,
}
FOLDER = Path("/Users/ada/Library/Application Support/Pomona")
ARGUMENTS = ("/Users/ada/.pomona/bin/pomona", "agent", "--name", "studio-1", "--state-dir", str(FOLDER))


def make_definition(
    user: str | None = "ada", arguments: tuple[str, ...] = ARGUMENTS, home: Path = Path("/Users/ada")
) -> ServiceDefinition:
    return ServiceDefinition(arguments, user, home, FOLDER / "logs" / "agent-start.log")


@pytest.mark.parametrize("user", ["ada", None])
def test_plist_has_keys_and_types_of_the_manual(user: str | None) -> None:
    keys: dict[str, Any] = plistlib.loads(render_plist(make_definition(user)))
    assert {key: value for key, value in keys.items() if not isinstance(value, MANUAL[key])} == {}
    assert not isinstance(keys["Umask"], bool)
    assert all(isinstance(value, str) for value in keys["EnvironmentVariables"].values())
    assert not any(str(value).startswith(("/tmp", "/private/tmp")) for value in keys.values())


def test_plist_says_what_a_server_of_models_needs() -> None:
    keys = plistlib.loads(render_plist(make_definition()))
    log = str(FOLDER / "logs" / "agent-start.log")
    assert keys == {
        "Label": LABEL,
        "UserName": "ada",
        "ProgramArguments": list(ARGUMENTS),
        "WorkingDirectory": "/Users/ada",
        "EnvironmentVariables": {
            "HOME": "/Users/ada",
            "PATH": "/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "POMONA_SUPERVISOR": "launchd",
        },
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 60,
        "ProcessType": "Interactive",
        "AbandonProcessGroup": True,
        "Umask": 0o077,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }


def test_only_a_daemon_names_its_user_and_only_an_agent_its_sessions() -> None:
    daemon, agent = plistlib.loads(render_plist(make_definition())), plistlib.loads(render_plist(make_definition(None)))
    assert (daemon["UserName"], daemon.get("LimitLoadToSessionType")) == ("ada", None)
    assert (agent.get("UserName"), agent["LimitLoadToSessionType"]) == (None, ["Aqua", "Background"])


@pytest.mark.parametrize("content", [b"", b"<plist", plistlib.dumps([]), plistlib.dumps({"Label": "x"})])
def test_file_that_is_no_definition_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="no plist"):
        read_plist(content)
    with pytest.raises(ValueError, match="no unit"):
        read_unit(content)


def test_definition_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    manager = Systemd(tmp_path, user=True)
    assert manager.read_arguments() is None
    manager.definition_path.write_bytes(b"ExecStart=/x --state-dir /y\n")
    with pytest.raises(ServiceError, match=r"\.service: no unit with WorkingDirectory=: install the agent again"):
        manager.read_arguments()
    manager.definition_path.unlink()
    manager.definition_path.mkdir()
    with pytest.raises(ServiceError, match=r"cannot read .*\.service: Is a directory"):
        manager.read_arguments()


WORDS = st.text(st.sampled_from(string.ascii_letters + string.digits + " \"\\$%';#/-=~äß\t\n"), min_size=1, max_size=12)


@given(st.lists(WORDS, min_size=1, max_size=5), st.sampled_from(["ada", None]))
def test_definition_is_read_back_as_it_was(words: list[str], user: str | None) -> None:
    word = words[0]
    name = word.replace("\n", "").replace("\t", "").strip() or "x"
    definition = ServiceDefinition(
        (*ARGUMENTS, *words), user, Path("/Users") / name, FOLDER / f"{name}.log", {"HF_ENDPOINT": word}
    )
    assert read_plist(render_plist(definition)) == definition
    assert read_unit(render_unit(definition)) == definition
    assert definition.folder == FOLDER


@pytest.mark.parametrize("missing", ["WorkingDirectory", "StandardOutPath", "EnvironmentVariables"])
def test_plist_without_a_key_is_no_definition(missing: str) -> None:
    keys = plistlib.loads(render_plist(make_definition()))
    del keys[missing]
    with pytest.raises(ValueError, match=f"no plist of an agent: '{missing}'"):
        read_plist(plistlib.dumps(keys))


def test_definition_of_another_version_is_found_with_all_its_options(tmp_path: Path) -> None:
    manager, definition = Systemd(tmp_path, user=True), make_definition()
    assert manager.find_outdated() is None
    manager.definition_path.write_bytes(render_unit(definition))
    assert manager.find_outdated() is None
    manager.definition_path.write_bytes(render_unit(definition).replace(b"KillMode=process\n", b""))
    assert manager.find_outdated() == definition


def test_unit_does_not_restart_what_no_restart_mends_and_leaves_engines_alone() -> None:
    system, own = (set(render_unit(make_definition(user)).decode().splitlines()) for user in ("ada", None))
    assert system & own >= {
        "StartLimitIntervalSec=0",
        "Type=exec",
        "WorkingDirectory=/Users/ada",
        "Environment=HOME=/Users/ada",
        "Environment=PATH=/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "Environment=POMONA_SUPERVISOR=systemd",
        "Restart=always",
        "RestartSec=10",
        "RestartPreventExitStatus=0 2 78",
        "SuccessExitStatus=143",
        "KillMode=process",
        "OOMPolicy=continue",
        "TimeoutStopSec=60",
        "UMask=0077",
        *(f"Standard{stream}=append:{FOLDER}/logs/agent-start.log" for stream in ("Output", "Error")),
        "NoNewPrivileges=yes",
        "LockPersonality=yes",
        "RestrictSUIDSGID=yes",
    }
    assert system - own == {
        "Wants=network-online.target",
        "After=network-online.target",
        "# At a shutdown, the agent of a user who is not root asks systemd by it.",
        "After=dbus.service",
        "User=ada",
        "ProtectSystem=full",
        "ProtectControlGroups=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelTunables=yes",
        f'ReadWritePaths=-"{FOLDER}"',
        "WantedBy=multi-user.target",
    }
    assert own - system == {"WantedBy=default.target"}
    assert not any(line.startswith("PrivateTmp") for line in system), "engines would lose it with the agent"
