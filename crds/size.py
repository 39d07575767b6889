"""Sizes: readable texts for statuses, messages and terminals, and division that rounds up."""

MIB = 1 << 20
GIB = 1 << 30

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def size_text(size_bytes: int) -> str:
    """Return a size in bytes as readable text, for example `4.4 GiB`."""
    # `unit` is an index in _UNITS: bytes, KiB, MiB and so on, each 1024 of the one before.
    size, unit = float(size_bytes), 0
    while size >= _STEP and unit < len(_UNITS) - 1:
        size, unit = size / _STEP, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size_bytes} B"


def share_text(part_bytes: int, total_bytes: int | None) -> str:
    """Return how much of a size is there: `1.0 GiB of 4.0 GiB, 25 %`; without the total if it is not known."""
    if not total_bytes:
        return size_text(part_bytes)
    return f"{size_text(part_bytes)} of {size_text(total_bytes)}, {100 * part_bytes // total_bytes} %"


def count_text(number: int) -> str:
    """Return a number of parameters in readable form: 8.0B, 137.0M."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def divide_up(amount: int, divisor: int) -> int:
    """Return `amount / divisor`, rounded up to a whole number."""
    return -(-amount // divisor)
