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
_MOST_DIGITS: Final = 20
"""Python refuses to read a number of thousands of digits; one of 20 is more than any limit that matters."""


def read_demand(route: str, fields: Mapping[str, msgspec.Raw]) -> int:
    """Return the tokens that a request may use before its prompt is counted: UNKNOWN, ALONE, or 0 without an answer."""
    answers = {_read_start(fields, name, b"1") for name in ("n", "n_cmpl")}
    has_one_answer = answers <= {b"1", b"null"} and not _read_start(fields, "prompt").startswith(b"[")
    return 0 if route not in _LIMITS else UNKNOWN if has_one_answer else ALONE


def read_limit(route: str, fields: Mapping[str, msgspec.Raw]) -> int:
    """Return the most tokens that an answer may have: the largest limit, as engines differ in which counts; 0: none."""
    stated = {name: _read_start(fields, name) for name in _CHAT.union(*_LIMITS.values()) & fields.keys()}
    is_limited = _LIMITS[route] & stated.keys() and all(number.isdigit() for number in stated.values())
    return max(int(number) for number in stated.values()) if is_limited else 0


def _read_start(fields: Mapping[str, msgspec.Raw], name: str, absent: bytes = b"") -> bytes:
    """Return the first bytes of a field, which may be a long text of a stranger."""
    return bytes(memoryview(fields[name])[:_MOST_DIGITS]) if name in fields else absent
