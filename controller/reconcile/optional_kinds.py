"""Kinds that a controller may be able to read or not: discovered from time to time, and watched while they are.

PodMonitor exists in some clusters only, and a controller of some namespaces may have no right to read nodes. A decision
asks whether objects of the kind can be read, so that either is no error. A kind that is added later, or a right that is
granted later, is found by the next discovery.
"""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import Final

import structlog

from kube.client import Client
from kube.errors import ApiError, Forbidden, NotFound, Unreachable
from kube.resources import Resource
from kube.store import Store
from kube.watch import Selection, reflect

DISCOVERY_SECONDS: Final = 600.0
RETRY_SECONDS: Final = 60.0
"""Pause after a discovery that failed."""

log = structlog.get_logger()


class OptionalKind:
    """One kind: whether it exists, and its objects in the store while it does.

    Args:
        resource: the kind.
        label_selector: server-side filter.
        namespaces: the only namespaces; none: all, or the kind is cluster-scoped.
    """

    def __init__(self, resource: Resource, label_selector: str, namespaces: Sequence[str] = ()) -> None:
        self.resource = resource
        self._label_selector = label_selector
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        """None stands for all."""
        self.exists = False
        """True once the kind has been found, and the store has all of its objects that can be read."""
        self.settled = asyncio.Event()
        """Set once the first discovery has ended, whatever it found."""
        self._is_refusal_logged = False

    async def follow(self, client: Client, store: Store) -> None:
        """Look for the kind for ever, and keep the store equal to the server while it exists."""
        while True:
            try:
                namespaces = await self._find_namespaces(client)
            except (ApiError, Unreachable) as error:
                log.warning("discovery_failed", resource=str(self.resource), error=str(error))
                self.settled.set()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if namespaces:
                await self._watch_while_served(client, store, namespaces)
            else:
                self.settled.set()
                await asyncio.sleep(DISCOVERY_SECONDS)

    async def _watch_while_served(self, client: Client, store: Store, namespaces: Collection[str | None]) -> None:
        """Watch the kind in these namespaces until another set of them can be read; `exists` is True meanwhile.

        Then its objects are removed from the store, and the caller begins anew.
        """
        log.info("optional_kind_found", resource=str(self.resource))
        try:
            async with asyncio.TaskGroup() as tasks:
                # Watch each namespace, and wait until the store has the objects of all.
                synced = {namespace: asyncio.Event() for namespace in namespaces}
                watches = [
                    tasks.create_task(
                        reflect(client, store, Selection(self.resource, namespace, self._label_selector), event)
                    )
                    for namespace, event in synced.items()
                ]
                for event in synced.values():
                    await event.wait()

                # The kind can be read from now on, until that changes.
                self.exists = True
                self.settled.set()
                await self._wait_until_changed(client, namespaces)
                for watch in watches:
                    watch.cancel()  # which lets the task group end
        finally:
            self.exists = False
            # They are not deleted, only out of sight: the same versions count if they can be read again.
            for key in store.snapshot(self.resource):
                store.remove(self.resource, key.namespace or None, key.name)
        log.info("optional_kind_changed", resource=str(self.resource))

    async def _wait_until_changed(self, client: Client, namespaces: Collection[str | None]) -> None:
        """Wait until two discoveries, one after the other, do not find these namespaces."""
        differences = 0
        while differences <= 1:  # one may be a mistake
            await asyncio.sleep(RETRY_SECONDS if differences else DISCOVERY_SECONDS)
            with contextlib.suppress(ApiError, Unreachable):
                # A server that starts, or whose roles are being replaced, may say once that there is no such kind.
                differences = differences + 1 if await self._find_namespaces(client) != namespaces else 0

    async def _find_namespaces(self, client: Client) -> list[str | None]:
        """Return the namespaces in which the kind can be read; None stands for all. Raises as `Client`.

        Empty: the API server does not have the kind, or refuses it in each namespace; the first refusal is logged.
        """
        readable: list[str | None] = []
        for namespace in self._namespaces:
            try:
                await client.try_list(self.resource, namespace)
            except NotFound:  # the API server does not have the kind
                return []
            except Forbidden as error:
                if not self._is_refusal_logged:
                    log.warning("optional_kind_refused", resource=str(self.resource), error=str(error))
                self._is_refusal_logged = True
            else:
                readable.append(namespace)
        return readable
