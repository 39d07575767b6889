"""The answers of engines on OpenAI's paths, as far as Ollama's clients are told of them."""

from typing import Annotated, Final

import msgspec

_NONE: Final = msgspec.Raw(b"null")
_EMPTY: Final = frozenset({b"", b"null", b'""', b"[]"})
_MOST_CALLS: Final = 1000
_MOST_ARGUMENT_BYTES: Final = 4 << 20
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class _FunctionPart(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallPart(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _FunctionPart | None = None


class _Text(msgspec.Struct):
    """A message, or a piece of one."""

    content: msgspec.Raw = _NONE
    reasoning_content: msgspec.Raw = _NONE
    reasoning: msgspec.Raw = _NONE
    tool_calls: list[_CallPart] | None = None


class _OtherToken(msgspec.Struct, omit_defaults=True):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None


class _Token(_OtherToken):
    """A token with its probability, in the form that OpenAI's API and Ollama's share; engines add fields."""

    top_logprobs: list[_OtherToken] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct):
    delta: _Text | None = None
    message: _Text | None = None
    text: msgspec.Raw = _NONE
    """The text of a completion, which has no message."""
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class EngineTimings(msgspec.Struct):
    """llama.cpp's own measurement, in milliseconds."""

    prompt_ms: _Milliseconds | None = None
    predicted_ms: _Milliseconds | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: msgspec.Raw = _NONE
    timings: EngineTimings | None = None


_decode = msgspec.json.Decoder(_Answer).decode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UnreadableAnswerError(Exception):
    """An engine has sent what is no answer of its API, or too much of it."""


class AnswerPiece(msgspec.Struct):
    """The content of one event of a stream, or of a whole answer; texts are in JSON, and empty if there is nothing."""

    text: bytes = b""
    thinking: bytes = b""
    logprobs: bytes = b""
    calls: tuple[_CallPart, ...] = ()
    finish_reason: str = ""
    error: bytes = b""
    """The engine's error, in whatever form it has."""
    timings: EngineTimings | None = None


def read_piece(data: bytes) -> AnswerPiece:
    """Return the content of an event or of a whole answer. Raises UnreadableAnswerError."""
    try:
        answer = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableAnswerError(str(error)) from error
    piece = AnswerPiece(error=_read_raw(answer.error), timings=answer.timings)
    if not answer.choices:  # such as the event with the counts of tokens
        return piece
    choice = answer.choices[0]  # no client of Ollama can ask for several
    text = choice.delta or choice.message
    piece.text = _read_raw(text.content if text else choice.text)
    if text:
        piece.thinking = _read_raw(text.reasoning_content) or _read_raw(text.reasoning)
        piece.calls = tuple(text.tool_calls or ())
    if choice.logprobs and choice.logprobs.content:
        piece.logprobs = msgspec.json.encode(choice.logprobs.content)
    piece.finish_reason = choice.finish_reason or ""
    for name, value in (("content", piece.text), ("reasoning", piece.thinking)):
        if value and not value.startswith(b'"'):
            raise UnreadableAnswerError(f"{name} is no string")
    return piece


class ToolCalls:
    """The calls of tools of one answer, put together from pieces: Ollama's clients get each one whole."""

    def __init__(self) -> None:
        self._calls: dict[int, _CallPart] = {}
        self._size_bytes = 0

    def add(self, parts: tuple[_CallPart, ...]) -> None:
        """Add the pieces of one event. Raises UnreadableAnswerError: it is too much."""
        for place, part in enumerate(parts):
            index = place if part.index is None else part.index
            call = self._calls.get(index)
            if call is None:
                call = self._calls[index] = _CallPart(function=_FunctionPart("", ""))
            function, added = call.function, part.function or _FunctionPart()
            if function:  # always
                function.name = (function.name or "") + (added.name or "")
                function.arguments = (function.arguments or "") + (added.arguments or "")
            call.id = call.id or part.id
            self._size_bytes += len(added.name or "") + len(added.arguments or "")
        if len(self._calls) > _MOST_CALLS or self._size_bytes > _MOST_ARGUMENT_BYTES:
            raise UnreadableAnswerError("its calls of tools are too large")

    def take(self) -> tuple[bytes, bytes]:
        """Return the calls as Ollama's list, and as a text those whose arguments are no object; empty if none is.

        Such a call is one that the end of the answer has cut: Ollama sends it as the text that it is. Both are JSON.
        """
        calls: list[bytes] = []
        broken = ""
        for index, call in sorted(self._calls.items()):
            name, arguments = (call.function.name or "", call.function.arguments or "") if call.function else ("", "")
            text = (arguments.strip() or "{}").encode(errors="replace")
            try:
                _object.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                broken += f'{{"name": "{name}", "arguments": {arguments}'
                continue
            function = b'{"index":%d,"name":%b,"arguments":%b}' % (index, msgspec.json.encode(name), text)
            prefix = b'"id":%b,' % msgspec.json.encode(call.id) if call.id else b""
            calls.append(b'{%b"function":%b}' % (prefix, function))
        self._calls.clear()
        return b"[%b]" % b",".join(calls) if calls else b"", msgspec.json.encode(broken) if broken else b""


def _read_raw(value: msgspec.Raw) -> bytes:
    """Return a JSON text; empty for null and what is empty."""
    text = bytes(value)
    return b"" if text in _EMPTY else text
