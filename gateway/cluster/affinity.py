"""The conversation that a request belongs to, as a number: its turns go to the engine that has its prompt in the cache.

Agents name their session in a header. Other clients send the whole conversation again with each turn, so its start
identifies it: tools, system prompt, and what the user says before the first answer. The user's words are part of it
because all conversations of one agent share tools and a long system prompt, and would all go to one endpoint without
them. So each endpoint comes to cache that shared prompt once, and the histories of its own conversations.

Only the begin of each is hashed, and no mark that clients move from turn to turn (`cache_control`).
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Final

import msgspec

from gateway.http.headers import Headers
from gateway.proxy.json_scanner import InvalidJsonError, JsonScanner

SHARED_BYTES: Final = 2 << 10
"""The part of tools and of a system prompt that is hashed: many conversations share them."""
USER_BYTES: Final = 16 << 10
"""The part of the user's words that is hashed."""
PROMPT_BYTES: Final = 1 << 10
"""The part of a prompt without turns that is hashed: little, because the next request may add to its end."""
_WHOLE_BYTES: Final = 128 << 10
"""Turns up to this size are decoded at once; of more, only the first `_SCANNED_BYTES` are looked into."""
_SCANNED_BYTES: Final = 64 << 10
_MOST_TURNS: Final = 64

_SESSION_HEADERS: Final = (b"x-claude-code-session-id", b"x-session-affinity", b"session-id", b"session_id")
"""Claude Code, OpenCode, Codex and its earlier releases."""
_STARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "chat": ("tools", "messages"),
    "messages": ("tools", "system", "messages"),
    "responses": ("tools", "instructions", "input"),
    "completions": ("prompt",),
}
"""Routes whose engines keep a cache of prompts, with the fields that begin the prompt."""
_TURNS: Final = frozenset({"messages", "input"})
_ANSWER: Final = b'"assistant"'
_BEFORE_ANSWER: Final = frozenset(
    {b'{"role":', b'{"role": ', b'{"type":"message","role":', b'{"type": "message", "role": '}
)
"""The text before the role of an answer, as clients write it."""
_BILLING: Final = b'"x-anthropic-billing-header'
"""Begins a first block of Claude Code's system prompt, which differs by conversation and even by sub-agent."""
_BILLING_WITHIN_BYTES: Final = 128


class _Turn(msgspec.Struct, gc=False):
    """A message of chats and of the Messages API, or an item of responses, which may have neither field."""

    role: str = ""
    content: msgspec.Raw = msgspec.Raw(b"")


class _Part(msgspec.Struct, gc=False):
    """A part of a turn's content."""

    text: msgspec.Raw = msgspec.Raw(b"")


_decode_turns = msgspec.json.Decoder(list[_Turn]).decode
_decode_turn = msgspec.json.Decoder(_Turn).decode
_decode_parts = msgspec.json.Decoder(list[_Part]).decode


def find_affinity(headers: Headers, route: str, fields: Mapping[str, msgspec.Raw], namespace: str) -> int | None:
    """Return the number of the request's conversation, of 64 bits; None if no cache of a prompt would help it.

    Args:
        headers: the request's.
        route: the name of its path.
        fields: the JSON values of its body, by name.
        namespace: that of the client's key: other namespaces get other numbers for the same text.
    """
    names = _STARTS.get(route)
    if names is None:
        return None
    digest = hashlib.blake2b(digest_size=8, key=namespace.encode())

    # 1. The name that the client gives to the conversation: a header, or a text in the body that is not empty.
    named = _read_session(headers)
    if not named and (key := fields.get("prompt_cache_key")):
        text = _read_start(key, SHARED_BYTES)
        named = text if text.startswith(b'"') and text != b'""' else b""
    if named:
        digest.update(named)
        return int.from_bytes(digest.digest())

    # 2. The start of the prompt; its parts are JSON, which has no byte 0, so that this byte separates them.
    values = [(name, value) for name in names if (value := fields.get(name))]
    for name, value in values:
        digest.update(_read_turns(value) if name in _TURNS else _read_shared(name, value))
        digest.update(b"\0")
    return int.from_bytes(digest.digest()) if values else None


