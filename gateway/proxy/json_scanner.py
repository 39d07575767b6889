"""A scan of a JSON text that may be large and is not trusted, in short pieces of work.

Decoding such a text at once would hold up every other request, and the values of 64 MiB of small keys take a gigabyte.
The scanner builds no values: it moves over them, and pauses after less than a millisecond of work. Structure is checked
where it is walked; a value that is only skipped must have closed strings and brackets, and may be invalid otherwise,
which is for the engine to refuse.
"""

import codecs
import re
from collections.abc import Callable, Generator
from typing import Final, TypeAlias

import msgspec

VALUES_LIMIT: Final = 1_000_000
"""The most strings, objects and arrays that a text may have: some seconds of work in all."""
LEVELS_LIMIT: Final = 1000
"""The most levels of objects and arrays in each other; decoders of engines have such limits, too."""

_PIECE_BYTES: Final = 16 << 10
"""The work between two pauses, in bytes of text that an expression reads: less than a millisecond."""
_VALUE_COST_BYTES: Final = 64
"""The work on one value beside reading it, in the same measure."""
_FOUND_BYTES_PER_COST: Final = 16
"""A search for one character is that much faster than an expression."""
_DECODED_BYTES: Final = 4 * _PIECE_BYTES
"""Decoding is faster than an expression."""
_SHORT_STRING_BYTES: Final = 4096
_LONGEST_KEY_BYTES: Final = 4096

_QUOTE, _BACKSLASH, _COLON, _COMMA = b'"\\:,'
_BRACKET_OPENS, _BRACKET_CLOSES, _BRACE_OPENS, _BRACE_CLOSES = b"[]{}"

_BLANKS = re.compile(rb"[ \t\n\r]*")
_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*+"', re.DOTALL)
_CHARACTERS = re.compile(rb'(?:[^"\\]+|\\.)*+', re.DOTALL)
# Strings that are complete and everything else but brackets.
_FLAT = re.compile(rb'(?:[^"\[\]{}]+|"(?:[^"\\]+|\\.)*+")*+', re.DOTALL)
_SCALAR = re.compile(rb"true|false|null|[-+.0-9eE]+")

PausingWork: TypeAlias = Generator[None, None, None]
"""A generator that does its work in short pieces, and yields between them: other requests may run at each yield."""


class InvalidJsonError(Exception):
    """The text is not JSON, or has more than the limits allow; the message quotes nothing of it."""


