"""The sources of the owner's policy: what a sample says, and how long it must say so."""

from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.power import Power
from devices.thermal import ThermalLevel
from metal_agent.holds.owner_policy import (
    BEGIN_SECONDS,
    END_SECONDS,
    REASONS,
    OwnerPolicy,
    OwnerSample,
    OwnerSource,
    Signal,
    SourceState,
    judge_sample,
    step_source,
)
from metal_agent.holds.quiet_hours import parse_quiet_hours
from metal_agent.memory.pressure_policy import DISPLACEMENT_SECONDS
from tests.controlplane.process import CHECKOUT

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
POLICY = OwnerPolicy((parse_quiet_hours("Mon 09:00-17:00 UTC"),), idle_minutes=10, battery_percent=40, when_hot=True)
SOURCES: list[OwnerSource] = list(REASONS)


def test_nothing_pauses_a_host_by_default() -> None:
    assert OwnerPolicy().sources == ()
    assert POLICY.sources == tuple(SOURCES)


@pytest.mark.parametrize(
    ("idle_seconds", "signal"),
    [(None, None), (0.0, "hold"), (29.9, "hold"), (30.0, "between"), (599.0, "between"), (600.0, "free")],
)
def test_owner_is_active_by_recent_input_and_then_away(idle_seconds: float | None, signal: Signal | None) -> None:
    assert judge_sample(POLICY, "activity", OwnerSample(NOON, idle_seconds=idle_seconds)) == signal


@pytest.mark.parametrize(
    ("power", "limited", "at_any_charge"),
    [
        (Power("ac", 10), "free", "free"),
        (Power("battery", 39), "hold", "hold"),
        (Power("battery", 40), "between", "hold"),
        (Power("battery", 45), "free", "hold"),
        (Power("ups", None), None, "hold"),
        (Power("battery", None), None, "hold"),
        (Power(None, 10), None, None),
    ],
)
def test_battery_counts_by_its_charge_and_unknown_says_nothing(
    power: Power, limited: Signal | None, at_any_charge: Signal | None
) -> None:
    sample = OwnerSample(NOON, power=power)
    assert judge_sample(POLICY, "battery", sample) == limited
    assert judge_sample(OwnerPolicy(battery_percent=100), "battery", sample) == at_any_charge


@pytest.mark.parametrize(
    ("level", "signal"),
    [(None, None), ("nominal", "free"), ("moderate", "between"), *((each, "hold") for each in ("heavy", "trapping"))],
)
def test_heat_counts_from_heavy_on(level: ThermalLevel | None, signal: Signal | None) -> None:
    assert judge_sample(POLICY, "heat", OwnerSample(NOON, thermal=level)) == signal


def test_schedule_begins_and_ends_at_once() -> None:
    state = step_source(SourceState(), judge_sample(POLICY, "schedule", OwnerSample(NOON)), 0.0, "schedule")
    assert state.holds
    evening = OwnerSample(NOON.replace(hour=17))
    assert not step_source(state, judge_sample(POLICY, "schedule", evening), 0.0, "schedule").holds


SIGNALS = st.lists(st.tuples(st.sampled_from(["hold", "free", "between", None]), st.floats(0, 30)), max_size=60)


@given(source=st.sampled_from(SOURCES), samples=SIGNALS)
def test_source_changes_only_after_it_has_said_so_long_enough(
    source: OwnerSource, samples: list[tuple[Signal | None, float]]
) -> None:
    states, state = [SourceState()], SourceState()
    for signal, seconds in samples:
        state = step_source(state, signal, seconds, source)
        states.append(state)
    for number, (before, after) in enumerate(pairwise(states)):
        if before.holds == after.holds:
            continue
        wanted: Signal = "hold" if after.holds else "free"
        assert samples[number][0] == wanted, "neither an unknown sample nor one between the two changes anything"
        readings = [sample for sample in samples[: number + 1] if sample[0] is not None]
        run = []
        for signal, seconds in reversed(readings):
            if signal != wanted:
                break
            run.append(seconds)
        # The first sample of a run begins it.
        needed = (BEGIN_SECONDS if after.holds else END_SECONDS)[source]
        assert sum(run[:-1]) >= needed - 1e-6


@given(source=st.sampled_from(SOURCES), holds=st.booleans(), count=st.integers(0, 50))
def test_unknown_samples_change_nothing(source: OwnerSource, holds: bool, count: int) -> None:
    state = start = SourceState(holds)
    for _ in range(count):
        state = step_source(state, None, 30.0, source)
    assert state == start


def test_unknown_sample_does_not_begin_the_time_anew() -> None:
    state = step_source(SourceState(), "hold", 10.0, "heat")
    state = step_source(state, None, 10.0, "heat")
    assert step_source(state, "hold", BEGIN_SECONDS["heat"], "heat").holds


def test_times_are_those_that_the_owner_reads() -> None:
    text = (CHECKOUT / "docs" / "owner-policies.md").read_text()
    assert BEGIN_SECONDS["schedule"] == END_SECONDS["schedule"] == END_SECONDS["activity"] == 0
    assert f"after {BEGIN_SECONDS['activity']:.0f} s with input of keyboard or mouse at least every 30 s" in text
    assert f"after {BEGIN_SECONDS['battery']:.0f} s on battery" in text
    assert ("after a minute on mains" in text, END_SECONDS["battery"]) == (True, 60.0)
    assert f"after {BEGIN_SECONDS['heat']:.0f} s at thermal level `heavy` or worse" in text
    assert f"after {END_SECONDS['heat'] / 60:.0f} minutes at `nominal`" in text
    assert f"no other place after {DISPLACEMENT_SECONDS / 60:.0f} minutes" in text


@pytest.mark.parametrize("source", SOURCES)
def test_reason_of_a_hold_says_what_the_owner_set(source: OwnerSource) -> None:
    said = POLICY.describe(source)
    assert {"schedule": "Mon 09:00-17:00 UTC", "activity": "10 minutes", "battery": "40 %", "heat": "hot"}[
        source
    ] in said
    assert "%" not in OwnerPolicy(battery_percent=100).describe("battery")
