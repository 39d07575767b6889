"""A reflector: keep a store equal to the server by list and watch, and list again when the server forgot our version.

A relist reports the objects that vanished, and no answer of the server ends a reflection; kopf does neither.
"""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import structlog

from kube.backoff import backoff_seconds
from kube.client import Client, Obj, ObjectList, Read, WatchEvent
from kube.errors import ApiError, Gone, Unreachable
from kube.resources import Resource
from kube.store import Snapshot

log = structlog.get_logger()

FIRST_RETRY_SECONDS = 0.5
LAST_RETRY_SECONDS = 5.0
"""Longest pause between tries, apart from jitter and Retry-After: the watch is back this soon after an outage."""
LONGEST_RETRY_AFTER_SECONDS = 30.0
"""Bound on the Retry-After of a server."""
PATIENT_TRIES = 5
"""Tries of one resourceVersion on a server that answers with errors; then the version itself may be the cause."""


class WatchCache(Protocol):
    """The part of a store that a reflection writes to; `kube.store.Store` says what each method does."""

    def snapshot(self, resource: Resource, namespace: str | None = None) -> Snapshot:
        """Return the versions that are known before a list."""

    def replace(
        self, resource: Resource, items: Iterable[Obj], *, namespace: str | None = None, before: Snapshot | None = None
    ) -> None:
        """Take a list: what is not in it is gone."""

    def keep_part(self, resource: Resource, obj: Obj) -> Obj:
        """Return the part of a listed object that `replace` needs; not called for what `read` returns."""

    def put(self, resource: Resource, obj: Obj) -> bool:
        """Take an object that is new or has changed."""

    def remove(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> bool:
        """Remove an object that was deleted, or that the selectors select no more."""


async def reflect(
    client: Client,
    store: WatchCache,
    resource: Resource,
    namespace: str | None = None,
    *,
    label_selector: str = "",
    field_selector: str = "",
    synced: asyncio.Event | None = None,
    read: Read | None = None,
) -> None:
    """Reflect for ever; every failure is logged and tried again with back-off.

    Use one reflection per resource (and namespace) of a store: each removes the objects that it does not select.

    Args:
        client: the API server.
        store: the store to keep equal.
        resource: the resource to reflect.
        namespace: the only namespace; None for all.
        label_selector: server-side filter.
        field_selector: server-side filter.
        synced: set after the first complete list.
        read: decodes what the store needs of each object, with its metadata; None: the whole object.
    """
    selected = _Selection(resource, namespace, label_selector, field_selector, read)
    version, failures = "", 0
    while True:
        events, retry_after_seconds = 0, 0.0
        try:
            if not version:
                version = await _list(client, store, selected)
                if synced:
                    synced.set()
            async for event in selected.watch(client, version):
                version = _apply_event(store, resource, event)
                events += 1
        except Unreachable as error:
            log.warning("watch_interrupted", resource=str(resource), namespace=namespace, error=str(error))
        except ApiError as error:
            # A busy or failing server does not object to this version; after any other error a new list is needed.
            if not _is_transient(error) or failures >= PATIENT_TRIES:
                version = ""
            retry_after_seconds = min(error.retry_after_seconds or 0.0, LONGEST_RETRY_AFTER_SECONDS)
            log.log(
                logging.INFO if isinstance(error, Gone) else logging.WARNING,
                "watch_refused",
                resource=str(resource),
                namespace=namespace,
                error=str(error),
            )
        # A server may end a watch without an event, as on its restart: then the next watch waits.
        failures = 0 if events else failures + 1
        if failures:
            pause_seconds = backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS)
            await asyncio.sleep(max(pause_seconds, retry_after_seconds))


@dataclass(frozen=True, slots=True)
class _Selection:
    """The objects to reflect."""

    resource: Resource
    namespace: str | None
    label_selector: str
    field_selector: str
    read: Read | None

    def list(self, client: Client, store: WatchCache) -> Awaitable[ObjectList]:
        return client.list(
            self.resource,
            self.namespace,
            label_selector=self.label_selector,
            field_selector=self.field_selector,
            read=self.read,
            part=functools.partial(store.keep_part, self.resource) if self.read is None else None,
        )

    def watch(self, client: Client, version: str) -> AsyncIterator[WatchEvent]:
        return client.watch(
            self.resource,
            self.namespace,
            resource_version=version,
            label_selector=self.label_selector,
            field_selector=self.field_selector,
            read=self.read,
        )


async def _list(client: Client, store: WatchCache, selected: _Selection) -> str:
    """List into the store; return the resourceVersion to watch from."""
    before = store.snapshot(selected.resource, selected.namespace)
    found = await selected.list(client, store)
    store.replace(selected.resource, found.items, namespace=selected.namespace, before=before)
    return found.resource_version


def _is_transient(error: ApiError) -> bool:
    return error.status == HTTPStatus.TOO_MANY_REQUESTS or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _apply_event(store: WatchCache, resource: Resource, event: WatchEvent) -> str:
    """Put one event into the store; return its resourceVersion, from which an interrupted watch continues."""
    metadata = event.object["metadata"]
    version = str(metadata["resourceVersion"])
    if event.type == "DELETED":
        store.remove(
            resource, metadata.get("namespace"), metadata["name"], uid=metadata["uid"], resource_version=version
        )
    elif event.type != "BOOKMARK":
        store.put(resource, event.object)
    return version