class JsonScanner:
    """A position in a JSON text, which every method moves behind what it reads."""

    def __init__(self, text: bytes | bytearray) -> None:
        self.text = text
        self.position = 0
        """The place of the next byte to read."""
        self._value_count = 0
        """The strings and brackets counted so far, whose number is limited; short strings between brackets are not."""
        self._work_since_pause = 0
        """The work since the last yield, in bytes of text that an expression reads.

        Once it is `_PIECE_BYTES`, the method at work yields, so that other requests run.
        """

    def peek(self) -> int:
        """Return the next byte. Raises InvalidJsonError at the end of the text."""
        if self.position >= len(self.text):
            raise InvalidJsonError("it ends within a value")
        return self.text[self.position]

    def skip_blanks(self) -> PausingWork:
        """Skip white space; where there is much of it, pause after each piece."""
        while True:
            start = self.position
            # The end of the blanks, or of this piece of work.
            self.position = _match_end(_BLANKS, self.text, start, start + _PIECE_BYTES)
            if self.position < start + _PIECE_BYTES:
                return
            if self._count_work(self.position - start):
                yield  # here other requests run

    def expect_end(self) -> PausingWork:
        """Expect nothing but white space up to the end of the text."""
        yield from self.skip_blanks()
        if self.position < len(self.text):
            raise InvalidJsonError(f"there is more text after its end, at byte {self.position}")

    def read_object(self, read_member: Callable[[str, int], PausingWork]) -> PausingWork:
        """Read an object; `read_member` gets each key and the place where it starts, and reads the value behind it."""
        # `yield from` pauses wherever the work below pauses, so that other requests run.
        self._expect(_BRACE_OPENS)
        self._count_value()
        yield from self.skip_blanks()
        if self.peek() == _BRACE_CLOSES:
            self.position += 1
            return

        while True:
            # 1. The key; one that is too long to matter is None, and has no name.
            start = self.position
            yield from self.skip_string()
            key = self.decode_string(start)

            # 2. The value
            yield from self.skip_blanks()
            self._expect(_COLON)
            yield from self.skip_blanks()
            yield from read_member("" if key is None else key, start)

            # 3. The end of the object, or a comma before the next key
            yield from self.skip_blanks()
            if self.peek() == _BRACE_CLOSES:
                self.position += 1
                return
            self._expect(_COMMA)
            yield from self.skip_blanks()

    def read_objects(self, read_object: Callable[[], PausingWork]) -> PausingWork:
        """Read an array, and call `read_object` at each object in it or in its inner arrays; skip all other values.

        A loop that counts the open arrays, and no recursion, so that a hostile text cannot exhaust the stack.
        """
        open_arrays = 0
        while True:
            # Skip to the next bracket, or to a string that is too long to be skipped at once. The first bracket is the
            # array's own `[`.
            yield from self._skip_to_bracket()
            byte = self.peek()
            if byte == _BRACE_OPENS:
                yield from read_object()
                continue
            self._count_value()
            if byte == _QUOTE:
                yield from self.skip_string()
                continue

            # The bracket opens or closes an array.
            if byte == _BRACE_CLOSES:
                raise _wrong_bracket(self.position)
            open_arrays += 1 if byte == _BRACKET_OPENS else -1
            if open_arrays > LEVELS_LIMIT:
                raise _too_deep()
            self.position += 1
            if not open_arrays:
                return

    def skip_value(self) -> PausingWork:
        """Skip a value of any kind."""
        byte = self.peek()
        if byte == _QUOTE:
            yield from self.skip_string()
        elif byte in (_BRACE_OPENS, _BRACKET_OPENS):
            yield from self._skip_brackets()
        else:
            yield from self._skip_scalar()

    def skip_string(self) -> PausingWork:
        """Skip a string, quotation marks included: a short one by one expression, a longer one in pieces."""
        self._count_value()
        start = self.position
        if short := _STRING.match(self.text, start, start + _SHORT_STRING_BYTES):
            self.position = short.end()
            if self._count_work(self.position - start):
                yield
            return
        self._expect(_QUOTE)
        while not self._skip_characters():
            yield

    def decode_string(self, start: int) -> str | None:
        """Return the string between `start` and the position; None if it is too long for a key that matters."""
        if self.position - start > _LONGEST_KEY_BYTES:
            return None
        try:
            return msgspec.json.decode(self.text[start : self.position], type=str)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidJsonError(f"the string at byte {start} is not valid") from error

    def _skip_characters(self) -> bool:
        """Skip a piece of a string's characters; return True once the quotation mark at its end is skipped, too.

        Up to the first backslash the end is found by a search, which is much faster than an expression. From a
        backslash on, an expression is needed: only it can tell an escaped quotation mark from the end.
        """
        # 1. Search for the quotation mark, and for a backslash before it, in 16 times as many bytes as an expression
        # may read at once: a search is that much faster.
        text, start = self.text, self.position
        stop = min(start + _FOUND_BYTES_PER_COST * _PIECE_BYTES, len(text))
        quote = text.find(b'"', start, stop)
        plain_end = stop if quote < 0 else quote
        backslash = text.find(b"\\", start, plain_end)

        # 2. Move on, from a backslash by an expression. Only without a backslash, the bytes count for a sixteenth.
        if backslash >= 0:
            self.position = _match_end(_CHARACTERS, text, backslash, backslash + _PIECE_BYTES)
            work_bytes = self.position - start
        else:
            self.position = plain_end
            work_bytes = (self.position - start) // _FOUND_BYTES_PER_COST
        if self.position == start and text[start : start + 1] != b'"':  # nothing was skipped, and this is not the end
            raise InvalidJsonError("it ends within a string")
        self._count_work(work_bytes)

        # 3. This is the end of the string, or only that of the piece.
        if text[self.position : self.position + 1] == b'"':
            self.position += 1
            return True
        return False

    def _skip_to_bracket(self) -> PausingWork:
        """Skip to the next bracket, or to the begin of a string that does not end within this piece of work.

        Strings that end, numbers, commas and colons are skipped without a check.
        """
        while True:
            start = self.position
            # `_FLAT` takes complete strings, and all else but brackets.
            self.position = _match_end(_FLAT, self.text, start, start + _PIECE_BYTES)
            pause = self._count_work(self.position - start + _VALUE_COST_BYTES)
            if self.position >= len(self.text):
                raise InvalidJsonError("it ends within an object or an array")
            if pause:
                yield
            if self.text[self.position] in b'"[]{}':  # else only this piece of work has ended
                return

    def _skip_brackets(self) -> PausingWork:
        """Skip an object or an array, from its opening bracket to its closing one; all brackets in it must match."""
        expected_ends = bytearray()  # the closing brackets of what is open, the innermost last
        while True:
            # The next byte is a bracket, or begins a string that is too long to be skipped at once.
            byte = self.text[self.position]
            if byte == _QUOTE:
                yield from self.skip_string()
            elif byte in (_BRACE_OPENS, _BRACKET_OPENS):
                self._count_value()
                if len(expected_ends) == LEVELS_LIMIT:
                    raise _too_deep()
                expected_ends.append(byte + 2)  # in ASCII, `]` and `}` are the second after `[` and `{`
                self.position += 1
            elif expected_ends.pop() == byte:
                self.position += 1
                if not expected_ends:
                    return
            else:
                raise _wrong_bracket(self.position)

            yield from self._skip_to_bracket()

    def _skip_scalar(self) -> PausingWork:
        """Skip a number, true, false or null; its letters are not checked further."""
        start = self.position
        while (end := _match_end(_SCALAR, self.text, self.position, self.position + _PIECE_BYTES)) > self.position:
            pause = self._count_work(end - self.position)
            self.position = end
            if pause:
                yield
        if self.position == start:
            raise InvalidJsonError(f"no value begins at byte {start}")

    def _expect(self, byte: int) -> None:
        """Move behind the next byte. Raises InvalidJsonError if it is not `byte`."""
        if self.peek() != byte:
            raise InvalidJsonError(f"{chr(byte)} is missing at byte {self.position}")
        self.position += 1

    def _count_value(self) -> None:
        """Count a string, an object or an array. Raises InvalidJsonError if they are too many."""
        self._value_count += 1
        self._work_since_pause += _VALUE_COST_BYTES
        if self._value_count > VALUES_LIMIT:
            raise InvalidJsonError(f"it has more than {VALUES_LIMIT} strings, objects and arrays")

    def _count_work(self, work_bytes: int) -> bool:
        """Count work; return True if a pause is due."""
        self._work_since_pause += work_bytes
        if self._work_since_pause < _PIECE_BYTES:
            return False
        self._work_since_pause = 0
        return True


def check_encoding(text: bytes | bytearray) -> PausingWork:
    """Check that a text is UTF-8, piece by piece, with a pause after each. Raises InvalidJsonError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(text), _DECODED_BYTES):
            piece = text[start : start + _DECODED_BYTES]
            half_character, _ = decoder.getstate()  # bytes of a character that the end of the piece before has cut
            if half_character or not piece.isascii():  # ASCII alone is valid, and need not be decoded
                decoder.decode(piece)
            yield
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise InvalidJsonError("it is not UTF-8") from error


def _match_end(pattern: re.Pattern[bytes], text: bytes | bytearray, start: int, stop: int) -> int:
    match = pattern.match(text, start, stop)
    return match.end() if match else start


def _wrong_bracket(at: int) -> InvalidJsonError:
    return InvalidJsonError(f"the bracket at byte {at} closes nothing")


def _too_deep() -> InvalidJsonError:
    return InvalidJsonError(f"it has more than {LEVELS_LIMIT} levels of objects and arrays")
