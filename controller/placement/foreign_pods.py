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
from kube.watch import Selection, load, reflect

FOREIGN: Final = f"{LABEL_MANAGED_BY}!={MANAGED_BY}"
TAKES_ROOM: Final = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
_MOST_REQUESTS: Final = 4096
"""Different requests that are remembered, with what they amount to."""

NodesChanged = Callable[[Iterable[str]], None]


class _Resources(msgspec.Struct, frozen=True):
    requests: dict[str, str] | None = None


class _Container(msgspec.Struct, frozen=True, rename="camel"):
    restart_policy: str | None = None
    resources: _Resources | None = None


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""
    """The watch selects none without; one would take nothing."""
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    resources: _Resources | None = None
    overhead: dict[str, str] | None = None


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    uid: str
    namespace: str
    name: str
    resource_version: str


class _Pod(msgspec.Struct, frozen=True):
    """The part of a pod that is read."""

    metadata: _Metadata
    spec: _Spec


_DECODER: Final = msgspec.json.Decoder(_Pod)


class ForeignPods:
    """The sums, kept equal to the server by a reflection; it is the `WatchCache` of that."""

    def __init__(self) -> None:
        """Start without any pod."""
        self._taken: TakenRoom[bytes] = TakenRoom()
        """Amounts that each pod takes of its node, by its uid in the short form of `_shorten_uid`."""
        self._requests: dict[bytes, Amounts] = {}
        """Amounts that a pod takes in all, by its requests as JSON."""
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
        await reflect(client, self, self.selection, self.synced)

    async def read_once(self, client: Client) -> None:
        """Take the pods as they are now. Raises as `Client`."""
        await load(client, self, self.selection)

    @property
    def selection(self) -> Selection:
        """The pods that are bound and not ours, as far as they are read."""
        return Selection(PODS, None, FOREIGN, TAKES_ROOM, self.read)

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
        """Replace all pods by these, after a new complete list; report the nodes whose sums have changed.

        `items` are pods in the form that `read` returns.
        """
        listed: set[bytes] = set()  # uids of all these pods
        changed: set[str] = set()  # nodes whose sums have changed
        for item in items:
            uid = _shorten_uid(item["metadata"]["uid"])
            listed.add(uid)
            changed.update(self._taken.hold(uid, item["node"], item["amounts"]))

        # Pods that are not listed are gone.
        changed.update(self._taken.release_others(listed))
        self._report(changed)

    def keep_part(self, _resource: Resource, obj: Obj) -> Obj:
        """Return what `read` has returned, which is little."""
        return obj

    def put(self, _resource: Resource, obj: Obj) -> bool:
        """Count a new or changed pod, as `read` returned it; return whether a sum has changed."""
        uid = _shorten_uid(obj["metadata"]["uid"])
        changed = self._taken.hold(uid, obj["node"], obj["amounts"])
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
        """Forget a pod that has ended, is gone, or is ours now; return whether a sum has changed."""
        changed = self._taken.release(_shorten_uid(uid or ""))
        self._report(changed)
        return bool(changed)

    def _report(self, nodes: Iterable[str]) -> None:
        """Tell the listeners the nodes whose sums have changed; nothing if there are none."""
        if nodes:
            for listener in self._listeners:
                listener(nodes)

    def read(self, raw: msgspec.Raw) -> Obj:
        """Return the identity, the node and the requests of a pod from the JSON that the API server sends."""
        pod = _DECODER.decode(raw)
        return {
            "metadata": msgspec.to_builtins(pod.metadata),
            "node": sys.intern(pod.spec.node_name),
            "amounts": self._count(pod.spec),
        }

    def _count(self, spec: _Spec) -> Amounts:
        """Return what a pod requests in all, by resource.

        Sums are kept by the requests, since all pods of one controller have the same.
        """
        stated = msgspec.json.encode((spec.containers, spec.init_containers, spec.resources, spec.overhead))
        amounts = self._requests.get(stated)
        if amounts is None:
            if len(self._requests) >= _MOST_REQUESTS:
                self._requests.clear()
            amounts = self._requests[stated] = count_requests(msgspec.to_builtins(spec))
        return amounts


def _shorten_uid(uid: str) -> bytes:
    """Return a uid in few bytes: one that is a UUID as its number, any other one as its text."""
    try:
        return bytes.fromhex(uid.replace("-", ""))
    except ValueError:
        return uid.encode()
