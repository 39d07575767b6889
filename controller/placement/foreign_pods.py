"""The pods that are not ours, as sums of what they take by node: no object of them is kept.

There may be a hundred thousand of them. Of each, the uid, the node and the request are known, and equal requests are
kept once. The watch selects pods that are bound and have not ended, so that the server itself reports one as deleted
when it ends, or when it gets our label.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from controller.placement.pod_requests import count_requests
from controller.placement.taken_room import TakenRoom
from controller.placement.units import Amounts
from crds.meta import LABEL_MANAGED_BY, MANAGED_BY
from kube.client import Client, Obj
from kube.resources import PODS, Resource
from kube.store import Snapshot
from kube.watch import reflect

FOREIGN: Final = f"{LABEL_MANAGED_BY}!={MANAGED_BY}"
TAKES_ROOM: Final = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
_MOST_REQUESTS: Final = 4096
"""Different requests that are remembered, with what they amount to."""

NodesChanged = Callable[[Iterable[str]], None]


class ForeignPods:
    """The sums, kept equal to the server by a reflection; it is the `WatchCache` of that."""

    def __init__(self) -> None:
        self._taken: TakenRoom[str] = TakenRoom()
        self._known: dict[bytes, Amounts] = {}
        self._listeners: list[NodesChanged] = []
        self.synced = asyncio.Event()
        """Set after the first complete list: until then, nodes seem to have more room than they have."""

    def __len__(self) -> int:
        return len(self._taken)

    def sum_of(self, node: str) -> Amounts:
        """Return what these pods take of a node."""
        return self._taken.sum_of(node)

    def subscribe(self, listener: NodesChanged) -> None:
        """Call `listener(nodes)` after a change of the sums of these nodes."""
        self._listeners.append(listener)

    async def follow(self, client: Client) -> None:
        """Follow the pods for ever."""
        await reflect(
            client,
            self,
            PODS,
            label_selector=FOREIGN,
            field_selector=TAKES_ROOM,
            synced=self.synced,
            part=self.reduce,
        )

    def snapshot(self, _resource: Resource, _namespace: str | None = None) -> Snapshot:
        """Return nothing: there is no second source, so nothing changes during a list."""
        return {}

    def replace(
        self,
        _resource: Resource,
        items: Iterable[Obj],
        *,
        namespace: str | None = None,  # noqa: ARG002 - as the reflection calls it
        before: Snapshot | None = None,  # noqa: ARG002
    ) -> None:
        """Take a list of what `reduce` returned of each pod."""
        listed: set[str] = set()
        changed: set[str] = set()
        for each in items:
            listed.add(each["uid"])
            changed.update(self._taken.hold(each["uid"], each["node"], each["amounts"]))
        changed.update(self._taken.release_others(listed))
        self._report(changed)

    def put(self, _resource: Resource, obj: Obj) -> bool:
        """Take a pod that is new or has changed."""
        pod = self.reduce(obj)
        changed = self._taken.hold(pod["uid"], pod["node"], pod["amounts"])
        self._report(changed)
        return bool(changed)

    def remove(
        self,
        _resource: Resource,
        _namespace: str | None,
        _name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,  # noqa: ARG002 - as the reflection calls it
    ) -> bool:
        """Forget a pod that has ended, is gone, or is ours now."""
        changed = self._taken.release(uid or "")
        self._report(changed)
        return bool(changed)

    def _report(self, nodes: Iterable[str]) -> None:
        if nodes:
            for listener in self._listeners:
                listener(nodes)

    def reduce(self, pod: Obj) -> Obj:
        """Return what is read of a pod."""
        spec = pod["spec"]
        return {"uid": pod["metadata"]["uid"], "node": sys.intern(spec["nodeName"]), "amounts": self._count(spec)}

    def _count(self, spec: Obj) -> Amounts:
        """Return what a pod takes: pods of one controller are alike, and a look-up costs less than a sum."""
        stated = msgspec.json.encode(
            (
                [(each.get("resources") or {}).get("requests") for each in spec.get("containers") or ()],
                [
                    (each.get("restartPolicy"), (each.get("resources") or {}).get("requests"))
                    for each in spec.get("initContainers") or ()
                ],
                (spec.get("resources") or {}).get("requests"),
                spec.get("overhead"),
            )
        )
        amounts = self._known.get(stated)
        if amounts is None:
            if len(self._known) >= _MOST_REQUESTS:
                self._known.clear()
            amounts = self._known[stated] = count_requests(spec)
        return amounts
