"""Quiet hours, such as `Mon-Fri 09:00-17:00 Europe/Berlin`: hours in which the owner needs the host.

They are compared with what a clock on the wall of that time zone shows, so that summer time moves nothing: an hour
that a clock shows twice counts twice, and one that it skips does not exist.
"""

import re
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
EXAMPLE: Final = "Mon-Fri 09:00-17:00 Europe/Berlin"
_FORM: Final = re.compile(r"(\S+)\s+([0-9]{2}):([0-9]{2})-([0-9]{2}):([0-9]{2})\s+(\S+)")
_LAST_MINUTE: Final = 24 * 60


class QuietHours(msgspec.Struct, frozen=True):
    """The same hours on some days of each week."""

    text: str
    """The hours as the owner gave them."""
    days: frozenset[int]
    """Days on which the hours begin; 0 is Monday."""
    first_minute: int
    """Minute of the day at which they begin."""
    end_minute: int
    """Minute of the day at which they end; on the next day if it is before the first one."""
    zone: "ZoneInfo"

    def contains(self, moment: datetime) -> bool:
        """Return whether `moment`, which has a time zone, is within the quiet hours.

        Hours that end before they begin last until the next day.
        """
        local = moment.astimezone(self.zone)
        minute, day = local.hour * 60 + local.minute, local.weekday()
        if self.first_minute < self.end_minute:
            return day in self.days and self.first_minute <= minute < self.end_minute
        # Over midnight: the hours began today, or yesterday and have not ended yet.
        began_today = day in self.days and minute >= self.first_minute
        return began_today or ((day - 1) % len(DAYS) in self.days and minute < self.end_minute)


def parse_quiet_hours(text: str) -> QuietHours:
    """Read quiet hours: days, times of the day and a time zone, such as `Mon-Fri 09:00-17:00 Europe/Berlin`.

    Hours that end before they begin last until the next day. Raises ValueError, which names the way out.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not of the form DAYS HH:MM-HH:MM ZONE: give hours such as {EXAMPLE!r}")

    days, *numbers, zone = match.groups()
    first_hour, first_minute, end_hour, end_minute = map(int, numbers)
    # In minutes since midnight.
    first, end = first_hour * 60 + first_minute, end_hour * 60 + end_minute
    if max(first_minute, end_minute) >= 60 or first >= _LAST_MINUTE or end > _LAST_MINUTE:  # noqa: PLR2004 - minutes
        raise ValueError(f"{text!r} has a time that no clock shows: the day is from 00:00 to 24:00")
    if first == end:
        raise ValueError(f"{text!r} ends when it begins: give 00:00-24:00 for a whole day")

    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # noqa: PLC0415 - few owners have quiet hours

    try:
        info = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"time zone {zone!r} is not known on this machine: give one such as Europe/Berlin") from error
    return QuietHours(" ".join(text.split()), _parse_days(days), first_minute=first, end_minute=end, zone=info)


def _parse_days(text: str) -> frozenset[int]:
    """Return the numbers of days such as `Mon-Fri`, `Sat,Sun` or `Fri-Mon`; 0 is Monday. Raises ValueError."""
    days: set[int] = set()
    for part in text.split(","):
        names = part.split("-")
        numbers = [DAYS.index(name.capitalize()) for name in names if name.capitalize() in DAYS]
        if len(numbers) != len(names) or len(names) > 2:  # noqa: PLR2004 - first and last
            raise ValueError(f"{text!r} are no days: give {', '.join(DAYS)}, such as Mon-Fri or Sat,Sun")
        # numbers[0] is the first day, and numbers[-1] the last one, or the same for a single day.
        length = (numbers[-1] - numbers[0]) % len(DAYS) + 1
        days.update((numbers[0] + offset) % len(DAYS) for offset in range(length))
    return frozenset(days)
