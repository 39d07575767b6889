"""A reflector: keep a store equal to the server by list and watch, and list again when the server forgot our version.

A relist reports the objects that vanished, and no answer of the server ends a reflection; kopf does neither.
"""

import asyncio
import functools
from collections.abc import Iterable
from http import HTTPStatus
from typing import NamedTuple, Protocol

import structlog

from kube.backoff import backoff_seconds
from kube.client import Client, Obj, Read, WatchEvent
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


class Selection(NamedTuple):
    """The objects of a resource that a store has, as the server selects them."""

    resource: Resource
    namespace: str | None = None
    """None: those of all namespaces."""
    label_selector: str = ""
    field_selector: str = ""
    read: Read | None = None
    """Decodes what the store needs of each object, with its metadata; None: the whole object."""


async def reflect(client: Client, store: WatchCache, selection: Selection, synced: asyncio.Event | None = None) -> None:
    """Keep a store equal to the server, for ever; every failure is logged and tried again with back-off.

    1. List all objects, at the start and whenever the version of the last event is of no use any more.
    2. Watch from that version, and put each event into the store, until the watch ends or fails.
    3. If a try brought no event, because it failed or ended at once, pause before the next one.

    A version is of no use when the server refuses it (such as by 410 Gone), or when a busy or failing server has
    refused it several times.

    Use one reflection per resource (and namespace) of a store: each removes the objects that it does not select.

    Args:
        client: the API server.
        store: the store to keep equal.
        selection: the objects to reflect.
        synced: set after the first complete list.
    """
    resource, namespace, label_selector, field_selector, read = selection
    version, failures = "", 0  # an empty version: list first; failures: tries in a row without an event

    while True:
        event_count, retry_after_seconds = 0, 0.0
        try:
            if not version:  # at the start, or when the last one is of no use any more
                version = await load(client, store, selection)
                if synced:
                    synced.set()

            watched_events = client.watch(
                resource,
                namespace,
                resource_version=version,
                label_selector=label_selector,
                field_selector=field_selector,
                read=read,
            )
            async for event in watched_events:
                version = _apply_event(store, resource, event)
                event_count += 1
        except Unreachable as error:
            log.warning("watch_interrupted", resource=str(resource), namespace=namespace, error=str(error))
        except ApiError as error:
            # A busy or failing server does not object to this version; after any other error a new list is needed.
            is_transient = error.status == HTTPStatus.TOO_MANY_REQUESTS or error.status >= 500  # noqa: PLR2004 - 5xx
            if not is_transient or failures >= PATIENT_TRIES:
                version = ""
            retry_after_seconds = min(error.retry_after_seconds or 0.0, LONGEST_RETRY_AFTER_SECONDS)
            log_refusal = log.info if isinstance(error, Gone) else log.warning
            log_refusal("watch_refused", resource=str(resource), namespace=namespace, error=str(error))

        # A server may end a watch without an event, as on its restart: then the next watch waits.
        failures = 0 if event_count else failures + 1
        if failures:
            pause_seconds = backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS)
            await asyncio.sleep(max(pause_seconds, retry_after_seconds))


async def load(client: Client, store: WatchCache, selection: Selection) -> str:
    """Make a store equal to the server once; return the resourceVersion to watch from. Raises as `Client`.

    Objects that come from another source while the list is read are younger than it, and stay. Each listed object is
    reduced at once to the part that the store keeps; `read` does that by itself.
    """
    resource, namespace, label_selector, field_selector, read = selection
    before = store.snapshot(resource, namespace)  # to tell which objects change while the list is read

    listed = await client.list(
        resource,
        namespace,
        label_selector=label_selector,
        field_selector=field_selector,
        read=read,
        part=functools.partial(store.keep_part, resource) if read is None else None,
    )

    store.replace(resource, listed.items, namespace=namespace, before=before)
    return listed.resource_version


def _apply_event(store: WatchCache, resource: Resource, event: WatchEvent) -> str:
    """Put one event into the store; return its resourceVersion, from which an interrupted watch continues."""
    metadata = event.object["metadata"]
    version = str(metadata["resourceVersion"])
    if event.type == "DELETED":
        namespace, name = metadata.get("namespace"), metadata["name"]
        store.remove(resource, namespace, name, uid=metadata["uid"], resource_version=version)
    elif event.type != "BOOKMARK":
        store.put(resource, event.object)
    return version
