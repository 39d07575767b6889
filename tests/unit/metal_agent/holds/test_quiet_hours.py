"""Quiet hours: their form, and what a clock on the wall shows around the changes of summer time."""

from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from metal_agent.holds.quiet_hours import parse_quiet_hours

BERLIN = ZoneInfo("Europe/Berlin")
ZONES = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"]
NAMES = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]


def is_quiet(hours: str, local: str) -> bool:
    return parse_quiet_hours(hours).contains(datetime.fromisoformat(local).replace(tzinfo=BERLIN))


@pytest.mark.parametrize(
    ("hours", "local", "expected"),
    [
        ("Mon-Fri 09:00-17:00 Europe/Berlin", "2026-11-23T09:00", True),
        ("Mon-Fri 09:00-17:00 Europe/Berlin", "2026-11-23T08:59:59", False),
        ("Mon-Fri 09:00-17:00 Europe/Berlin", "2026-11-23T17:00", False),
        ("Mon-Fri 09:00-17:00 Europe/Berlin", "2026-11-22T12:00", False),
        ("fri-mon 00:00-24:00 Europe/Berlin", "2026-11-22T23:59", True),
        ("Sat,Sun 10:00-12:00 Europe/Berlin", "2026-11-21T10:30", True),
        ("Sun 22:00-06:00 Europe/Berlin", "2026-11-23T05:59", True),
        ("Sun 22:00-06:00 Europe/Berlin", "2026-11-22T05:59", False),
        ("Mon 09:00-17:00 America/New_York", "2026-11-23T14:59", False),
        ("Mon 09:00-17:00 America/New_York", "2026-11-23T15:00", True),
    ],
)
def test_hours_are_those_of_their_time_zone(hours: str, local: str, expected: bool) -> None:
    assert is_quiet(hours, local) is expected


def test_hour_that_a_clock_shows_twice_counts_twice_and_a_skipped_one_does_not_exist() -> None:
    hours = parse_quiet_hours("Sun 02:00-03:00 Europe/Berlin")
    for first, length in ((datetime(2026, 10, 25, tzinfo=UTC), 120), (datetime(2026, 3, 29, tzinfo=UTC), 0)):
        minutes = [hours.contains(first + timedelta(minutes=number)) for number in range(180)]
        assert sum(minutes) == length


@given(
    zone=st.sampled_from(ZONES),
    day=st.dates(date(2024, 1, 1), date(2030, 12, 31)),
    first=st.integers(0, 1439),
    end=st.integers(1, 1440),
    probe=st.floats(0, 0.999),
)
def test_quiet_hours_last_from_first_to_last_instant(zone: str, day: date, first: int, end: int, probe: float) -> None:
    """Beginning and end of a day's hours, as instants, hold all that is quiet, also where a day has 23 or 25 hours."""
    assume(first != end)
    place = ZoneInfo(zone)

    def instant(on: date, minute: int) -> datetime:
        on += timedelta(days=minute // 1440)
        local = datetime.combine(on, time(minute % 1440 // 60, minute % 60), place)
        back = local.astimezone(UTC).astimezone(place)
        # An end that a clock shows twice or never has no one instant.
        assume(back.replace(tzinfo=None) == local.replace(tzinfo=None))
        assume(local.utcoffset() == local.replace(fold=1).utcoffset())
        return local.astimezone(UTC)

    text = f"{NAMES[day.weekday()]} {first // 60:02}:{first % 60:02}-{end // 60:02}:{end % 60:02} {zone}"
    hours = parse_quiet_hours(text)
    begins = instant(day, first)
    ends = instant(day if first < end else day + timedelta(days=1), end)
    assert hours.contains(begins)
    assert hours.contains(begins + (ends - begins) * probe)
    assert not hours.contains(ends)
    assert not hours.contains(begins - timedelta(microseconds=1))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "DAYS HH:MM-HH:MM ZONE"),
        ("Mon-Fri 9-17 Europe/Berlin", "DAYS HH:MM-HH:MM ZONE"),
        ("Mon-Fri 09:00-17:00", "Mon-Fri 09:00-17:00 Europe/Berlin"),
        ("Mo-Fr 09:00-17:00 Europe/Berlin", "'Mo-Fr' are no days: give Mon, Tue"),
        ("Mon-Wed-Fri 09:00-17:00 Europe/Berlin", "no days"),
        ("Mon, 09:00-17:00 Europe/Berlin", "no days"),
        ("Mon 09:60-17:00 Europe/Berlin", "no clock shows"),
        ("Mon 24:00-25:00 Europe/Berlin", "no clock shows"),
        ("Mon 09:00-24:01 Europe/Berlin", "no clock shows"),
        ("Mon 09:00-09:00 Europe/Berlin", "00:00-24:00 for a whole day"),
        ("Mon 09:00-17:00 Berlin", "time zone 'Berlin' is not known"),
        ("Mon 09:00-17:00 ../../etc/passwd", "is not known"),
    ],
)
def test_hours_that_cannot_be_read_are_refused_with_the_way_out(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"give|clock|known") as refused:
        parse_quiet_hours(text)
    assert says in str(refused.value)
