"""Text of users in messages: shortened, so that a message stays readable whatever an object states."""

from typing import Final

SHOWN_LENGTH: Final = 64


def shorten_text(text: str, most: int = SHOWN_LENGTH) -> str:
    """Return the text; of one that has more than `most` characters, the beginning and the number of all."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
