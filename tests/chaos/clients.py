"""Clients of a chaos run: each request goes to one of a service's ready addresses, as a cluster routes it."""

import asyncio
import contextlib
import random
from urllib.parse import urlsplit

import aiohttp

from kube.errors import ApiError, Unreachable
from tests.chaos.faults import FailedRequest
from tests.cluster.main_job.cluster import Cluster, ask

PAUSE_SECONDS = 0.1
BREAKS = frozenset({502, 503, 504})
"""Statuses that the proxy returns when its engine is down, or dies during an answer."""


class ChaosClient:
    """A client that sends requests to one service, one after the other, and records the failed ones."""

    def __init__(self, cluster: Cluster, service: str, seed: int) -> None:
        self.service = service
        self.answers = 0
        self.unserved = 0
        """Number of attempts at which the service had no ready address."""
        self.failures: list[FailedRequest] = []
        self._cluster = cluster
        self._chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret

    async def run(self) -> None:
        """Send requests until cancelled."""
        token = await self._cluster.token(self.service)
        while True:
            urls = []
            # This run does not break the API server, but on a busy machine the API server may be slow.
            with contextlib.suppress(ApiError, Unreachable):
                urls = await self._cluster.urls(self.service)
            if urls:
                await self._ask(self._chance.choice(sorted(urls)), token)
            else:
                self.unserved += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(self, url: str, token: str) -> None:
        loop = asyncio.get_running_loop()
        start, text, plausible = loop.time(), "", True
        try:
            answer = await ask(url, self.service, token)
        except (aiohttp.ClientError, TimeoutError) as error:
            text = repr(error)
        else:
            if answer.status == 200 and "Hello" in answer.text:
                self.answers += 1
                return
            text, plausible = f"{answer.status} {answer.text[:200]}", answer.status in BREAKS
        address = urlsplit(url).hostname or ""
        self.failures.append(FailedRequest(address, start, loop.time(), f"{self.service} at {url}: {text}", plausible))
