"""The cause of an engine's end, as its log tells it: the first error. The last lines often only say that it ended.

llama-server ends with "Failed to init server", and vLLM with "see root cause above", whatever was wrong.
"""

import re
from typing import Final

_MOST_CHARACTERS: Final = 300
_LEVEL: Final = re.compile(r"^\d[\d.]*\s+E\s+")
"""Begin of an error of llama-server: the time, and its level."""
_ERROR: Final = re.compile(
    r"^\d[\d.]*\s+E\s|\b\w*(Error|Exception): |\berror\s*:|^error\b|\bfatal\b|\bpanic\b|GGML_ASSERT|^terminate called",
    re.IGNORECASE,
)


def find_cause(log: str) -> str:
    """Return the first line of a log that is an error, else the last one, printable; "" if there is none."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    # The indented lines of a traceback are source text, which may name an error.
    errors = (line for line in lines if not line[0].isspace() and _ERROR.search(line))
    found = next(errors, lines[-1] if lines else "")
    printable = "".join(character if character.isprintable() else " " for character in _LEVEL.sub("", found))
    return " ".join(printable.split())[:_MOST_CHARACTERS]
