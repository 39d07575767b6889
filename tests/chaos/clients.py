"""Clients of a chaos run: each request goes to one of a service's ready addresses, as a cluster routes it."""

import asyncio
import contextlib
import random
from urllib.parse import urlsplit

import aiohttp

from kube.errors import ApiError, Unreachable
from tests.chaos.faults import NO_ANSWER, FailedRequest
from tests.cluster.main_job.cluster import Cluster, ask

PAUSE_SECONDS = 0.1
LOOK_SECONDS = 1.0
"""Time after which slices are not read anew: the API server is down."""


class ChaosClient:
    """A client that sends requests to one service, one after the other, and records the failed ones."""

    def __init__(self, cluster: Cluster, service: str, seed: int) -> None:
        self.service = service
        self.answers = 0
        self.gaps: list[tuple[float, float]] = []
        """From when to when the service had no ready address."""
        self.failures: list[FailedRequest] = []
        self._cluster = cluster
        self._chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret

    async def run(self) -> None:
        """Send requests until cancelled."""
        token = await self._cluster.token(self.service)
        urls, loop, gap_began = list[str](), asyncio.get_running_loop(), None
        while True:
            looked = loop.time()
            # Without an API server a node routes by the last slices that it has seen.
            with contextlib.suppress(ApiError, Unreachable, TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    urls = sorted(await self._cluster.urls(self.service))
            # A request that fails at one address is sent to the next: each failure needs a fault of its own.
            for url in self._chance.sample(urls, len(urls)):
                if await self._ask(url, token, looked):
                    break
            if not urls:
                gap_began = gap_began or loop.time()
            elif gap_began:
                self.gaps.append((gap_began, loop.time()))
                gap_began = None
            await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(self, url: str, token: str, looked: float) -> bool:
        """Send a request to an address that was ready at `looked`; return whether it was answered."""
        loop = asyncio.get_running_loop()
        start, status = loop.time(), NO_ANSWER
        try:
            answer = await ask(url, self.service, token)
        except (aiohttp.ClientError, TimeoutError) as error:
            text = repr(error)
        else:
            if answer.status == 200 and "Hello" in answer.text:
                self.answers += 1
                return True
            status, text = answer.status, f"{answer.status} {answer.text[:200]}"
        address = urlsplit(url).hostname or ""
        self.failures.append(
            FailedRequest(address, looked, start, loop.time(), self.service, f"{self.service} at {url}: {text}", status)
        )
        return False
