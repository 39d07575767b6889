"""The tables of docs/placement.md are those of the score."""

import re
from typing import Final, get_args

import pytest

from controller.placement import score
from controller.placement.replacement import (
    LEAST_PAUSE,
    PLACE_SECONDS,
    START_SECONDS,
    HoldReason,
    ReplacementRules,
)
from controller.placement.score import count_cell_points, count_unit_points
from controller.placement.units import SPEED_UNKNOWN, TOO_SLOW, TOO_TIGHT, SpeedProfile
from controller.services.speed_watch import CHECKS
from crds.size import GIB
from tests.controlplane.process import CHECKOUT
from tests.support.queue_units import host, node, pod

PAGE: Final = (CHECKOUT / "docs" / "placement.md").read_text()
SECTION: Final = PAGE[PAGE.index("## Replicas whose speed or fit has fallen") : PAGE.index("## What to know")]
ROWS: Final = dict(re.findall(r"^\| (\w+) \| (\d+) \|", PAGE, re.MULTILINE))


def test_page_has_the_points_of_each_criterion() -> None:
    assert {name: int(points) for name, points in ROWS.items()} == {
        "speed": score.SPEED_POINTS,
        "weights": score.WEIGHTS_POINTS,
        "packing": score.PACKING_POINTS,
        "utilization": score.UTILIZATION_POINTS,
        "cost": score.COST_POINTS,
    }
    assert sum(map(int, ROWS.values())) == 100


def test_page_says_how_packing_counts() -> None:
    bare = count_cell_points(node("n"), 10**6)
    points = [count_cell_points(node("n"), leftover) - bare for leftover in (0, 1, 2)]
    assert points == [14, 7, 4], "all, half, a third"
    assert count_cell_points(host("h"), -64 * GIB) - bare == 7, "half with 64 GiB"


def test_page_says_what_an_unknown_speed_counts() -> None:
    unit = pod("u", speeds=SpeedProfile((("known", 10.0),)))
    assert f"{count_unit_points(unit, node('n', device_class='other'))} for a class of unknown speed" in PAGE


@pytest.mark.parametrize("reason", [TOO_SLOW, SPEED_UNKNOWN, TOO_TIGHT])
def test_page_has_each_reason_of_a_refusal(reason: str) -> None:
    assert f"`{reason}`" in PAGE


def test_page_has_each_reason_why_a_slow_replica_stays_and_no_other() -> None:
    assert set(re.findall(r"^\| `([A-Z]\w+)` \| ", SECTION, re.MULTILINE)) == {"Replacing", *get_args(HoldReason)}


def test_page_has_the_limits_of_a_replacement() -> None:
    rules = ReplacementRules()
    defaults = dict(re.findall(r"^\| `([a-z]\w+)` \| `(\S+)` \|", SECTION, re.MULTILINE))
    assert defaults == {
        "degradeThreshold": f"{rules.degrade_threshold}",
        "checkInterval": f"{rules.check_seconds:.0f}s",
        "coolDown": f"{rules.cool_down_seconds / 60:.0f}m",
    }
    assert (CHECKS, LEAST_PAUSE, PLACE_SECONDS, START_SECONDS) == (10, 9, 120, 3600), "as the page says"
