"""Serve the files of a folder with ranges and entity tags, as fast as the kernel copies them, or slowly.

A thread for each connection calls sendfile(2), so that the server is never what limits a download. With
`--connection-bytes-per-second`, each connection gets no more than that, as hubs do. `/sent/FILE` returns how many bytes
of a file were sent, over all connections.
"""

import argparse
import collections
import os
import re
import socket
import socketserver
import threading
import time
from pathlib import Path
from typing import Final

_RANGE: Final = re.compile(rb"\r\nRange: bytes=(\d+)-(\d*)\r\n", re.IGNORECASE)
_SLICE_BYTES: Final = 1 << 20
_SLOW_SLICES_PER_SECOND: Final = 50
_SEND_BUFFER_BYTES: Final = 256 << 10
"""Small, so that bytes count as sent about when they arrive."""


class WeightsServer(socketserver.ThreadingTCPServer):
    """The server; `sent` counts bytes by name of file."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, bytes_per_second: int) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.folder = folder
        self.bytes_per_second = bytes_per_second
        self.sent: collections.Counter[str] = collections.Counter()
        self.lock = threading.Lock()


class _Connection(socketserver.StreamRequestHandler):
    """One connection, with any number of requests."""

    server: WeightsServer

    def setup(self) -> None:
        """Set the size of the buffer."""
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        super().setup()

    def handle(self) -> None:
        """Answer requests until the client hangs up."""
        try:
            while head := self._read_head():
                self._answer(head)
        except (ConnectionError, TimeoutError):
            pass  # the client has what it needs, or was killed

    def _read_head(self) -> bytes:
        lines = []
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            lines.append(line)
        return b"".join(lines)

    def _answer(self, head: bytes) -> None:
        name = head.split(b" ", 2)[1].decode().lstrip("/")
        if name.startswith("sent/"):
            text = str(self.server.sent[name.removeprefix("sent/")]).encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
            return
        with (self.server.folder / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            match = _RANGE.search(head)
            first = int(match[1]) if match else 0
            end = min(size, int(match[2]) + 1) if match and match[2] else size
            status = b"206 Partial Content\r\nContent-Range: bytes %d-%d/%d" % (first, end - 1, size)
            self.wfile.write(
                b'HTTP/1.1 %s\r\nContent-Length: %d\r\nETag: "1"\r\nAccept-Ranges: bytes\r\n\r\n'
                % (status if match else b"200 OK", end - first)
            )
            self._send(file.fileno(), name, first, end)

    def _send(self, descriptor: int, name: str, position: int, end: int) -> None:
        rate = self.server.bytes_per_second
        most = rate // _SLOW_SLICES_PER_SECOND or _SLICE_BYTES
        began, start = time.monotonic(), position
        while position < end:
            sent = os.sendfile(self.connection.fileno(), descriptor, position, min(most, end - position))
            position += sent
            with self.server.lock:
                self.server.sent[name] += sent
            if rate:
                time.sleep(max(0.0, began + (position - start) / rate - time.monotonic()))


def main() -> None:
    """Serve until the process is terminated; print the URL first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers.weights_server")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--connection-bytes-per-second", type=int, default=0)
    arguments = parser.parse_args()
    with WeightsServer(arguments.folder, arguments.connection_bytes_per_second) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
