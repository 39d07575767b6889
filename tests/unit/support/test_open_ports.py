"""A check of attacked ports leaves nothing behind, whatever it finds."""

import asyncio
import contextlib
import os

import psutil
import pytest

from tests.support.open_ports import OpenPort, check_attacked_ports

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def list_attackers() -> list[int]:
    """Return the attackers that this process has started; a child of another test may have ended meanwhile."""
    pids = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "tests.support.port_attack" in child.cmdline():
                pids.append(child.pid)
    return pids


async def test_attack_ends_with_a_check_that_fails() -> None:
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        with contextlib.suppress(asyncio.IncompleteReadError):  # of the attacker
            await reader.readuntil(b"\r\n\r\n")
        asked += 1
        writer.write(ANSWER if asked <= 3 else b"no HTTP\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = OpenPort(os.getpid(), *server.sockets[0].getsockname())
        with pytest.raises(AssertionError, match="no HTTP"):
            await check_attacked_ports([port], count=1)
    assert list_attackers() == []
