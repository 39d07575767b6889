"""Keep a store equal to the server: list, watch, list again when the server forgot where we were.

The source where kopf does not fit: a relist here reports what vanished, and no answer of the server ends it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

import structlog

from kube.backoff import backoff_seconds
from kube.client import Client, ObjectList, WatchEvent
from kube.errors import ApiError, Gone, Unreachable
from kube.resources import Resource
from kube.store import Store

log = structlog.get_logger()

FIRST_RETRY_SECONDS = 0.5
LAST_RETRY_SECONDS = 5.0
"""How long, at most, a watcher stays blind after an outage has ended."""
LONGEST_ASKED_SECONDS = 30.0
"""A server that asks for time gets as much."""
PATIENT_TRIES = 5
"""So often a broken server is asked for the same; then it may be the version that breaks it."""


async def reflect(
    client: Client,
    store: Store,
    resource: Resource,
    namespace: str | None = None,
    *,
    label_selector: str = "",
    field_selector: str = "",
    synced: asyncio.Event | None = None,
    on_contact: Callable[[], None] | None = None,
) -> None:
    """Reflect for ever; every failure is logged and tried again with back-off.

    One reflection per resource (and namespace) of a store: what it does not select, it takes for vanished.

    Args:
        client: the API server.
        store: where objects go.
        resource: what to reflect.
        namespace: only there.
        label_selector: server-side filter.
        field_selector: server-side filter.
        synced: set after the first complete list.
        on_contact: called whenever the server gave a sign of life (list answered, event, bookmark).
    """
    selected = _Selection(resource, namespace, label_selector, field_selector)
    contact = on_contact or _nobody
    version, failures = "", 0
    while True:
        news, asked_seconds = 0, 0.0
        try:
            if not version:
                version = await _list(client, store, selected)
                contact()
                if synced:
                    synced.set()
            async for event in selected.watch(client, version):
                version = _take(store, resource, event)
                news += 1
                contact()
        except Unreachable as error:
            log.warning("watch cut", resource=str(resource), namespace=namespace, error=str(error))
        except ApiError as error:
            # One that is busy or broken has nothing against this version; whatever else, a new list settles it.
            if not _may_pass(error) or failures >= PATIENT_TRIES:
                version = ""
            asked_seconds = min(error.retry_after_seconds or 0.0, LONGEST_ASKED_SECONDS)
            log.log(
                logging.INFO if isinstance(error, Gone) else logging.WARNING,
                "watch refused",
                resource=str(resource),
                namespace=namespace,
                error=str(error),
            )
        # A server that ends a watch without a word, as servers do when they restart, is not asked again at once.
        failures = 0 if news else failures + 1
        if failures:
            pause_seconds = backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS)
            await asyncio.sleep(max(pause_seconds, asked_seconds))


@dataclass(frozen=True, slots=True)
class _Selection:
    """Which objects are reflected."""

    resource: Resource
    namespace: str | None
    label_selector: str
    field_selector: str

    def list(self, client: Client) -> Awaitable[ObjectList]:
        return client.list(
            self.resource, self.namespace, label_selector=self.label_selector, field_selector=self.field_selector
        )

    def watch(self, client: Client, version: str) -> AsyncIterator[WatchEvent]:
        return client.watch(
            self.resource,
            self.namespace,
            resource_version=version,
            label_selector=self.label_selector,
            field_selector=self.field_selector,
        )


async def _list(client: Client, store: Store, selected: _Selection) -> str:
    """List into the store; returns the resourceVersion to watch from."""
    before = store.snapshot(selected.resource, selected.namespace)
    found = await selected.list(client)
    store.replace(selected.resource, found.items, namespace=selected.namespace, before=before)
    return found.resource_version


def _may_pass(error: ApiError) -> bool:
    return error.status == HTTPStatus.TOO_MANY_REQUESTS or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _take(store: Store, resource: Resource, event: WatchEvent) -> str:
    """One event into the store; returns its resourceVersion, from which a cut watch continues."""
    metadata = event.object["metadata"]
    version = str(metadata["resourceVersion"])
    if event.type == "DELETED":
        store.remove(
            resource, metadata.get("namespace"), metadata["name"], uid=metadata["uid"], resource_version=version
        )
    elif event.type != "BOOKMARK":
        store.put(resource, event.object)
    return version


def _nobody() -> None:
    """Nobody wants to know."""
