"""Values that tools, kernel files and labels state, checked for the ranges of `NodeDevice` before anything uses them.

A tool may print anything: a value that is no number or out of range is unknown, and a text is cut to what a status
takes.
"""

import re
from typing import Final

MOST_TEXT: Final = 256
_MOST_BYTES: Final = 1 << 50
_NUMBER: Final = re.compile(r"\s*(-?[0-9]{1,20})(?:\.[0-9]{1,20})?(?:\s*(?:MiB|%|C|B))?\s*", re.ASCII)
"""A number with or without the unit that some versions of a tool add; a fraction is dropped."""
_MISSING: Final = {"", "n/a", "[n/a]", "na", "none", "[not supported]", "not supported", "[unknown error]", "err!"}


def clean_text(text: str) -> str:
    """Return the printable characters of a text that a status can take; "" if the tool states that it has none."""
    printable = "".join(character if character.isprintable() else " " for character in text[: 4 * MOST_TEXT])
    words = " ".join(printable.split())[:MOST_TEXT].rstrip()
    return "" if words.lower() in _MISSING else words


def parse_number(text: str) -> int | None:
    """Return the whole number in `text`, which may have a unit; None if there is none."""
    match = _NUMBER.fullmatch(text[:64])
    return int(match[1]) if match else None


def parse_size_bytes(text: str, unit_bytes: int = 1) -> int | None:
    """Return the size of something that exists, in bytes; None if it is unknown, 0 or absurd."""
    return parse_rest_bytes(text, unit_bytes) or None


def parse_rest_bytes(text: str, unit_bytes: int = 1) -> int | None:
    """Return bytes that may be 0, such as free memory; None if the number is unknown or absurd."""
    number = parse_number(text)
    return None if number is None else check_bytes(number * unit_bytes)


def check_bytes(number: int | None) -> int | None:
    """Return the number of bytes if it is one that a machine can have."""
    return number if number is not None and 0 <= number <= _MOST_BYTES else None


def parse_percent(text: str) -> int | None:
    """Return a utilization in percent; None if it is unknown or absurd."""
    number = parse_number(text)
    return number if number is not None and 0 <= number <= 100 else None  # noqa: PLR2004 - percent


def parse_celsius(text: str, parts: int = 1) -> int | None:
    """Return a temperature in degrees Celsius, stated in parts of a degree; None if it is unknown or absurd."""
    number = parse_number(text)
    celsius = None if number is None else round(number / parts)
    return celsius if celsius is not None and -50 <= celsius <= 200 else None  # noqa: PLR2004 - limits of the schema


def subtract_used(total_bytes: int | None, used_bytes: int | None) -> int | None:
    """Return the free part of a memory of which the kernel states the size and the used part; None without both."""
    return None if total_bytes is None or used_bytes is None else max(total_bytes - used_bytes, 0)
