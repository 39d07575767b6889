"""Text in messages: that of others shortened and harmless, so that it stays readable; times, and names of models."""

import math
import re
import unicodedata
from collections.abc import Iterable
from typing import Final

SHOWN_LENGTH: Final = 64
_LONGEST_NAME: Final = 40
_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400


def escape_controls(text: str) -> str:
    """Return text of others for a terminal: what would move its cursor or set its clipboard is shown as text.

    Hosts, tenants and models write what commands print; ends of lines and tabs stay.
    """
    return "".join(
        character if character in "\n\t" or unicodedata.category(character) != "Cc" else f"\\x{ord(character):02x}"
        for character in text
    )


def countdown_text(seconds: float) -> str:
    """Return the time until something happens, in whole seconds: `42 s`, `4:12`, `1:04:12`."""
    # Rounded up: a time that is not over is not 0.
    whole = max(0, math.ceil(min(seconds, _DAY)))
    if whole >= _DAY:
        return "a day or more"
    if whole < _MINUTE:
        return f"{whole} s"
    minutes, rest = whole // _MINUTE, whole % _MINUTE
    return f"{minutes}:{rest:02}" if whole < _HOUR else f"{whole // _HOUR}:{minutes % _MINUTE:02}:{rest:02}"


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


def make_name(text: str) -> str:
    """Return the name of an object for a text: `gemma3-4b` for `gemma3:4b`."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"model-{name}".rstrip("-")
    return name[:_LONGEST_NAME].rstrip("-")


def name_model(text: str) -> str:
    """Return the name of the service for a repository of the hub: `qwen3-8b-q4-k-m` for `ORG/Qwen3-8B-GGUF:Q4_K_M`."""
    repo, _, quantization = text.rpartition("/")[2].partition(":")
    stem = repo[:-5] if repo.lower().endswith("-gguf") else repo
    return make_name(f"{stem}-{quantization}")
