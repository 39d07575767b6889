"""Text of users in messages: shortened, so that a message stays readable whatever an object states."""

from collections.abc import Iterable
from typing import Final

SHOWN_LENGTH: Final = 64


def shorten_text(text: str, most: int = SHOWN_LENGTH) -> str:
    """Return the text, cut after `most` characters; a text that is cut ends with the number of its characters."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def offer_names(name: str, choices: Iterable[str]) -> str:
    """Return the way out of a name that does not exist: the name that may be meant, and all that there are."""
    from difflib import get_close_matches  # noqa: PLC0415 - only for a mistake

    names = sorted(choices)
    near = get_close_matches(name, names, n=1, cutoff=0.7)
    meant = f"did you mean {near[0]}? Else " if near else ""
    return f"{meant}use one of {', '.join(names)}"
