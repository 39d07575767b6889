"""The charge of a key's tokens, read from Redis while gateways count in it.

A limit is a queue of work in Redis, which drains in real time. As the test adds work before the queue is empty, and
notes how much, each token that is charged stays visible, at 100 microseconds.
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Final, cast

from redis.exceptions import RedisError

from gateway.cluster.redis_limits import connect_store

LIMITS: Final = {"requestsPerMinute": 100_000, "tokensPerMinute": 600_000, "concurrentRequests": 1000}
"""The limits of the key."""
_TOKEN_US: Final = 100
_BACKLOG_US: Final = 50_000_000
"""The work in the queue: more than any fault lasts, and less than a minute, at which requests are refused."""
_ADDED: Final = "added_us"
_ADD_SECONDS: Final = 0.5
_NOTHING_RUNS: Final = {b"r", b"t", b"R", b"T"}
"""The fields of the limits, without those of gateways where requests run."""


class TokenMeter:
    """The meter of a key's tokens in Redis, which the test keeps from running empty."""

    def __init__(self, url: str, key_uid: str) -> None:
        self._client = connect_store(url)
        self._scope = f"pomona:limits:scope:{key_uid}"
        self._begin_us = 0
        self.least_us = _BACKLOG_US
        """The smallest backlog that was seen."""

    async def begin(self) -> None:
        """Begin to measure, while no request runs."""
        seconds, microseconds = await self._client.time()
        self._begin_us = seconds * 1_000_000 + microseconds + _BACKLOG_US
        await self._client.hset(self._scope, "t", str(self._begin_us))
        await self._client.set(_ADDED, 0)

    async def keep_backlog(self) -> None:
        """Add work for as long as the test runs; that and the note of it are one step."""
        while True:
            with contextlib.suppress(RedisError, OSError):
                seconds, microseconds = await self._client.time()
                backlog_us = (await self._read())[b"t"] - seconds * 1_000_000 - microseconds
                self.least_us = min(self.least_us, backlog_us)
                async with self._client.pipeline(transaction=True) as both:
                    both.hincrby(self._scope, "t", max(_BACKLOG_US - backlog_us, 0))
                    both.incrby(_ADDED, max(_BACKLOG_US - backlog_us, 0))
                    await both.execute()
            await asyncio.sleep(_ADD_SECONDS)

    async def _read(self) -> dict[bytes, int]:
        stored = await cast("Awaitable[dict[bytes, bytes]]", self._client.hgetall(self._scope))
        return {name: int(value) for name, value in stored.items()}

    async def is_settled(self) -> bool:
        """Return whether no request runs at any gateway, also at none that died less than its lease ago."""
        return set(await self._read()) == _NOTHING_RUNS

    async def read_charge(self) -> float:
        """Return the tokens that were charged since the begin."""
        async with self._client.pipeline(transaction=True) as both:
            both.hget(self._scope, "t")
            both.get(_ADDED)
            end_us, added_us = map(int, await both.execute())
        return float(end_us - added_us - self._begin_us) / _TOKEN_US

    async def aclose(self) -> None:
        await self._client.aclose()
