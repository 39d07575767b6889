"""Keep a store equal to the server: list, watch, list again when the server forgot where we were.

The source where kopf does not fit: a relist here reports what vanished, and no answer of the server ends it.
"""

import asyncio
from collections.abc import Callable

from kube.client import Client
from kube.resources import Resource
from kube.store import Store


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
    raise NotImplementedError
