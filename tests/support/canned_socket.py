"""A unix socket whose process answers each request with the same bytes: a hostile owner's stand-in for an agent."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_END = b"end"


@contextmanager
def answer_with(path: Path, answer: bytes, *, ends: bool = True) -> Iterator[list[bytes]]:
    """Answer at `path`; yield what was received first by each connection, complete at the end of the context.

    With `ends` a connection is closed after the answer.
    """
    received: list[bytes] = []
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            held.append(connection)
            with contextlib.suppress(OSError):
                received.append(connection.recv(65536))
                connection.sendall(answer)
            if ends:
                connection.close()
            if received[-1] == _END:
                return

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield received
        finally:
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
                last.sendall(_END)
            thread.join()
            received.remove(_END)
            for each in held:
                each.close()
