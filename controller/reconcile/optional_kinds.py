"""Kinds that a cluster may have or not, such as PodMonitor: discovered from time to time, and watched while they exist.

A decision asks whether objects of the kind can be written, so that a cluster without it is no error. A kind that is
added later is found by the next discovery.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import structlog

from kube.client import Client
from kube.errors import ApiError, NotFound, Unreachable
from kube.resources import Resource
from kube.store import Store
from kube.watch import reflect

DISCOVERY_SECONDS: Final = 600.0
RETRY_SECONDS: Final = 60.0
"""Pause after a discovery that failed."""

log = structlog.get_logger()


class OptionalKind:
    """One kind: whether it exists, and its objects in the store while it does."""

    def __init__(self, resource: Resource, label_selector: str) -> None:
        self.resource = resource
        self._label_selector = label_selector
        self.exists = False
        """True once the kind has been found, and the store has all of its objects."""

    async def follow(self, client: Client, store: Store) -> None:
        """Look for the kind for ever, and keep the store equal to the server while it exists."""
        while True:
            try:
                exists = await self._is_served(client)
            except (ApiError, Unreachable) as error:
                log.warning("discovery_failed", resource=str(self.resource), error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if exists:
                await self._watch_while_served(client, store)
            else:
                await asyncio.sleep(DISCOVERY_SECONDS)

    async def _watch_while_served(self, client: Client, store: Store) -> None:
        log.info("optional_kind_found", resource=str(self.resource))
        async with self._reflecting(client, store):
            while True:
                await asyncio.sleep(DISCOVERY_SECONDS)
                with contextlib.suppress(ApiError, Unreachable):
                    if not await self._is_served(client):
                        break
        log.info("optional_kind_gone", resource=str(self.resource))

    @contextlib.asynccontextmanager
    async def _reflecting(self, client: Client, store: Store) -> AsyncIterator[None]:
        synced = asyncio.Event()
        watch = asyncio.create_task(
            reflect(client, store, self.resource, label_selector=self._label_selector, synced=synced)
        )
        try:
            await synced.wait()
            self.exists = True
            yield
        finally:
            self.exists = False
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
            store.replace(self.resource, [], before=store.snapshot(self.resource))

    async def _is_served(self, client: Client) -> bool:
        """Return whether the API server serves the kind. Raises as `Client`, except NotFound."""
        try:
            await client.list_metadata(self.resource, label_selector=self._label_selector)
        except NotFound:
            return False
        return True
