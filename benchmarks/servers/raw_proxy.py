"""The floor of `benchmarks.proxy`: the least that a proxy on uvloop and httptools does.

It checks the path and the token, finds the backend by the model that the body names, and passes request and response
on. It has no queue, limits, metrics or log, rewrites nothing, and breaks off at the first surprise.
`python -m benchmarks.servers.raw_proxy ENGINE_PORT TOKEN` prints its port, and ends when its standard input does.
"""

import asyncio
import hmac
import sys
from collections.abc import Mapping
from typing import Final, cast

import httptools
import msgspec
import uvloop

_PATHS: Final = frozenset({b"/v1/chat/completions", b"/v1/completions"})
_WITHHELD: Final = frozenset({b"connection", b"keep-alive", b"server", b"set-cookie"})
_MODEL: Final = "tiny"


class _ModelName(msgspec.Struct):
    model: str = ""


_model_name = msgspec.json.Decoder(_ModelName)


class _Upstream(asyncio.Protocol):
    """A connection to the engine, which answers one client at a time."""

    def __init__(self, idle: "list[_Upstream]") -> None:
        self._idle = idle
        self._client: _Client | None = None
        self._chunked = False
        self._complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not its subclass

    def send(self, client: "_Client", request: bytes) -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._head: list[bytes] = []
        self._chunked = self._complete = False
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if self._complete and self._client:
            client, self._client = self._client, None
            self._idle.append(self)
            client.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self in self._idle:
            self._idle.remove(self)
        if self._client:
            self._client.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _WITHHELD:
            return
        if name == b"transfer-encoding":
            self._chunked = True
        self._head.append(b"%s: %s\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        head = b"HTTP/1.1 %d OK\r\n%s\r\n" % (self._parser.get_status_code(), b"".join(self._head))
        self._write(head)

    def on_body(self, body: bytes) -> None:
        self._write(b"%x\r\n%s\r\n" % (len(body), body) if self._chunked else body)

    def on_message_complete(self) -> None:
        if self._chunked:
            self._write(b"0\r\n\r\n")
        self._complete = True

    def _write(self, data: bytes) -> None:
        if self._client:
            self._client.transport.write(data)


class _Client(asyncio.Protocol):
    """A connection of a client, which sends its next request after the response to the last."""

    def __init__(self, token: bytes, routes: Mapping[str, int], idle: list[_Upstream]) -> None:
        self._authorization = b"Bearer " + token
        self._routes = routes
        self._idle = idle
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not its subclass
        self.begin()

    def begin(self) -> None:
        """Expect a request."""
        self._parser = httptools.HttpRequestParser(self)
        self._url = self._sent_authorization = b""
        self._body: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"authorization":
            self._sent_authorization = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        authorized = hmac.compare_digest(self._sent_authorization, self._authorization)
        body = b"".join(self._body)
        port = self._routes.get(_model_name.decode(body).model)
        if self._url not in _PATHS or not authorized or port is None:
            self.transport.close()
            return
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        request = head % (self._url, len(body)) + body
        if self._idle:
            self._idle.pop().send(self, request)
        else:
            self._connecting = asyncio.ensure_future(self._connect(port, request))

    async def _connect(self, port: int, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: _Upstream(self._idle), "127.0.0.1", port)
        upstream.send(self, request)


async def _serve(engine_port: int, token: str) -> None:
    idle: list[_Upstream] = []
    routes = {_MODEL: engine_port}
    server = await asyncio.get_running_loop().create_server(
        lambda: _Client(token.encode(), routes, idle), "127.0.0.1", 0, backlog=2048
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2]))
