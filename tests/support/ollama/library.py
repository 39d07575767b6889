"""Ollama's library in a test: registry.ollama.ai by HTTPS, with models that the test adds.

Ollama reaches it by a proxy, which leads every name to this server, and takes its certificate for the library's own.
"""

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from tests.support import certificates

_CONTENT: Final = "content.registry.ollama.ai"
_BLOCK_BYTES: Final = 1 << 16


class Library:
    """The models of a library, as files; a test may let it fail."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proxy = ""
        """URL of the proxy that leads to it."""
        self.failure: tuple[int, str] | None = None
        """Status and body with which it answers everything."""

    def add(self, name: str, weights: bytes) -> None:
        """Add a GGUF model, as MODEL:TAG or NAMESPACE/MODEL:TAG."""
        config = json.dumps({"model_format": "gguf", "model_family": "llama", "os": "linux"}).encode()
        layers = [_describe(config, "vnd.docker.container.image.v1+json"), _describe(weights, "vnd.ollama.image.model")]
        for content, layer in zip((config, weights), layers, strict=True):
            self._write(f"blobs/{layer['digest']}", content)
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        manifest = {"schemaVersion": 2, "mediaType": kind, "config": layers[0], "layers": layers[1:]}
        full = name if "/" in name else f"library/{name}"
        self._write("manifests/" + full.replace(":", "/"), json.dumps(manifest).encode())

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer as a registry does: /v2/NAMESPACE/MODEL/manifests/TAG and /v2/NAMESPACE/MODEL/blobs/DIGEST."""
        if self.failure:
            return web.Response(status=self.failure[0], text=self.failure[1])
        if "/blobs/" in request.path and request.method == "GET" and request.host != _CONTENT:
            # Ollama takes the content of a file only from another host, to which it is redirected.
            return web.Response(status=307, headers={"Location": f"https://{_CONTENT}{request.path}"})
        *name, kind, last = request.path.removeprefix("/v2/").split("/")
        path = self.folder / "/".join(["blobs", last] if kind == "blobs" else ["manifests", *name, last])
        return web.FileResponse(path) if path.exists() else web.Response(status=404)

    def _write(self, path: str, content: bytes) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(content)


def _describe(content: bytes, kind: str) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return {"mediaType": f"application/{kind}", "digest": digest, "size": len(content)}


@asynccontextmanager
async def serve_library(folder: Path) -> AsyncIterator[Library]:
    """Serve a library, and the proxy to it, until the context ends."""
    library = Library(folder)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates.LIBRARY.certificate, certificates.LIBRARY.key)
    runner = web.ServerRunner(web.Server(library.answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    proxy = await asyncio.start_server(partial(_connect, site.port), "127.0.0.1", 0)
    library.proxy = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    try:
        yield library
    finally:
        proxy.close()
        await runner.cleanup()


async def _connect(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the CONNECT of a client of a proxy, and pass all bytes to `port` and back."""
    await reader.readuntil(b"\r\n\r\n")
    there, out = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    await asyncio.gather(_copy(reader, out), _copy(there, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while block := await reader.read(_BLOCK_BYTES):
            writer.write(block)
            await writer.drain()
    except ConnectionError:
        pass  # the other side has hung up
    finally:
        writer.close()
