"""A file server that misbehaves on request, like hubs, mirrors and plain web servers, and like the network between.

Tests and the demo fetch weights from it. It serves the files under a folder with ranges and entity tags, and a path
`/ORG/REPO/resolve/REVISION/FILE` as a hub does: headers that name the commit, then a redirect to another origin (a
second port, the "CDN"). `/api/models/ORG/REPO/revision/REVISION` lists a repository. A test changes the attributes
while it runs and reads `requests` afterwards.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import signal
from collections import deque
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

from aiohttp import web

from artifacts.repositories.address_policy import parse_network

ALLOWED_NETWORKS: Final = tuple(map(parse_network, ("127.0.0.0/8", "10.77.0.0/16")))
"""Networks of the servers of tests: loopback, and the bridge of the sandbox. Sources may not lead there by default."""
_CHUNK_BYTES = 65536
LARGE: Final = (".gguf", ".safetensors")
"""Suffixes of the large files, for which a hub lists the digest."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"
"""The commit in the headers of the hub routes."""


@dataclasses.dataclass
class Request:
    """One received request, and its answer."""

    method: str
    path: str
    port: int
    range: str | None
    authorization: str | None
    status: int = 0
    bytes_sent: int = 0


@dataclasses.dataclass
class TransferFault:
    """A fault of one answer: after `after_bytes` of its body the connection is cut, or goes silent."""

    after_bytes: int
    silent: bool = False


