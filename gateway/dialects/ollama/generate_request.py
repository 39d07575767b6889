"""A request to /api/generate as one for OpenAI's chats or, with `raw`, for its completions.

What would need the engine's own template or tokens is refused in words: a template, or the `context` of another answer.
"""

import msgspec

from gateway.dialects.ollama.chat_request import render_chat, translate_common, translate_format
from gateway.dialects.ollama.message_translation import render_content
from gateway.dialects.ollama.request_fields import OllamaFields, render_object, wrong_field

_CHAT: str = "send the conversation to /api/chat"


def is_raw(fields: OllamaFields) -> bool:
    """Return whether the model gets the prompt as it is, without its template. Raises RequestError."""
    return fields.read("raw", bool, default=False)


def translate_generate(fields: OllamaFields, model: str, *, streams: bool, is_ollama: bool) -> bytes:
    """Return the request to `model`. Raises RequestError."""
    if fields.find_text("suffix"):
        raise wrong_field("suffix", f"model {model!r} does not support insert: leave it out")
    if fields.find_text("template"):
        raise wrong_field("template", f"the model's own is used: leave it out, {_CHAT}, or set raw to true")
    if fields.find("context") not in (b"", b"[]"):
        raise wrong_field("context", f"no state is kept between requests: leave it out, and {_CHAT}")
    prompt, system, images = fields.find_text("prompt"), fields.find_text("system"), fields.find("images")
    if is_raw(fields):
        if system or images not in (b"", b"[]"):
            raise wrong_field("raw", "raw mode does not support system or images")
        members = [("model", msgspec.json.encode(model)), ("prompt", prompt), *translate_format(fields.find("format"))]
        return render_object([*members, *translate_common(fields, streams=streams)])

    content = render_content(msgspec.Raw(prompt), msgspec.Raw(images or b"null"))
    messages = [b'{"role":"system","content":%b}' % system] if system else []
    messages.append(b'{"role":"user","content":%b}' % content)
    return render_chat(fields, model, messages, streams=streams, is_ollama=is_ollama)
