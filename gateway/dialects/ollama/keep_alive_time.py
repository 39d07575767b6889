"""The field `keep_alive`: for how long a model is to stay loaded after a request, in Ollama's grammar.

It is a number of seconds or a duration of Go, such as "5m" or "1h30m"; what is negative is without end. Numbers as
strings, which Ollama refuses, are met as well, and are seconds.
"""

import math
import re
from typing import Final

from gateway.dialects.ollama.request_fields import decode_small, wrong_field

_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER: Final = r"\d{1,18}(?:\.\d{0,18})?|\.\d{1,18}"
_PART = re.compile(rf"({_NUMBER})(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_SECONDS = re.compile(rf"[+-]?(?:{_NUMBER})", re.ASCII)
_MOST_SECONDS: Final = float(1 << 63) / 1e9
"""The longest duration of Go."""


def read_keep_alive(text: bytes) -> float | None:
    """Return the seconds that the JSON text of the field states; inf: without end; None: it is empty.

    Raises RequestError: it is no duration.
    """
    if not text:
        return None
    value = decode_small("keep_alive", text, object)
    if isinstance(value, str):
        seconds = _parse_duration(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        seconds = None
    if seconds is None or math.isnan(seconds) or seconds > _MOST_SECONDS:
        raise wrong_field("keep_alive", 'set it to seconds, or to a duration such as "5m"; -1 is without end')
    return math.inf if seconds < 0 else seconds


def _parse_duration(text: str) -> float | None:
    """Return the seconds of a duration; None: it is none."""
    if _SECONDS.fullmatch(text):
        return float(text)
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    parts = _PART.findall(rest)
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        return None
    return sign * sum(float(number) * _UNITS[unit] for number, unit in parts)
