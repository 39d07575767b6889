"""A request to /api/chat, and the fields that /api/generate shares with it, as one to /v1/chat/completions."""

from collections.abc import Generator
from typing import Final

import msgspec

from gateway.dialects.ollama.message_translation import MessageTranslation
from gateway.dialects.ollama.request_fields import OllamaFields, decode_small, render_object, wrong_field
from gateway.dialects.ollama.sampling_options import translate_options

_MESSAGES_AT_ONCE: Final = 64
_EFFORTS: Final = ("high", "medium", "low")
_MOST_LOGPROBS: Final = 20
_WITH_COUNTS: Final = (("stream", b"true"), ("stream_options", b'{"include_usage":true}'))


def translate_chat(fields: OllamaFields, model: str, *, streams: bool, is_ollama: bool) -> Generator[None, None, bytes]:
    """Return the request to `model`, with a pause after some messages. Raises RequestError."""
    translation = MessageTranslation()
    messages: list[bytes] = []
    for number, message in enumerate(fields.messages, 1):
        messages.append(translation.translate(message))
        if number % _MESSAGES_AT_ONCE == 0:
            yield
    return render_chat(fields, model, messages, streams=streams, is_ollama=is_ollama)


def render_chat(fields: OllamaFields, model: str, messages: list[bytes], *, streams: bool, is_ollama: bool) -> bytes:
    """Return a request for an answer to `messages`, which are JSON texts. Raises RequestError."""
    return render_object(
        [
            ("model", msgspec.json.encode(model)),
            ("messages", b"[%b]" % b",".join(messages)),
            *_translate_tools(fields.find("tools")),
            *_translate_thinking(fields.find("think"), is_ollama=is_ollama),
            *translate_format(fields.find("format")),
            *translate_common(fields, streams=streams),
        ]
    )


def translate_common(fields: OllamaFields, *, streams: bool) -> list[tuple[str, bytes]]:
    """Return the fields that every request for text has. Raises RequestError."""
    top_logprobs = fields.read("top_logprobs", int, 0)
    if not 0 <= top_logprobs <= _MOST_LOGPROBS:
        raise wrong_field("top_logprobs", f"it has to be between 0 and {_MOST_LOGPROBS}")
    logprobs = [("logprobs", b"true")] if fields.read("logprobs", bool, default=False) else []
    if logprobs and top_logprobs:
        logprobs.append(("top_logprobs", b"%d" % top_logprobs))
    return [*translate_options(fields.find("options")), *logprobs, *(_WITH_COUNTS if streams else ())]


def translate_format(text: bytes) -> list[tuple[str, bytes]]:
    """Return OpenAI's form of `format`: "json", or a schema. Raises RequestError: it is neither."""
    if text in (b"", b'""'):
        return []
    if text == b'"json"':
        return [("response_format", b'{"type":"json_object"}')]
    if not text.startswith(b"{"):
        raise wrong_field("format", 'set it to "json" or to a JSON schema')
    return [("response_format", b'{"type":"json_schema","json_schema":{"name":"answer","schema":%b}}' % text)]


def _translate_tools(text: bytes) -> list[tuple[str, bytes]]:
    """Return the tools, each of which needs the type that Ollama's clients may leave out. Raises RequestError."""
    tools = decode_small("tools", text, list[dict[str, msgspec.Raw]]) if text else []
    function = msgspec.Raw(b'"function"')
    return [("tools", msgspec.json.encode([{"type": function} | tool for tool in tools]))] if tools else []


def _translate_thinking(text: bytes, *, is_ollama: bool) -> list[tuple[str, bytes]]:
    """Return the fields by which an engine thinks or does not: true, false or how much. Raises RequestError.

    Templates read it as `enable_thinking`; those of gpt-oss, and Ollama, as an effort.
    """
    if not text:
        return []
    value = decode_small("think", text, object)
    if not isinstance(value, bool) and value not in _EFFORTS:
        raise wrong_field("think", 'set it to true, false, "high", "medium" or "low"')
    effort = value if isinstance(value, str) else "medium" if value else "none"
    if is_ollama:
        return [("reasoning_effort", msgspec.json.encode(effort))]
    arguments: dict[str, object] = {"enable_thinking": bool(value)}
    if isinstance(value, bool):
        return [("chat_template_kwargs", msgspec.json.encode(arguments))]
    arguments["reasoning_effort"] = effort
    return [
        ("chat_template_kwargs", msgspec.json.encode(arguments)),
        ("reasoning_effort", msgspec.json.encode(effort)),
    ]
