"""Each state of some objects, for tests of what must hold all the time: a look now and then would miss a short gap."""

from collections.abc import AsyncIterator

from kube.client import Client, Obj
from kube.resources import Resource


async def watch_states(
    client: Client, resource: Resource, namespace: str, *, label_selector: str = ""
) -> AsyncIterator[list[Obj]]:
    """Yield the objects as they are, and again after each change, until the server ends the watch.

    Raises as `Client.watch`.
    """
    listed = await client.list(resource, namespace, label_selector=label_selector)
    objects = {item["metadata"]["name"]: item for item in listed.items}
    yield list(objects.values())
    version = listed.resource_version
    async for event in client.watch(resource, namespace, resource_version=version, label_selector=label_selector):
        if event.type == "BOOKMARK":
            continue
        name = event.object["metadata"]["name"]
        if event.type == "DELETED":
            del objects[name]
        else:
            objects[name] = event.object
        yield list(objects.values())
