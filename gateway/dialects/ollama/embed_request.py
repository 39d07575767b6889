"""A request to /api/embed, or to the older /api/embeddings, as one to /v1/embeddings."""

from typing import Final, NamedTuple

import msgspec

from gateway.dialects.ollama.request_fields import OllamaFields, render_object, wrong_field

MOST_TEXTS: Final = 20_000
_texts = msgspec.json.Decoder(list[msgspec.Raw])


class EmbedInput(NamedTuple):
    """The texts of a request: their JSON text, and their number."""

    text: bytes
    size: int


def read_embed_input(route: str, fields: OllamaFields) -> EmbedInput:
    """Return the texts of a request. Raises RequestError: they are none.

    Without a text, Ollama loads the model, and answers /api/embeddings with an empty vector, also to those who call
    the field `input` as at the other path. Nobody can use that, so it is refused.
    """
    if route == "embeddings":
        if prompt := fields.find_text("prompt"):
            return EmbedInput(prompt, 1)
        raise wrong_field("prompt", "it is empty; /api/embed takes several texts as `input`")
    text = fields.find("input")
    if text in (b"", b'""', b"[]"):
        return EmbedInput(b"", 0)
    if text.startswith(b'"'):
        return EmbedInput(text, 1)
    # An escaped quotation mark is none of a text's two.
    if text.count(b'"') - text.count(b'\\"') > 2 * MOST_TEXTS:
        raise wrong_field("input", f"it has more than {MOST_TEXTS} texts: send them in several requests")
    try:
        texts = _texts.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise wrong_field("input", "it has to be a string or a list of strings") from error
    if any(bytes(memoryview(item)[:1]) != b'"' for item in texts):
        raise wrong_field("input", "it has to be a string or a list of strings")
    return EmbedInput(text, len(texts))


def read_dimensions(fields: OllamaFields) -> int:
    """Return the number of elements to which vectors are cut; 0: they stay whole. Raises RequestError."""
    dimensions = fields.read("dimensions", int, 0)
    if dimensions < 0:
        raise wrong_field("dimensions", "it has to be positive")
    return dimensions


def translate_embed(model: str, embed_input: EmbedInput) -> bytes:
    """Return the request to `model`; vectors are cut on their way back, for not every engine does that."""
    return render_object([("model", msgspec.json.encode(model)), ("input", embed_input.text)])
