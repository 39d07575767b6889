"""A stand-in of an engine that costs next to nothing: it streams events at a set pace, each with its time of sending.

Its events have the form and size of llama.cpp's. It is written on bare asyncio, so that its own work is not measured.
`python -m benchmarks.servers.stream_engine` prints its port, and ends when its standard input does.
"""

import asyncio
import contextlib
import json
import sys
import time

PAUSE_SECONDS = 0.05
"""Between two tokens of one stream. 32 streams are 640 tokens a second: more than most Macs reach with batching."""

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = (
    'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"%d"}}],"created":1795000000,'
    '"id":"chatcmpl-0123456789abcdefghijklmnopqrstuv","model":"tiny","system_fingerprint":"b1-0c1e570",'
    '"object":"chat.completion.chunk"}\n\n'
)
_LAST = (
    'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"created":1795000000,"model":"tiny",'
    '"object":"chat.completion.chunk","timings":{"cache_n":0,"prompt_n":9,"predicted_n":%d}}\n\ndata: [DONE]\n\n'
)


async def _serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            request = json.loads(await reader.readexactly(int(length.partition(b":")[2])))
            writer.write(_HEAD)
            for token in range(request["max_tokens"]):
                if token:
                    await asyncio.sleep(PAUSE_SECONDS)
                writer.write(_chunk(_EVENT % time.monotonic_ns()))
            if request.get("idle"):
                await reader.read()
            writer.write(_chunk(_LAST % request["max_tokens"]) + b"0\r\n\r\n")
    writer.close()


def _chunk(text: str) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text.encode())


async def _serve() -> None:
    server = await asyncio.start_server(_serve_connection, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve())
