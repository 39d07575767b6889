"""The settings of a Mac by the outputs of its tools; an output that is missing or cut is unknown."""

import pytest

from devices import mac_settings
from devices.mac_settings import MacSettings
from tests.unit.devices.recordings import recorded, stand_in


def test_settings_are_read_from_recorded_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {
        "pmset": recorded("pmset_settings.txt"),
        "socketfilterfw": "Firewall is enabled. (State = 1)\n",
        "fdesetup": "FileVault is On.\n",
    }
    stand_in(monkeypatch, outputs)
    assert mac_settings.read() == MacSettings(sleep_minutes=15, firewall_state=1, file_vault=True)


def test_missing_tools_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {})
    assert mac_settings.read() == MacSettings()
    assert not mac_settings.is_quarantined("/opt/homebrew/bin/llama-server")


@pytest.mark.parametrize(
    ("flags", "quarantined"), [("0083", True), ("0183", True), ("00c3", False), ("01E3", False), ("none", True)]
)
def test_program_is_quarantined_until_its_owner_has_opened_it(
    flags: str, *, quarantined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, {"xattr": f"{flags};66f0a1b2;Safari;1A2B3C4D-0000-0000-0000-000000000000\n"})
    assert mac_settings.is_quarantined("/usr/local/bin/llama-server") is quarantined


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        (" sleep                0\n", 0),
        (" SleepDisabled\t\t1\n sleep                1\n", 0),
        (" SleepDisabled\t\t0\n sleep                1\n", 1),
        (" disksleep            10\n displaysleep         20\n", None),
        (" sleep     ", None),
        ("", None),
    ],
)
def test_sleep_setting_is_that_of_the_system(text: str, minutes: int | None) -> None:
    assert mac_settings.parse_sleep_minutes(text) == minutes


@pytest.mark.parametrize(
    ("text", "restarts"),
    [(" womp                 1\n autorestart          0\n", False), (" autorestart          1\n", True), ("", None)],
)
def test_start_after_a_power_cut_is_a_setting_of_some(text: str, restarts: bool | None) -> None:
    assert mac_settings.parse_restart(text) is restarts


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("Firewall is disabled. (State = 0)\n", 0),
        ("Firewall is blocking all non-essential incoming connections. (State = 2)\n", 2),
        ("Firewall is enabled", None),
        ("", None),
    ],
)
def test_firewall_state_is_the_number(text: str, state: int | None) -> None:
    assert mac_settings.parse_firewall_state(text) == state


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("FileVault is Off.\n", False),
        ("FileVault is On.\nEncryption in progress: Percent completed = 12\n", True),
        ("Error: not allowed\n", None),
    ],
)
def test_file_vault_is_read_from_its_first_line(text: str, on: bool | None) -> None:
    assert mac_settings.parse_file_vault(text) is on
