"""The messages of a chat, made into OpenAI's: images as parts, and calls of tools with ids and arguments as text."""

import re
from typing import Final

import msgspec

from gateway.dialects.ollama.request_fields import decode_small, render_object, wrong_field

MOST_IMAGES: Final = 256
"""The most images of one message."""

_ROLES: Final = {"system", "user", "assistant", "tool"}
_NONE: Final = msgspec.Raw(b"null")
_EMPTY: Final = frozenset({b"null", b'""', b"[]"})
_EMPTY_BYTES: Final = 5
"""More than any of these has."""
_START_BYTES: Final = 64
_LONGEST_PREFIX_BYTES: Final = 256
_BASE64 = re.compile(rb"(?:[A-Za-z0-9+/=_-]|\\/)+\\?")  # the last escape may be cut
_KINDS: Final = ((b"iVBORw", b"png"), (b"R0lG", b"gif"), (b"UklG", b"webp"))
"""The begin of an image in base64, and its kind; anything else is called a JPEG, and engines look for themselves."""

_texts = msgspec.json.Decoder(list[msgspec.Raw])


class _Function(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = _NONE


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str = ""
    content: msgspec.Raw = _NONE
    thinking: msgspec.Raw = _NONE
    images: msgspec.Raw = _NONE
    tool_calls: msgspec.Raw = _NONE
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


_message = msgspec.json.Decoder(_Message)


class MessageTranslation:
    """The translation of the messages of one chat, in their order: results of tools are matched with their calls."""

    def __init__(self) -> None:
        self._call_count = 0
        self._unanswered: list[tuple[str, str]] = []
        """Ids of calls, with the names of their functions, whose results have not come."""

    def translate(self, text: msgspec.Raw) -> bytes:
        """Return a message as JSON text. Raises RequestError."""
        try:
            message = _message.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise wrong_field("messages", str(error)) from error
        role = message.role.lower()
        if role not in _ROLES:
            raise wrong_field("messages", f"role has to be one of {', '.join(sorted(_ROLES))}")

        fields = [("role", msgspec.json.encode(role)), ("content", render_content(message.content, message.images))]
        if bytes(message.thinking) not in _EMPTY:
            fields.append(("reasoning_content", _read_text("messages: thinking", message.thinking)))
        if bytes(message.tool_calls) not in _EMPTY:
            fields.append(("tool_calls", self._translate_calls(bytes(message.tool_calls))))
        if role == "tool":
            name = message.tool_name or message.name or ""
            fields.append(("tool_call_id", msgspec.json.encode(self._find_call(name, message.tool_call_id))))
            if name:
                fields.append(("name", msgspec.json.encode(name)))
        return render_object(fields)

    def _translate_calls(self, text: bytes) -> bytes:
        """Return calls of tools with ids, which Ollama's clients may leave out, and their arguments as text."""
        calls: list[bytes] = []
        for call in decode_small("messages: tool_calls", text, list[_Call]):
            self._call_count += 1
            name, call_id = call.function.name, call.id or f"call_{self._call_count}"
            self._unanswered.append((call_id, name))
            arguments = bytes(call.function.arguments)
            if not arguments.startswith(b'"'):  # an object; some clients send its text
                arguments = msgspec.json.encode("{}" if arguments == b"null" else arguments.decode())
            function = render_object([("name", msgspec.json.encode(name)), ("arguments", arguments)])
            calls.append(
                render_object([("id", msgspec.json.encode(call_id)), ("type", b'"function"'), ("function", function)])
            )
        return b"[%b]" % b",".join(calls)

    def _find_call(self, name: str, stated_id: str | None) -> str:
        """Return the id of the call to which a result belongs: the stated one, the next of its name, or the next."""
        unanswered = self._unanswered
        places = [place for place, (call_id, _) in enumerate(unanswered) if call_id == stated_id]
        places += [place for place, (_, function) in enumerate(unanswered) if name and function == name]
        if stated_id and not places:
            return stated_id
        if not unanswered:
            return "call_0"
        return unanswered.pop(places[0] if places else 0)[0]


def render_content(content: msgspec.Raw, images: msgspec.Raw) -> bytes:
    """Return the content of a message: its text or, with images, a list of parts. Raises RequestError."""
    text = _read_text("messages: content", content)
    if bytes(memoryview(images)[:_EMPTY_BYTES]) in _EMPTY:
        return text
    pieces: list[bytes | memoryview] = [] if text == b'""' else [b',{"type":"text","text":%b}' % text]
    for image in _read_images(images):
        kind, content_begin = _check_image(image)
        pieces += (
            b',{"type":"image_url","image_url":{"url":"data:image/%b;base64,' % kind,
            image[content_begin:-1],
            b'"}}',
        )
    if not pieces:
        return text  # an empty list with a blank in it
    pieces[0] = b"[" + pieces[0][1:]  # without its comma
    return b"".join([*pieces, b"]"])  # one copy, for images are long


def _read_text(name: str, value: msgspec.Raw) -> bytes:
    """Return a string as JSON text; null is an empty one. Raises RequestError."""
    text = bytes(value)
    if text == b"null":
        return b'""'
    if not text.startswith(b'"'):
        raise wrong_field(name, "it has to be a string")
    return text


def _read_images(text: msgspec.Raw) -> list[memoryview]:
    """Return the JSON texts of a list of images. Raises RequestError: it is none, or too long."""
    try:
        if bytes(text).count(b'"') > 2 * MOST_IMAGES:
            raise wrong_field("images", f"a message may have {MOST_IMAGES}")
        return [memoryview(image) for image in _texts.decode(text)]
    except (msgspec.DecodeError, RecursionError) as error:
        raise wrong_field("images", "it has to be a list of strings") from error


def _check_image(image: memoryview) -> tuple[bytes, int]:
    """Return the kind of an image and the place of its content, of which only the begin is looked at.

    It is a JSON text: in base64, or a `data:` URL with that. Raises RequestError.
    """
    head = bytes(image[: _LONGEST_PREFIX_BYTES + _START_BYTES])
    begin = 1
    if head[1:6].lower() == b"data:":  # without its own kind: what is behind the comma counts
        begin = head.find(b",", 0, _LONGEST_PREFIX_BYTES) + 1
    start = head[begin : min(begin + _START_BYTES, len(image) - 1)]
    if not begin or not head.startswith(b'"') or not _BASE64.fullmatch(start):
        raise wrong_field("images", "an image has to be its content in base64")
    return next((name for mark, name in _KINDS if start.startswith(mark)), b"jpeg"), begin
