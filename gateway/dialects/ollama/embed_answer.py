"""The body of an answer on its way to clients of /api/embed and /api/embeddings, vector by vector.

A response with thousands of vectors is long: to decode all of it at once would block other requests. Each vector is
looked at, because one that is empty or has no numbers would pass for a result.
"""

import math
import re
from typing import Final

import msgspec

from gateway.dialects.ollama.answer_lines import AnswerTimes
from gateway.dialects.ollama.chat_answer import TranslatedBody
from gateway.proxy.response_body import ResponseBody
from gateway.proxy.response_end import ResponseEnd

LONGEST_VECTOR_BYTES: Final = 4 << 20
_VECTOR = re.compile(rb'"embedding"\s*+:\s*+(\[[^\]"]*+\])')
_vector = msgspec.json.Decoder(list[float])


class OllamaVectors(TranslatedBody):
    """The vectors of `count` texts; a shorter or unusable answer is an error, or is broken off.

    Args:
        inner: the body for OpenAI's clients.
        model: the client's name for the model; None: the older path, whose answer is one vector.
        count: the texts of the request.
        dimensions: the elements to which each vector is cut; 0: it stays whole.
        times: the times of the request.
    """

    def __init__(self, inner: ResponseBody, model: str | None, count: int, dimensions: int, times: AnswerTimes) -> None:
        super().__init__(inner)
        self._model = model
        self._count = count
        self._dimensions = dimensions
        self._times = times
        self._unread = b""
        self._vectors = 0
        """Those that were found."""
        self._problem = ""

    def feed(self, piece: bytes) -> bytes:
        """Take a piece from the engine and return the vectors that are whole."""
        return self._translate(self._inner.feed(piece))

    def finish(self) -> bytes:
        """Return the rest; set `failed` if there is an error of which nothing was sent, else `end`."""
        was_sent, inner = self._vectors > 0, self._inner
        rest = inner.finish()
        if inner.failed:
            self.failed, self.end = True, inner.end
            return rest
        last = self._translate(rest)
        self.end = inner.end
        if not self._problem and self._vectors != self._count:
            self._problem = f"it has {self._vectors} vectors for {self._count} texts"
        if self.end is ResponseEnd.COMPLETE and self._problem:
            if not was_sent:
                return self.fail(self._problem)
            self.end = ResponseEnd.CUT_OFF
        if self.end is not ResponseEnd.COMPLETE:
            return b""
        if self._model is None:
            return last + b"}"
        count = b',"prompt_eval_count":%d' % (self.tokens.prompt or 0)
        return last + b"]," + self._times.render_load() + count + b"}"

    def _translate(self, piece: bytes) -> bytes:
        """Return the vectors that are whole in what has come; none once one was unusable."""
        if self._problem:
            return b""
        unread, end = self._unread + piece, 0
        vectors: list[bytes] = []
        for match in _VECTOR.finditer(unread):
            end = match.end()
            if vector := self._read_vector(match[1]):
                vectors.append(vector)
            else:
                self._problem = "a vector is empty or has no numbers"
                return b""
        self._unread = unread[end:]
        if len(self._unread) > LONGEST_VECTOR_BYTES:
            self._problem = "a vector is too long"
        if not vectors:
            return b""
        begin = b"," if self._vectors else self._render_begin()
        self._vectors += len(vectors)
        return begin + b",".join(vectors)

    def _render_begin(self) -> bytes:
        if self._model is None:
            return b'{"embedding":'
        return b'{"model":%b,"embeddings":[' % msgspec.json.encode(self._model)

    def _read_vector(self, text: bytes) -> bytes:
        """Return a vector, cut and of length 1 again if the client wants fewer elements; empty if it is unusable."""
        try:
            vector = _vector.decode(text)
        except msgspec.DecodeError:
            return b""
        if not vector or not all(map(math.isfinite, vector)):
            return b""
        if not 0 < self._dimensions < len(vector):
            return text
        vector = vector[: self._dimensions]
        norm = max(math.sqrt(math.fsum(element * element for element in vector)), 1e-12)
        return msgspec.json.encode([element / norm for element in vector])
