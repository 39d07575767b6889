"""Power source and battery on Linux."""

from typing import NamedTuple

import psutil
import pytest

from devices import power
from devices.power import Power


class Battery(NamedTuple):
    percent: float
    secsleft: int
    power_plugged: bool | None


@pytest.mark.parametrize(
    ("battery", "expected"),
    [
        (Battery(43.7, 3600, power_plugged=False), Power("battery", 43)),
        (Battery(100, -2, power_plugged=True), Power("ac", 100)),
        (Battery(0, -1, power_plugged=None), Power(None, 0)),
        (Battery(250, -1, power_plugged=True), Power("ac", None)),
        (None, Power(None, None)),
    ],
)
def test_power_source_and_battery_of_linux(
    monkeypatch: pytest.MonkeyPatch, battery: Battery | None, expected: Power
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery)
    assert power._read_battery() == expected


def test_unreadable_battery_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def sensors_battery() -> None:
        raise PermissionError("capacity")

    monkeypatch.setattr(psutil, "sensors_battery", sensors_battery)
    assert power._read_battery() == Power()
