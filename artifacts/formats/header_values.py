"""Values that headers and configurations state, as facts that are safe in a status; shared by all formats."""

from typing import Final

_MAX_INT64: Final = (1 << 63) - 1
_MAX_CHARACTERS: Final = 256


def read_text(value: object) -> str:
    """Return a string that is safe in a status and on a terminal; empty for any other value."""
    if not isinstance(value, str):
        return ""
    return "".join(letter if letter.isprintable() else " " for letter in value[:_MAX_CHARACTERS]).strip()


def read_count(value: object) -> int | None:
    """Return a number of 0 or more that fits a status, or None."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= _MAX_INT64 else None


def count_active_parameters(
    parameters: int, expert_parameters: int, experts: int | None, used: int | None
) -> int | None:
    """Return the parameters that one token uses if it uses `used` of `experts` experts of equal size.

    None: the model has no experts, a number is missing, or the numbers contradict each other.
    """
    if not expert_parameters or not experts or not used or used > experts or expert_parameters % experts:
        return None
    # Without those of the experts that it does not use.
    return parameters - expert_parameters // experts * (experts - used)