class FileServer:
    """A server of the files under `root`; use it as an async context manager.

    Args:
        root: folder that is served.
        address: IP address to listen on.
        port: port, 0 for any free one.

    """

    states_ranges = True
    """False: it does not state Accept-Ranges."""
    content_range = ""
    """If set, the Content-Range of every range, whatever is sent."""
    etag_of_each = False
    """True: each answer has another entity tag, as those of several servers behind one address may."""
    link_uses = 0
    """If set, a redirect of the hub leads to a link that answers so many requests, and others with `expired_status`."""
    expired_status = 403
    most_at_once = 1 << 30
    """Requests for files beyond these, at the same time, get 429."""
    at_once = 0
    """Files that are being sent."""
    peak_at_once = 0
    """The most of them so far."""

    def __init__(self, root: Path, *, address: str = "127.0.0.1", port: int = 0) -> None:
        self.root = root
        self.address = address
        self.port = port
        self.cdn_port = 0
        self.token: str | None = None
        """If set, requests without this token get 401 (not on the CDN port, whose links are signed)."""
        self.ranges = True
        """False: always 200 with the whole file, as simple servers do."""
        self.etags = True
        """False: only Last-Modified names the version."""
        self.etag = ""
        """If set, the entity tag of every file, whatever it contains."""
        self.validators = True
        """False: neither ETag nor Last-Modified."""
        self.conditions = True
        """False: If-Range is ignored, so that a range may be of another version."""
        self.range_bytes = 1 << 40
        """Maximum number of bytes in the answer to a range, as with some caches."""
        self.latency_seconds = 0.0
        """Wait before each answer."""
        self.pause_seconds = 0.0
        """Wait after each 64 KiB of a body."""
        self.sending = asyncio.Event()
        """After its first 64 KiB a body waits while this event is cleared."""
        self.sending.set()
        self.commit = COMMIT
        """The commit in listings."""
        self.sizes: dict[str, int] = {}
        """Wrong sizes for listings, by name of the file."""
        self.digests: dict[str, str] = {}
        """Wrong digests for listings, by name of the file."""
        self.listed: list[str] = []
        """Names that listings have besides those of the files."""
        self.redirects: dict[str, str] = {}
        """Targets of redirects, by path."""
        self.statuses: deque[int] = deque()
        """Statuses for the next requests, one each."""
        self.retry_after = ""
        """Retry-After of the answers with such a status, if set."""
        self.faults: deque[TransferFault] = deque()
        """Faults for the next bodies, one each."""
        self.requests: list[Request] = []
        self.links: list[int] = []
        """Answers that each link still gives."""
        self._stopping = asyncio.Event()
        self._runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=0.1)

    @property
    def url(self) -> str:
        """Base URL, without a slash at the end."""
        return f"http://{self.address}:{self.port}"

    def seen(self, path: str) -> list[Request]:
        """Return the requests whose path ended with `path`."""
        return [request for request in self.requests if request.path.endswith(path)]

    def bytes_sent(self, path: str) -> int:
        """Return how many body bytes were sent for `path`, over all requests."""
        return sum(request.bytes_sent for request in self.seen(path))

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        for port in (self.port, 0):
            await web.TCPSite(self._runner, self.address, port).start()
        self.port, self.cdn_port = (address[1] for address in self._runner.addresses)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stopping.set()
        await self._runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/api/models/{org}/{repo}/revision/{revision}", self._list)
        application.router.add_get("/{org}/{repo}/resolve/{revision}/{file:.+}", self._resolve)
        application.router.add_get("/{file:.+}", self._file)
        return application

    async def _receive(self, request: web.Request) -> tuple[Request, web.Response | None]:
        """Record the request and return the refusal it gets, if any."""
        socket_name = request.get_extra_info("sockname") or ("", 0)
        seen = Request(
            method=request.method,
            path=request.path,
            port=socket_name[1],
            range=request.headers.get("Range"),
            authorization=request.headers.get("Authorization"),
        )
        self.requests.append(seen)
        await asyncio.sleep(self.latency_seconds)
        if self.statuses:
            seen.status = self.statuses.popleft()
        elif self.token and seen.port == self.port and seen.authorization != f"Bearer {self.token}":
            seen.status = 401
        headers = {"Retry-After": self.retry_after} if self.retry_after else {}
        return seen, web.Response(status=seen.status, headers=headers) if seen.status else None

    def _path(self, name: str) -> Path | None:
        path = (self.root / name).resolve()
        return path if path.is_file() and path.is_relative_to(self.root.resolve()) else None

    async def _list(self, request: web.Request) -> web.StreamResponse:
        seen, refusal = await self._receive(request)
        if refusal:
            return refusal
        folder = self.root / "{org}/{repo}".format(**request.match_info)
        if not folder.is_dir() or request.match_info["revision"] not in ("main", COMMIT):
            seen.status = 404
            return web.Response(status=404, headers={"X-Error-Code": "RepoNotFound"})
        seen.status = 200
        siblings = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            sibling: dict[str, object] = {
                "rfilename": str(path.relative_to(folder)),
                "size": self.sizes.get(path.name, path.stat().st_size),
            }
            if path.suffix in LARGE:
                digest = hashlib.sha256(await asyncio.to_thread(path.read_bytes)).hexdigest()
                digest = self.digests.get(path.name, digest)
                sibling["lfs"] = {"sha256": digest, "size": path.stat().st_size, "pointerSize": 135}
            siblings.append(sibling)
        siblings += [{"rfilename": name, "size": 2} for name in self.listed]
        return web.json_response(
            {"id": "{org}/{repo}".format(**request.match_info), "sha": self.commit, "siblings": siblings}
        )

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        seen, refusal = await self._receive(request)
        if refusal:
            return refusal
        name = "{org}/{repo}/{file}".format(**request.match_info)
        path = self._path(name)
        if not path or request.match_info["revision"] not in ("main", COMMIT):
            seen.status = 404
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        seen.status = 302
        digest = hashlib.sha256(await asyncio.to_thread(path.read_bytes)).hexdigest()
        headers = {
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": str(path.stat().st_size),
            "X-Linked-Etag": f'"{digest}"',
            "Location": f"http://{self.address}:{self.cdn_port}/{quote(name)}",
        }
        if self.link_uses:
            headers["Location"] += f"?link={len(self.links)}"
            self.links.append(self.link_uses)
        return web.Response(status=302, headers=headers)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        seen, refusal = await self._receive(request)
        if refusal:
            return refusal
        if location := self.redirects.get(request.path):
            seen.status = 302
            return web.Response(status=302, headers={"Location": location})
        path = self._path(request.match_info["file"])
        if not path:
            seen.status = 404
            return web.Response(status=404)
        if self.at_once >= self.most_at_once:
            seen.status = 429
            return web.Response(status=429, headers={"Retry-After": self.retry_after} if self.retry_after else {})
        if link := request.query.get("link"):
            self.links[int(link)] -= 1
            if self.links[int(link)] < 0:
                seen.status = self.expired_status
                return web.Response(status=self.expired_status)
        headers = self._validators(path)
        size = path.stat().st_size
        first, last = self._requested(request, headers, size)
        seen.status = 200 if first is None else 206
        if first is not None and first >= size:
            seen.status = 416
            return web.Response(status=416, headers={**headers, "Content-Range": f"bytes */{size}"})
        if first is not None:
            headers["Content-Range"] = self.content_range or f"bytes {first}-{last}/{size}"
        response = web.StreamResponse(status=seen.status, headers=headers)
        response.content_length = last + 1 - (first or 0)
        # A client may hang up early, as an inspection does: that is no error of the server.
        with contextlib.suppress(ConnectionError), self._count_sending():
            await response.prepare(request)
            await self._send(request, response, seen, path, first or 0)
        return response

    @contextlib.contextmanager
    def _count_sending(self) -> Iterator[None]:
        self.at_once += 1
        self.peak_at_once = max(self.peak_at_once, self.at_once)
        try:
            yield
        finally:
            self.at_once -= 1

    def _validators(self, path: Path) -> dict[str, str]:
        stat = path.stat()
        headers = {"Accept-Ranges": "bytes"} if self.states_ranges else {}
        if self.validators:
            headers["Last-Modified"] = formatdate(stat.st_mtime, usegmt=True)
            if self.etags:
                of_each = f"-{len(self.requests)}" if self.etag_of_each else ""
                headers["ETag"] = f'"{self.etag or f"{stat.st_mtime_ns:x}-{stat.st_size:x}"}{of_each}"'
        return headers

    def _requested(self, request: web.Request, validators: dict[str, str], size: int) -> tuple[int | None, int]:
        """Return first and last byte to send; first is None for a plain 200."""
        condition = request.headers.get("If-Range")
        current = not self.conditions or condition in (None, validators.get("ETag"), validators.get("Last-Modified"))
        wanted = request.http_range
        if not self.ranges or wanted.start is None or not current:
            return None, size - 1
        return wanted.start, min(wanted.stop or size, size, wanted.start + self.range_bytes) - 1

    async def _send(
        self, request: web.Request, response: web.StreamResponse, seen: Request, path: Path, first: int
    ) -> None:
        fault = self.faults.popleft() if self.faults and request.method == "GET" else None
        left = response.content_length or 0
        with path.open("rb") as file:
            file.seek(first)
            while left and request.method == "GET":
                until_fault = fault.after_bytes - seen.bytes_sent if fault else left
                if fault and not until_fault:
                    await self._suffer(request, fault)
                    return
                block = file.read(min(_CHUNK_BYTES, left, until_fault))
                await response.write(block)
                seen.bytes_sent += len(block)
                left -= len(block)
                await asyncio.sleep(self.pause_seconds if left else 0.0)
                await self.sending.wait()

    async def _suffer(self, request: web.Request, fault: TransferFault) -> None:
        if fault.silent:
            await self._stopping.wait()
        elif request.transport:
            request.transport.close()


async def _serve(root: Path, address: str, port: int, pause_seconds: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = FileServer(root, address=address, port=port)
    server.pause_seconds = pause_seconds
    async with server:
        print(f"serving {root} on {server.url}", flush=True)
        await stop.wait()


def main() -> None:
    """Serve a folder until SIGTERM: `... -m tests.support.file_server --root DIR --address 10.77.0.1 --port 8000`."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.file_server", description=main.__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--pause-seconds", type=float, default=0.0, help="wait after each 64 KiB")
    asyncio.run(_serve(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
