"""Ports for servers that start later."""

import random
import socket
from collections.abc import Iterator


def find_free_ports() -> Iterator[int]:
    """Yield ports of 127.0.0.1, each of them once, below those that the system gives to others meanwhile."""
    for port in random.sample(range(20_000, 32_000), 100):
        if _is_free(port):
            yield port
    raise AssertionError("no port between 20000 and 32000 is free")


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
