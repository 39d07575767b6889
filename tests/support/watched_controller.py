"""A controller without kopf, whose kinds all come by watches through the client's transport, and its queue."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from controller.run import Item
from kube.client import Client
from kube.credentials import Credentials
from kube.queue import WorkQueue
from kube.store import Store
from kube.watch import Selection, reflect


async def follow_by_watches(
    client: Client,
    store: Store,
    watched: Collection[Selection],
    _credentials: Callable[[], Credentials],
    synced: asyncio.Event,
    *,
    namespace: str | None = None,
    **_: Any,
) -> None:
    """Do what the feed of kopf does, through the transport of the client, where faults can be injected."""
    complete = [asyncio.Event() for _ in watched]
    async with asyncio.TaskGroup() as tasks:
        for selection, listed in zip(watched, complete, strict=True):
            tasks.create_task(reflect(client, store, selection._replace(namespace=namespace), listed))
        for event in complete:
            await event.wait()
        synced.set()


class CollectingQueue(WorkQueue[Item]):
    """A queue that collects what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.items: set[Item] = set()

    def add(self, key: Item, *, urgent: bool = False) -> None:
        del urgent
        self.items.add(key)


def no_credentials() -> Credentials:
    """Raise an error: only kopf connects by itself."""
    raise AssertionError("only kopf needs them")
