"""The tokens that a request may use, where an engine's slots share the cells of one cache.

They are those of one context, and `shared_tokens` more. llama.cpp ends every running request when no cell is free, so
what runs must fit: in the long lane one request of any length, in the short lane those that provably need no more than
the shared tokens together. A request takes the long lane if it is free. Only one that has to wait, and limits its
answer, has its prompt counted: by the engine, if it can, else by its bytes.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

UNKNOWN: Final = 1 << 40
"""The demand of a request that may use a whole context: more tokens than any short lane has."""
ALONE: Final = 2 * UNKNOWN
"""The demand of several answers, beside which no other request may run: each may use a whole context, and when cells
are short, llama.cpp b11549 copies half a prompt for the second answer, which ends every running request."""
_CHAT: Final = frozenset({"max_completion_tokens", "max_tokens", "n_predict"})
_NO_FIELDS: Final = frozenset[str]()
_LIMITS: Final = {
    "chat": _CHAT,
    "completions": _CHAT,
    "messages": frozenset({"max_tokens"}),
    "responses": frozenset({"max_output_tokens"}),
    "transcriptions": _NO_FIELDS,
    "translations": _NO_FIELDS,
}
"""Routes that generate tokens, with the fields that limit an answer; forms are not looked into."""
_ANY_LIMIT: Final = frozenset[str]().union(*_LIMITS.values())
_MOST_DIGITS: Final = 20
"""Python refuses to read a number of thousands of digits; one of 20 is more than any limit that matters."""


def read_demand(route: str, fields: Mapping[str, msgspec.Raw]) -> int:
    """Return the tokens that a request may use before its prompt is counted: UNKNOWN, ALONE, or 0 without an answer."""
    if route not in _LIMITS:
        return 0
    answers = [_read_start(fields, name) for name in ("n", "n_cmpl") if name in fields]
    has_one_answer = not _read_start(fields, "prompt").startswith(b"[") and all(n in (b"1", b"null") for n in answers)
    return UNKNOWN if has_one_answer else ALONE


def read_limit(route: str, fields: Mapping[str, msgspec.Raw]) -> int:
    """Return the most tokens that an answer may have: the largest limit, as engines differ in which counts; 0: none."""
    names = _ANY_LIMIT & fields.keys()
    stated = [_read_start(fields, name) for name in names]
    is_limited = not names.isdisjoint(_LIMITS[route]) and all(number.isdigit() for number in stated)
    return max(map(int, stated)) if is_limited else 0


def _read_start(fields: Mapping[str, msgspec.Raw], name: str) -> bytes:
    """Return the first bytes of a field, which may be a long text of a stranger; empty if there is none."""
    return bytes(memoryview(fields[name])[:_MOST_DIGITS]) if name in fields else b""
