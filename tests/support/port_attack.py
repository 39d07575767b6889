"""A stranger who attacks ports for a while: `python -m tests.support.port_attack SECONDS COUNT KINDS HOST:PORT...`.

He comes from addresses of loopback of his own, or from that of the network namespace in which he runs, and does at
every port at once what a program does that means harm: heads that do not end, heads that are too large, bodies that are
too large, requests without end whose answers he does not read, and connections without a request. He prints `ready`
once he has begun, ends by himself, and counts what was done in his last line.
"""

import asyncio
import contextlib
import ipaddress
import resource
import ssl
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

BODY_BYTES: Final = 8 << 20
FAT_LINES: Final = 99
FAT_LINE_BYTES: Final = 64_000
ADDRESSES: Final = 40
_PAUSE_SECONDS: Final = 0.5
_MOST_ROUNDS: Final = 10
"""On a busy machine some kind may not have begun when the time is over; then the attack goes on."""

Step = Callable[[asyncio.StreamReader, asyncio.StreamWriter, float], Awaitable[None]]


class Attack:
    """The attack on one port."""

    def __init__(self, host: str, port: int, count: int, *, tls: bool) -> None:
        self._host, self._port, self._count = host, port, count
        self._context = ssl._create_unverified_context() if tls else None  # noqa: S323 - he trusts everybody
        self._connected = 0
        self.done = Counter[str]()

    async def run(self, seconds: float, steps: Sequence[Step]) -> None:
        """Attack for so long."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._count):
                step = steps[number % len(steps)]
                tasks.create_task(self._repeat(step, end))
                if number % 50 == 0:
                    await asyncio.sleep(0)

    async def _repeat(self, step: Step, end: float) -> None:
        """Do it again and again, each time by a new connection."""
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(left):
                    reader, writer = await self._connect()
                    try:
                        self.done[step.__name__] += 1
                        await step(reader, writer, end)
                    finally:
                        writer.transport.abort()
            await asyncio.sleep(_PAUSE_SECONDS / 5)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._connected += 1
        source = None
        if ipaddress.ip_address(self._host).is_loopback:
            source = f"127.0.66.{1 + self._connected % ADDRESSES}", 0
        return await asyncio.open_connection(self._host, self._port, local_addr=source, ssl=self._context)


async def drip_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: float) -> None:
    """Send a head of 14 KiB and go on with it, a line at a time."""
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + b"X-Fat: " + b"a" * 14_000 + b"\r\n")
    while time.monotonic() < end and not reader.at_eof():
        writer.write(b"X-Drip: 1\r\n")
        await writer.drain()
        await asyncio.sleep(_PAUSE_SECONDS)


async def send_fat_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: float) -> None:
    """Send 99 lines of 64 KB, and not the end of the head."""
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
    for _ in range(FAT_LINES):
        writer.write(b"X-Fat: " + b"a" * FAT_LINE_BYTES + b"\r\n")
        await writer.drain()
    await _linger(reader, end)


async def send_huge_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: float) -> None:
    """Announce a body of a TiB, and begin it."""
    writer.write(b"POST /filter HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1099511627776\r\n\r\n")
    for _ in range(BODY_BYTES >> 16):
        writer.write(b"a" * (1 << 16))
        await writer.drain()
    await _linger(reader, end)


async def send_huge_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: float) -> None:
    """Send a body of chunks to the paths that take one."""
    path = b"/api/v1/density/simulate"
    writer.write(b"POST " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(BODY_BYTES >> 16):
        writer.write(b"10000\r\n" + b"a" * (1 << 16) + b"\r\n")
        await writer.drain()
    await _linger(reader, end)


async def read_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: float) -> None:
    """Ask for the metrics without end, and read no answer."""
    reader._transport.pause_reading()  # type: ignore[attr-defined]  # no public way to let the kernel's buffers fill up
    while time.monotonic() < end:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 500)
        await writer.drain()


async def stay_idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: float) -> None:
    """Ask for nothing."""
    del writer
    await _linger(reader, end)


async def _linger(reader: asyncio.StreamReader, end: float) -> None:
    """Wait for the end, of the attack or of the connection."""
    async with asyncio.timeout(max(0.0, end - time.monotonic())):
        while await reader.read(1 << 16):
            pass


STEPS: Final[tuple[Step, ...]] = (
    *(drip_head, send_fat_head, send_huge_body, send_huge_chunks, read_nothing, stay_idle),
)
KINDS: Final = tuple(step.__name__ for step in STEPS)


async def main(seconds: float, count: int, kinds: str, *places: str) -> None:
    """Attack all places at once."""
    steps = [step for step in STEPS if step.__name__ in kinds.split(",")]
    attacks = list[Attack]()
    for place in places:
        host, _, port = place.removesuffix("/tls").rpartition(":")
        attacks.append(Attack(host, int(port), count, tls=place.endswith("/tls")))
    print("ready", flush=True)
    done = Counter[str]()
    for _ in range(_MOST_ROUNDS):
        await asyncio.gather(*(attack.run(seconds, steps) for attack in attacks))
        done = sum((attack.done for attack in attacks), Counter[str]())
        if len(done) == len(steps):
            break
    print(dict(done), flush=True)


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(main(float(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
