"""Times of keys: days, beside what other options take."""

import re
from typing import Final

from cli.options import Parsed, parse_duration

_DAYS: Final = re.compile(r"(\d{1,5})d", re.ASCII)
_NONE: Final = re.compile(r"0[smhd]?", re.ASCII)
_DAY_SECONDS: Final = 86_400


def parse_key_time(text: str) -> float:
    """Return the seconds of a time such as `30d`, `12h` or `90s`. Raises ValueError."""
    if match := _DAYS.fullmatch(text):
        return float(match[1]) * _DAY_SECONDS
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a time: give one such as 30d, 12h or 90s") from error


def parse_overlap(text: str) -> int:
    """Return the whole seconds of such a time, or of 0. Raises ValueError."""
    return 0 if _NONE.fullmatch(text) else int(parse_key_time(text))


KEY_TIME: Final = Parsed("TIME", parse_key_time)
OVERLAP: Final = Parsed("TIME", parse_overlap)