@functools.lru_cache(maxsize=256)
def _read_session(headers: Headers) -> bytes:
    """Return the name of a session in the header fields, which equal heads share; empty: they have none."""
    return next((session for name in _SESSION_HEADERS if (session := headers.value(name))), b"")


def _read_shared(name: str, value: msgspec.Raw) -> bytes:
    """Return the start of tools, of a system prompt without the billing block, or of a prompt without turns."""
    start = _read_start(value, PROMPT_BYTES if name == "prompt" else SHARED_BYTES)
    marked_at = start.find(_BILLING, 0, _BILLING_WITHIN_BYTES) if name == "system" else -1
    return start if marked_at < 0 else start[start.find(b"}", marked_at) :]


def _read_turns(value: msgspec.Raw) -> bytes:
    """Return the start of the texts before the first answer to the user; of another value, its own start."""
    shared: list[memoryview] = []
    user: list[memoryview] = []
    try:
        turns = _decode_start(bytes(value)) if len(memoryview(value)) <= _WHOLE_BYTES else _scan_turns(value)
        for turn in islice(turns, _MOST_TURNS):
            if turn.role in ("system", "developer"):
                shared += _read_texts(turn.content)
            elif turn.role == "user" or not (user or turn.role):
                user += _read_texts(turn.content)
            elif user:  # an answer; one before the user's first turn is a greeting
                break
    except (msgspec.DecodeError, InvalidJsonError, UnicodeDecodeError, RecursionError):
        if not user:  # `input` is a text, or the engine will refuse the request
            user.append(memoryview(value)[:USER_BYTES])
    return b"".join(shared)[:SHARED_BYTES] + b"\0" + b"".join(user)[:USER_BYTES]


def _decode_start(text: bytes) -> list[_Turn]:
    """Return the turns before the first answer to the user; all, if that is not where and as it mostly is."""
    answer_at = text.find(_ANSWER)
    begin = text.rfind(b"{", 0, max(answer_at, 0))
    if text[begin:answer_at] in _BEFORE_ANSWER:  # of a key, which no text has without a backslash
        before = text[:begin].rstrip()
        with suppress(msgspec.DecodeError, UnicodeDecodeError):  # the answer is within a turn
            turns = _decode_turns(before.removesuffix(b",") + b"]")
            if any(turn.role == "user" for turn in turns):  # else it is a greeting
                return turns
    return _decode_turns(text)


def _scan_turns(value: msgspec.Raw) -> Iterator[_Turn]:
    """Yield the first turns of a long conversation, without looking at the others; of a very long one, its start."""
    scanner = JsonScanner(_read_start(value, _SCANNED_BYTES))
    before_turn = ord("[")
    while scanner.peek() == before_turn:
        before_turn = ord(",")
        scanner.position += 1
        list(scanner.skip_blanks())  # all of the work at once, for there is little
        start = scanner.position
        try:
            list(scanner.skip_value())
        except InvalidJsonError:  # it is not whole
            yield _Turn(content=msgspec.Raw(scanner.text[start:]))
            return
        yield _decode_turn(scanner.text[start : scanner.position])
        list(scanner.skip_blanks())


def _read_texts(content: msgspec.Raw) -> list[memoryview]:
    """Return the texts of a turn, the same for a text and for a part with it; the content itself if it has none."""
    view = memoryview(content)
    if view[:1].tobytes() == b'"':
        return [view[1:-1]]
    with suppress(msgspec.DecodeError):
        if texts := [memoryview(part.text)[1:-1] for part in _decode_parts(content) if part.text]:
            return texts
    return [view] * bool(view)


def _read_start(value: msgspec.Raw, most_bytes: int) -> bytes:
    """Return the first bytes of a value."""
    return bytes(memoryview(value)[:most_bytes])
