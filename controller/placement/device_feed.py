"""The watches of Dynamic Resource Allocation (DRA): our claim templates, and the devices and claims of the cluster.

Devices and claims are followed from the first service on that selects devices: until then a cluster in which others
claim thousands of them costs nothing.
"""

import asyncio
from collections.abc import Sequence

from controller.reconcile.optional_kinds import OptionalKind
from crds.meta import OURS
from kube.client import Client, Obj
from kube.resources import INFERENCE_SERVICES, RESOURCE_CLAIM_TEMPLATES, RESOURCE_CLAIMS, RESOURCE_SLICES, Resource
from kube.store import Store


def selects_devices(service: Obj) -> bool:
    """Return whether an InferenceService claims devices by a selector."""
    return (service["spec"].get("hardware") or {}).get("deviceSelector") is not None


class DeviceFeed:
    """The watches.

    Args:
        store: the store to keep equal, whose services are followed from now on.
        namespaces: the only namespaces of a controller without a queue, which counts no devices; none: all.
    """

    def __init__(self, store: Store, namespaces: Sequence[str] = ()) -> None:
        """Prepare the watches; `follow` runs them.

        Templates are ours, and always followed. Devices and claims of the whole cluster are followed only once a
        service selects devices, and not at all by a controller with few namespaces.
        """
        self._store = store
        self._templates = OptionalKind(RESOURCE_CLAIM_TEMPLATES, OURS, namespaces)  # OURS: those with our label
        # "": those of all owners, since the queue counts what others have claimed.
        self._counted = [
            OptionalKind(resource, "") for resource in (RESOURCE_SLICES, RESOURCE_CLAIMS) if not namespaces
        ]
        self._is_wanted = asyncio.Event()
        """Set from the first service on that selects devices."""
        store.subscribe(self._take_change)

    def _take_change(self, resource: Resource, _old: Obj | None, new: Obj | None) -> None:
        """Begin to watch devices and claims once a service selects devices."""
        if resource == INFERENCE_SERVICES and new is not None and selects_devices(new):
            self._is_wanted.set()

    async def follow(self, client: Client) -> None:
        """Keep the store equal to the cluster by watches, for ever; see the class for what is watched when."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._templates.follow(client, self._store))
            await self._is_wanted.wait()
            for kind in self._counted:
                tasks.create_task(kind.follow(client, self._store))

    async def settle(self) -> bool:
        """Wait until each watched kind was looked for once; return whether pods can claim devices at all.

        They can if the cluster has ResourceClaimTemplates.
        """
        kinds = [self._templates, *(self._counted if self._is_wanted.is_set() else ())]
        for kind in kinds:
            await kind.settled.wait()
        return self._templates.exists
