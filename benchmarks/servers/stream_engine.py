"""A stand-in of an engine that costs next to nothing: it streams events at a set pace, each with its time of sending.

Its responses have the form and size of llama.cpp's, and name the model that was asked for. It is written on bare uvloop
and httptools, so that its own work is not measured. To a GET, as routers send it to ask for the health or for the
models, it answers with the list of its models. `python -m benchmarks.servers.stream_engine [ADDRESS]` prints its port,
and ends when its standard input does.
"""

import asyncio
import sys
import time
from typing import Final, cast

import httptools
import msgspec
import uvloop

PAUSE_SECONDS: Final = 0.05
"""Between two tokens of one stream. 32 streams are 640 tokens a second: more than most Macs reach with batching."""
_LARGEST_DECODED_BYTES: Final = 64 << 10

_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_SHORT_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_EVENT: Final = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"%d"}}],"created":1795000000,'
    b'"id":"chatcmpl-0123456789abcdefghijklmnopqrstuv","model":"%s","system_fingerprint":"b1-0c1e570",'
    b'"object":"chat.completion.chunk"}\n\n'
)
_LAST: Final = (
    b'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"created":1795000000,"model":"%s",'
    b'"object":"chat.completion.chunk","timings":{"cache_n":0,"prompt_n":9,"predicted_n":%d}}\n\ndata: [DONE]\n\n'
)
_SHORT: Final = (
    b'{"choices":[{"finish_reason":"stop","index":0,"message":{"role":"assistant","content":"Hello."}}],'
    b'"created":1795000000,"id":"chatcmpl-0123456789abcdefghijklmnopqrstuv","model":"%s",'
    b'"object":"chat.completion","usage":{"completion_tokens":3,"prompt_tokens":9,"total_tokens":12}}'
)
_MODELS: Final = b'{"object":"list","data":[{"id":"tiny","object":"model","created":1795000000,"owned_by":"engine"}]}'


class _Question(msgspec.Struct):
    model: str = ""
    stream: bool = False
    idle: bool = False
    """Send the first token, and no more."""
    max_tokens: int = 1


_question = msgspec.json.Decoder(_Question)


class _Connection(asyncio.Protocol):
    """One client; its requests come one after the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not its subclass
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._size_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._timer:
            self._timer.cancel()

    def on_body(self, body: bytes) -> None:
        self._size_bytes += len(body)
        if self._size_bytes <= _LARGEST_DECODED_BYTES:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            self._transport.write(_SHORT_HEAD % len(_MODELS) + _MODELS)
            return
        small = self._size_bytes <= _LARGEST_DECODED_BYTES
        question = _question.decode(b"".join(self._body)) if small else _Question()
        self._body.clear()
        self._size_bytes = 0
        model = question.model.encode()
        if question.stream:
            self._transport.write(_HEAD)
            self._send_token(question, model, 1)
        else:
            body = _SHORT % model
            self._transport.write(_SHORT_HEAD % len(body) + body)

    def _send_token(self, question: _Question, model: bytes, number: int) -> None:
        self._transport.write(_chunk(_EVENT % (time.monotonic_ns(), model)))
        if question.idle:
            return
        if number < question.max_tokens:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PAUSE_SECONDS, self._send_token, question, model, number + 1)
        else:
            self._transport.write(_chunk(_LAST % (model, number)) + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _serve(address: str) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, address, 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1"))
