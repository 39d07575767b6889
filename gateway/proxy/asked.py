"""What is read and what is changed of a request's JSON: as little as can be, and never what it asks.

Engines differ in which of two equal keys they believe, and some (Go's decoder) take `Model` for `model`. Where the name
of a model decides what an engine loads, exactly one such key is left, and it is ours.
"""

import msgspec

_OTHER_WEIGHTS = frozenset({"adapters", "draft_model"})
"""Fields by which mlx_lm.server would load what a client names, from its disk or the internet."""


class NotUnderstoodError(Exception):
    """The body is not what this API takes; the message says what is wrong with it."""


class Asked(msgspec.Struct, frozen=True):
    """What the proxy must know of a request."""

    model: str | None = None


_asked = msgspec.json.Decoder(Asked)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read(body: bytes) -> Asked:
    """Read what the body asks for. Raises NotUnderstoodError."""
    try:
        if not body.isascii():
            body.decode()
        return _asked.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotUnderstoodError(f"the request body is not the JSON object that this path takes: {error}") from error


def rewritten(body: bytes, model: str) -> bytes:
    """Return the body, which `read` understood, with `model` as its one model; other values stay byte by byte."""
    fields = {
        key: value
        for key, value in _fields.decode(body).items()
        if key.lower() != "model" and key not in _OTHER_WEIGHTS
    }
    return msgspec.json.encode({"model": model, **fields})
