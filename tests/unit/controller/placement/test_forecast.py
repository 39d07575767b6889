"""The forecast: rounds of the planner one after the other, and what a change would alter."""

import msgspec
import pytest

from controller.placement.forecast import (
    QueueForecast,
    UnitFate,
    build_successor,
    explain_wait,
    forecast,
    list_differences,
    simulate_drain,
)
from controller.placement.planner import PlanRules
from controller.placement.units import CLAIM_SLOT, MEMORY, Cell, Nomination, Unit
from tests.support.queue_decisions import runs, subtract_units
from tests.support.queue_units import GPU, host, node, pod, process

RULES = PlanRules(min_run_seconds=300.0)
NOW = 10_000.0
ANY, LARGE = "gpu.example/[any]", "gpu.example/[large]"


def foresee(cells: list[Cell], units: list[Unit], rules: PlanRules = RULES) -> QueueForecast:
    """Return the forecast for cells that are empty but for these units."""
    return forecast([subtract_units(cell, units) for cell in cells], units, rules, NOW)


def show(fate: UnitFate) -> tuple[str, tuple[str, ...]]:
    return fate.state, fate.cells


def test_victim_of_a_new_unit_waits_at_its_old_place() -> None:
    low = runs("low", 8, "a", priority="low", evictable_since=0.0)
    forecast = foresee([node("a")], [low, pod("new", 8, priority="high"), pod("late", 8, priority="low", at=5.0)])
    assert show(forecast.fates["new"]) == ("starts", ("node/a",))
    assert [evict.uid for evict in forecast.fates["new"].evicts] == ["low"]
    fate = forecast.fates["low"]
    assert show(fate) == ("waits", ())
    assert fate.preemptor is not None
    assert fate.preemptor.uid == "new"
    assert explain_wait(forecast, fate)[:3] == (1, 2, "InsufficientDevices")


def test_victim_moves_to_the_room_that_is_left() -> None:
    low = runs("low", 8, "a", priority="low", evictable_since=0.0)
    new = pod("new", 8, priority="high", selector={"zone": "x"})
    forecast = foresee([node("a", labels={"zone": "x"}), node("b")], [low, new])
    assert show(forecast.fates["new"]) == ("starts", ("node/a",))
    assert show(forecast.fates["low"]) == ("starts", ("node/b",))


def test_time_passes_until_a_young_unit_may_be_evicted() -> None:
    young = runs("young", 8, "a", priority="low", evictable_since=NOW - 100)
    forecast = foresee([node("a")], [young, pod("new", 8, priority="high")])
    assert show(forecast.fates["new"]) == ("starts", ("node/a",))
    assert 200 <= forecast.fates["new"].after_seconds < 201


def test_unit_that_has_just_started_is_young() -> None:
    middle = runs("middle", 4, "a", evictable_since=0.0)
    new = pod("new", 4, priority="high", selector={"zone": "x"})
    late = pod("late", 4, priority="batch", at=5.0)
    forecast = foresee([node("a", 4, labels={"zone": "x"}), node("b", 4)], [middle, new, late])
    assert forecast.fates["new"].after_seconds == 0
    assert forecast.fates["late"].preemptor is not None
    assert show(forecast.fates["middle"]) == ("starts", ("node/b",))
    assert 300 <= forecast.fates["middle"].after_seconds < 301


def test_nothing_happens_to_units_that_fit() -> None:
    forecast = foresee([node("a")], [runs("r", 2, "a"), pod("new", 2)])
    assert show(forecast.fates["r"]) == ("runs", ("node/a",))
    assert show(forecast.fates["new"]) == ("starts", ("node/a",))
    assert forecast.is_complete
    assert forecast.cells[0].free[GPU] == 4


def test_unit_that_ends_makes_room() -> None:
    ending = msgspec.structs.replace(runs("old", 8, "a"), state="ending")
    forecast = foresee([node("a")], [ending, pod("new", 8)])
    assert show(forecast.fates["new"]) == ("starts", ("node/a",))
    assert "old" not in forecast.fates


def test_replaced_unit_ends_and_does_not_come_back() -> None:
    earlier = runs("earlier", 8, "a")
    heir = pod("heir", 8, replaces=frozenset({"earlier"}))
    forecast = foresee([node("a")], [earlier, heir])
    assert show(forecast.fates["heir"]) == ("starts", ("node/a",))
    assert show(forecast.fates["earlier"]) == ("ends", ())


