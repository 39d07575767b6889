"""Values of a GGUF header as what they have to be: a text for people, a count, a count for each layer."""

from artifacts.gguf import Value

_MAX_INT64 = (1 << 63) - 1
_MAX_CHARACTERS = 256


def text_of(value: Value) -> str:
    """Return a string fit for a status and a terminal."""
    if not isinstance(value, str):
        return ""
    return "".join(letter if letter.isprintable() else " " for letter in value[:_MAX_CHARACTERS]).strip()


def count_of(value: Value) -> int | None:
    """Return a number that is none below 0 and fits a status, or None."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT64
    return value if is_count and isinstance(value, int) else None


def per_layer(value: Value, layers: int) -> tuple[int, ...] | None:
    """Return the count (or flag) of each layer: stated for each, or one for all; None when that makes no sense."""
    if not isinstance(value, tuple):
        one = count_of(value)
        return None if one is None else (one,) * layers
    counts = [int(each) if isinstance(each, bool) else count_of(each) for each in value]
    known = tuple(count for count in counts if count is not None)
    return known if len(known) == len(value) == layers else None


def widest(value: Value) -> int | None:
    """Return the largest of one count per layer, or the one for all."""
    if not isinstance(value, tuple):
        return count_of(value)
    counts = [count_of(number) for number in value]
    return None if not counts or None in counts else max(count or 0 for count in counts)
