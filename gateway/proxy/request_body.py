"""The JSON of a request: read the name of the model, and replace it by the engine's. All other values stay as they are.

Engines differ in which of two equal keys they use, and some (Go's decoder) accept `Model` for `model`. If the name of
the model decides which weights an engine loads, exactly one such key is left, and its value is the proxy's.
"""

import msgspec

from gateway.proxy import errors

_FIELDS_THAT_LOAD_WEIGHTS = frozenset({"adapters", "draft_model"})
"""Fields that make mlx_lm.server load any weights that the client names, from its disk or the internet."""


class _ModelField(msgspec.Struct, frozen=True):
    model: str | None = None


_model_field = msgspec.json.Decoder(_ModelField)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_model(body: bytes) -> str | None:
    """Return the model that the body names; None if it names none. Raises RequestError if it is not a JSON object."""
    try:
        if not body.isascii():
            body.decode()
        return _model_field.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.bad_request(f"the request body is not the JSON object that this path takes: {error}") from error


def replace_model(body: bytes, model: str) -> bytes:
    """Return the body, which `read_model` accepted, with `model` as its only model; other values stay byte by byte."""
    fields = {
        key: value
        for key, value in _fields.decode(body).items()
        if key.lower() != "model" and key not in _FIELDS_THAT_LOAD_WEIGHTS
    }
    return msgspec.json.encode({"model": model, **fields})
