"""Bodies of answers on their way to clients of /api/chat and /api/generate.

Each stands behind the body that would go to a client of OpenAI's API, which counts tokens and judges the end.
"""

from typing import Final

import msgspec

from gateway.dialects.ollama.answer_lines import AnswerLines, AnswerTimes, render_end, render_error
from gateway.dialects.ollama.engine_answer import (
    AnswerPiece,
    EngineTimings,
    ToolCalls,
    UnreadableAnswerError,
    read_piece,
)
from gateway.proxy.errors import RequestError
from gateway.proxy.response_body import ResponseBody
from gateway.proxy.response_end import ResponseEnd
from gateway.proxy.token_counts import TokenCount
from runtimes.engine_errors import read_error

LONGEST_ANSWER_BYTES: Final = 32 << 20
"""The longest answer without a stream, and the longest event of one."""
_DATA: Final = b"data:"
_END_MARK: Final = b"[DONE]"


class TranslatedBody(ResponseBody):
    """A body that stands behind another one, `inner`, which is that for OpenAI's clients."""

    starts_at_once = False

    def __init__(self, inner: ResponseBody) -> None:
        self._inner = inner

    @property
    def text_events(self) -> int:
        """Events with text so far."""
        return self._inner.text_events

    @property
    def tokens(self) -> TokenCount:
        """The engine's report so far."""
        return self._inner.tokens

    def fail(self, problem: str) -> bytes:
        """Make the answer an error, of which nothing was sent; return it as an engine would."""
        self.failed, self.end = True, ResponseEnd.FAILED
        return render_error(f"its engine has sent an answer that cannot be read: {problem}")


class OllamaStream(TranslatedBody):
    """A stream of events as lines: one for each event with text, one with the calls of tools, and the last one."""

    is_stream = True

    def __init__(self, inner: ResponseBody, lines: AnswerLines, times: AnswerTimes) -> None:
        super().__init__(inner)
        self._lines = lines
        self._times = times
        self._calls = ToolCalls()
        self._held_back = bytearray()
        """A line that is longer than what `inner` holds back, and comes in pieces."""
        self._timings: EngineTimings | None = None
        self._finish_reason = ""
        self._was_sent = False
        """The client has got a line."""
        self._error = b""
        """The engine's error, after which no event counts."""
        self._is_unreadable = False

    def feed(self, piece: bytes) -> bytes:
        """Take a piece from the engine and return the lines that it makes."""
        return self._translate(self._inner.feed(piece))

    def finish(self) -> bytes:
        """Return the last lines; set `end` and, for an error of which the client can be told by a status, `failed`."""
        last = self._translate(self._inner.finish())
        if self._held_back:
            last += self._translate(b"\n")
        inner = self._inner
        self.end, self.unreadable_error = inner.end, inner.unreadable_error
        if self.end is ResponseEnd.COMPLETE and self._is_unreadable:
            self.end = ResponseEnd.CUT_OFF
        if self.end is ResponseEnd.CUT_OFF:
            return b""
        if self.end is not ResponseEnd.COMPLETE:
            if self._was_sent:
                return last
            self.failed = True  # so it gets a status
            return b'{"error":%b}' % (self._error or self.unreadable_error or b'""')
        end = render_end(self._finish_reason, self._times.render(self.tokens, self._timings))
        return last + self._take_calls() + self._lines.render(end=end) + b"\n"

    def break_off(self, error: RequestError) -> bytes:
        """Return the line that tells the client of an error."""
        return render_error(str(error)) + b"\n"

    def _translate(self, events: bytes) -> bytes:
        """Return the lines that whole lines of events make; a part of a line is held back."""
        if self._held_back:
            events = bytes(self._held_back) + events
            self._held_back.clear()
        end = events.rfind(b"\n") + 1
        if len(events) - end > LONGEST_ANSWER_BYTES:
            self._is_unreadable = True
        elif end < len(events):
            self._held_back += events[end:]
        lines = [
            self._translate_event(line[len(_DATA) :].strip())
            for line in events[:end].splitlines()
            if line.startswith(_DATA)
        ]
        return b"".join(lines)

    def _translate_event(self, data: bytes) -> bytes:
        """Return the lines of one event; empty if it has nothing for the client."""
        if not data or data == _END_MARK or self._error or self._is_unreadable:
            return b""
        try:
            piece = read_piece(data)
            self._calls.add(piece.calls)
        except UnreadableAnswerError:
            self._is_unreadable = True
            return b""
        self._timings = piece.timings or self._timings
        if piece.error:
            self._error = piece.error
            return render_error(read_error(b'{"error":%b}' % piece.error).text) + b"\n" if self._was_sent else b""
        line = b""
        if piece.text or piece.thinking or piece.logprobs:
            self._times.note_text()
            line = self._lines.render(piece.text, piece.thinking, logprobs=piece.logprobs) + b"\n"
        if piece.finish_reason:
            self._finish_reason = piece.finish_reason
            line += self._take_calls()
        self._was_sent = self._was_sent or bool(line)
        return line

    def _take_calls(self) -> bytes:
        """Return the line with the calls of tools so far; empty if there are none."""
        calls, text = self._calls.take()
        return self._lines.render(text, calls=calls) + b"\n" if calls or text else b""


class OllamaAnswer(TranslatedBody):
    """A whole answer; for a client that wants a stream from an engine that has none, it is the only line of one."""

    def __init__(self, inner: ResponseBody, lines: AnswerLines, times: AnswerTimes, *, streams: bool) -> None:
        super().__init__(inner)
        self._lines = lines
        self._times = times
        self._line_end = b"\n" if streams else b""
        self._held_back = bytearray()

    def feed(self, piece: bytes) -> bytes:
        """Keep a piece; of an answer that is too long, nothing more."""
        if len(self._held_back) <= LONGEST_ANSWER_BYTES:
            self._held_back += self._inner.feed(piece)
        return b""

    def finish(self) -> bytes:
        """Return the answer, or an engine's error, with `failed` set."""
        body = bytes(self._held_back) + self._inner.finish()
        self.end, self.failed = self._inner.end, self._inner.failed
        if self.failed or self.end is not ResponseEnd.COMPLETE:
            return body if self.failed else b""
        if len(body) > LONGEST_ANSWER_BYTES:
            return self.fail("it is too long")
        try:
            piece = read_piece(body)
            if not piece.finish_reason and not piece.text and not piece.calls:
                return self.fail("it has no choice")
            return self._render(piece) + self._line_end
        except UnreadableAnswerError as error:
            return self.fail(str(error))

    def _render(self, piece: AnswerPiece) -> bytes:
        """Return the object. Raises UnreadableAnswerError."""
        tool_calls = ToolCalls()
        tool_calls.add(piece.calls)
        calls, broken = tool_calls.take()
        text = piece.text
        if broken:
            text = msgspec.json.encode(
                (msgspec.json.decode(text, type=str) if text else "") + msgspec.json.decode(broken, type=str)
            )
        end = render_end(piece.finish_reason, self._times.render(self.tokens, piece.timings))
        return self._lines.render(text, piece.thinking, calls, piece.logprobs, end)
