"""Detection of a shutdown, by the sysctl of macOS and by the state of systemd."""

import sys
from pathlib import Path

import pytest

from devices import libsystem, shutdown, tools


@pytest.mark.parametrize(("value", "expected"), [(None, False), (0, False), (1, True)])
def test_mac_announces_its_shutdown_by_a_sysctl(
    monkeypatch: pytest.MonkeyPatch, value: int | None, *, expected: bool
) -> None:
    asked: list[str] = []

    def read(name: str) -> int | None:
        asked.append(name)
        return value

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(libsystem, "sysctl_int", read)
    assert shutdown.is_shutting_down() is expected
    assert asked == ["kern.willshutdown"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo stopping", True),
        ("echo running", False),
        ("echo degraded", False),
        ("echo; exit 1", False),
        ("sleep 60", False),
    ],
)
def test_systemd_says_that_it_stops_or_the_machine_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, *, expected: bool
) -> None:
    write_systemctl(monkeypatch, tmp_path, script)
    monkeypatch.setattr(shutdown, "_MANAGER_SECONDS", 0.5 if script.startswith("sleep") else 10.0)
    assert shutdown.is_shutting_down() is expected


@pytest.mark.parametrize(("pid", "asked"), [("", []), ("17", ["--user"])])
def test_unit_of_a_user_asks_the_systemd_of_that_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pid: str, asked: list[str]
) -> None:
    write_systemctl(monkeypatch, tmp_path, f'echo "$@" > {tmp_path}/asked; echo stopping')
    monkeypatch.setenv("MANAGERPID", pid)
    assert shutdown.is_shutting_down()
    assert (tmp_path / "asked").read_text().split() == [*asked, "show", "--property=SystemState", "--value"]


def test_machine_without_systemd_never_says_that_it_shuts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "find_program", lambda _name: None)
    assert not shutdown.is_shutting_down()


def write_systemctl(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    path = folder / "systemctl"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(tools, "find_program", lambda _name: str(path))
