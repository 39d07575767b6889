"""The thermal level of Linux by the trip points of its zones."""

from pathlib import Path

import pytest

from devices import thermal
from devices.thermal import ThermalLevel


def zone(folder: Path, name: str, files: dict[str, str]) -> None:
    (folder / name).mkdir(parents=True)
    for file, text in files.items():
        (folder / name / file).write_text(text)


CPU = {
    "trip_point_0_temp": "80000\n",
    "trip_point_0_type": "passive\n",
    "trip_point_1_temp": "95000\n",
    "trip_point_1_type": "hot\n",
    "trip_point_2_temp": "105000\n",
    "trip_point_2_type": "critical\n",
    "trip_point_3_temp": "0\n",
    "trip_point_3_type": "critical\n",
}


@pytest.mark.parametrize(
    ("celsius", "level"),
    [
        ("41000", "nominal"),
        ("80000", "moderate"),
        ("97250", "heavy"),
        ("120000", "trapping"),
        ("", None),
        ("hot", None),
    ],
)
def test_level_of_a_zone_follows_from_its_trip_points(tmp_path: Path, celsius: str, level: ThermalLevel | None) -> None:
    zone(tmp_path, "thermal_zone0", {**CPU, "temp": celsius})
    assert thermal._read_zones(tmp_path) == level


def test_the_worst_zone_counts(tmp_path: Path) -> None:
    zone(tmp_path, "thermal_zone0", {**CPU, "temp": "85000"})
    zone(tmp_path, "thermal_zone1", {**CPU, "temp": "30000"})
    zone(tmp_path, "thermal_zone2", {"temp": "99000"})
    assert thermal._read_zones(tmp_path) == "moderate"


def test_without_trip_points_the_level_is_none(tmp_path: Path) -> None:
    assert thermal._read_zones(tmp_path) is None
    zone(tmp_path, "thermal_zone0", {"temp": "99000"})
    zone(tmp_path, "thermal_zone1", {"temp": "99000", "trip_point_0_type": "active", "trip_point_0_temp": "50000"})
    assert thermal._read_zones(tmp_path) is None