def test_replaced_unit_ends_beside_an_heir_that_finds_room() -> None:
    forecast = foresee([node("a")], [runs("earlier", 4, "a"), pod("heir", 4, replaces=frozenset({"earlier"}))])
    assert show(forecast.fates["heir"]) == ("starts", ("node/a",))
    assert show(forecast.fates["earlier"]) == ("ends", ())
    assert forecast.cells[0].free[GPU] == 4


def test_nominated_unit_gets_its_cell_once_its_victims_have_ended() -> None:
    ending = msgspec.structs.replace(runs("old", 8, "a", priority="low"), state="ending")
    promised = pod("new", 8, priority="high", nomination=Nomination(("node/a",), frozenset({"old"})))
    assert show(foresee([node("a")], [ending, promised]).fates["new"]) == ("starts", ("node/a",))


def test_drained_units_go_where_they_fit_and_others_are_closed_out() -> None:
    units = [process("one", 8, cells=("host/h",)), process("two", 40, cells=("host/h",)), process("w", 20, at=5.0)]
    cells = [subtract_units(cell, units) for cell in (host("h", 64), host("i", 30))]
    before = forecast(cells, units, RULES, NOW)
    after = forecast(*simulate_drain(cells, units, "host/h"), RULES, NOW)
    assert show(before.fates["w"]) == ("starts", ("host/i",))
    assert show(after.fates["one"]) == ("starts", ("host/i",))
    assert show(after.fates["two"])[0] == "waits"
    assert explain_wait(after, after.fates["two"]).reason == "CellsClosed"
    changed = list_differences(before, after, ["one", "two"])
    assert [fate.unit.key.name for fate in changed] == ["one", "two"]


def test_differences_are_those_that_a_change_makes() -> None:
    waiting = [pod("first", 8), pod("second", 8, at=1.0)]
    before, after = foresee([node("a")], waiting), foresee([node("a"), node("b")], waiting)
    (fate,) = list_differences(before, after, ())
    assert (fate.unit.uid, show(fate)) == ("second", ("starts", ("node/b",)))
    assert explain_wait(before, before.fates["second"])[:2] == (1, 1)


def test_unit_without_hardware_has_no_place() -> None:
    forecast = foresee([node("a", 4)], [pod("large", 8), pod("fits", 4, at=1.0), pod("next", 4, at=2.0)])
    assert explain_wait(forecast, forecast.fates["large"])[:3] == (0, 1, "NoSuchHardware")
    assert explain_wait(forecast, forecast.fates["next"])[:2] == (1, 1)


def test_successor_keeps_place_and_need() -> None:
    unit = runs("r", 2, "a", at=7.0, evictable_since=9.0)
    successor = build_successor(unit)
    assert (successor.enqueued_at, successor.parts, successor.state) == (7.0, unit.parts, "waiting")
    assert successor.cells == ()
    assert successor.uid != unit.uid


def test_forecast_that_is_ended_early_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [runs("low", 8, "a", priority="low", evictable_since=0.0), pod("new", 8, priority="high")]
    assert foresee([node("a")], waiting).is_complete
    monkeypatch.setattr("controller.placement.forecast.MOST_ROUNDS", 1)
    assert not foresee([node("a")], waiting).is_complete


def test_devices_that_a_claim_might_get_are_free_to_no_other_need() -> None:
    """The scheduler has not chosen yet: of two devices, one of them large, it may give the large one."""
    total = {ANY: 2, LARGE: 1, CLAIM_SLOT: 1, MEMORY: 64}
    units = [pod("one", {ANY: 1, CLAIM_SLOT: 1, MEMORY: 2}), pod("two", {LARGE: 1, CLAIM_SLOT: 1}, at=1.0)]
    forecast = foresee([node("a", total=total)], units)
    assert show(forecast.fates["one"]) == ("starts", ("node/a",))
    assert show(forecast.fates["two"]) == ("waits", ())
    assert forecast.cells[0].free == {ANY: 1, LARGE: 0, CLAIM_SLOT: 1, MEMORY: 62}
