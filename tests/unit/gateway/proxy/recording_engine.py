"""An engine that records every byte that reaches it, and reads it as strictly as can be."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from gateway.proxy.config import Backend
from tests.unit.gateway.proxy.running_proxy import raw_engine

_HEAD = re.compile(rb"POST (/[\w/]+) HTTP/1\.1\r\n((?:[\w!#$%&'*+.^`|~-]+: [\x20-\x7e\x80-\xff\t]*\r\n)+)\r\n")
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class EngineRequest(NamedTuple):
    """A request as it reached the engine; the names of its fields are in lower case."""

    path: str
    fields: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def values(self, name: bytes) -> list[bytes]:
        """Return the values of the field `name`."""
        return [value for field, value in self.fields if field == name]


class RecordingEngine:
    """Answers each request with `{}`."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.faults: list[str] = []
        """Bytes that are no request of the proxy's own form, and requests without a clear end."""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                request = await self._read_request(head, reader)
                if request is None:
                    break
                self.requests.append(request)
                writer.write(_ANSWER)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                self.faults.append(f"broken off: {error.partial!r}")
        except ConnectionError:
            pass
        writer.close()

    async def _read_request(self, head: bytes, reader: asyncio.StreamReader) -> EngineRequest | None:
        match = _HEAD.fullmatch(head)
        if match is None:
            self.faults.append(f"not the proxy's form: {head!r}")
            return None
        lines = (line.split(b": ", 1) for line in match[2].removesuffix(b"\r\n").split(b"\r\n"))
        fields = tuple((name.lower(), value) for name, value in lines)
        lengths = [value for name, value in fields if name == b"content-length"]
        if len(lengths) != 1 or any(name == b"transfer-encoding" for name, _ in fields):
            self.faults.append(f"no clear end: {head!r}")
            return None
        return EngineRequest(match[1].decode(), fields, await reader.readexactly(int(lengths[0])))


@asynccontextmanager
async def recording_engine() -> AsyncIterator[tuple[RecordingEngine, Backend]]:
    """Run such an engine."""
    engine = RecordingEngine()
    async with raw_engine(engine.talk) as backend:
        yield engine, backend
