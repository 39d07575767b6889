"""A request of Ollama's API, and OpenAI's request that is made of it."""

from collections.abc import Generator
from typing import Final, Literal, NamedTuple

from gateway.dialects.ollama.chat_request import translate_chat
from gateway.dialects.ollama.embed_request import EmbedInput, read_dimensions, read_embed_input, translate_embed
from gateway.dialects.ollama.generate_request import is_raw, translate_generate
from gateway.dialects.ollama.keep_alive_time import read_keep_alive
from gateway.dialects.ollama.request_fields import OllamaFields

OllamaRoute = Literal["chat", "generate", "embed", "embeddings"]
"""The last part of a path of inference."""
EngineRoute = Literal["chat", "completions", "embeddings"]
"""The name of the path that an engine is asked."""

_NO_INPUT: Final = EmbedInput(b"", 0)


class OllamaCall(NamedTuple):
    """A request whose fields were read, and whose model is not found yet."""

    route: OllamaRoute
    fields: OllamaFields
    model: str
    """The client's name; empty: none is named."""
    keep_alive_seconds: float | None
    """The time for which the model is to stay loaded; inf: without end; None: it is not stated."""
    streams: bool
    embed_input: EmbedInput = _NO_INPUT
    """The texts of a request for vectors."""
    dimensions: int = 0
    """The elements to which vectors are cut; 0: they stay whole."""

    @property
    def engine_route(self) -> EngineRoute:
        """The name of the path that an engine is asked."""
        if self.route in ("embed", "embeddings"):
            return "embeddings"
        return "completions" if self.route == "generate" and is_raw(self.fields) else "chat"

    @property
    def asks_engine(self) -> bool:
        """False if the request only loads the model or, with `keep_alive` 0, unloads it."""
        if self.route == "chat":
            return bool(self.fields.messages)
        if self.route == "generate":
            return bool(self.fields.find_text("prompt"))
        return self.embed_input.size > 0

    def translate(self, model: str, *, is_ollama: bool) -> Generator[None, None, bytes]:
        """Return OpenAI's request to `model`, with a pause after each piece of work. Raises RequestError.

        With `is_ollama`, the engine is an Ollama itself, which has another field for thinking.
        """
        if self.route == "chat":
            return (yield from translate_chat(self.fields, model, streams=self.streams, is_ollama=is_ollama))
        if self.route == "generate":
            return translate_generate(self.fields, model, streams=self.streams, is_ollama=is_ollama)
        return translate_embed(model, self.embed_input)


def read_call(route: OllamaRoute, fields: OllamaFields) -> OllamaCall:
    """Return the call that fields make. Raises RequestError: a field is wrong."""
    embeds = route in ("embed", "embeddings")
    return OllamaCall(
        route,
        fields,
        fields.model,
        read_keep_alive(fields.find("keep_alive")),
        streams=not embeds and fields.read("stream", bool, default=True),
        embed_input=read_embed_input(route, fields) if embeds else _NO_INPUT,
        dimensions=read_dimensions(fields) if route == "embed" else 0,
    )
