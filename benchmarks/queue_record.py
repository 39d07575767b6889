"""The record of a queue as watches showed it: each state of all pods, and each content of the ledger, in their order.

It judges what a benchmark of crashes promises, by the rules of the queue and by none of the controller's decisions.
"""

import asyncio
import collections
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from controller.placement.effects import find_gate
from controller.placement.pod_requests import find_taken_node
from controller.placement.queue_places import find_own_place
from crds.meta import LABEL_SERVICE, PRIORITY_RANK, Priority
from kube.client import Obj
from kube.resources import CONFIG_MAPS, PODS, Resource
from tests.support.simulated_nodes import count_devices


class PodState(NamedTuple):
    """A pod in one state of the cluster."""

    name: str
    devices: int
    node: str
    """The node that it is bound to, or that it is pinned to without a gate; empty if it has none."""
    is_bound: bool
    place: tuple[int, float, str] | None
    """Rank, time and uid of one that waits in the queue; None: it does not."""


class QueueRecord:
    """All states, to be judged once they are all there: two watches are in step by resourceVersions only.

    Args:
        totals: devices of each node.
        priorities: the priority of each service.
    """

    def __init__(self, totals: Mapping[str, int], priorities: Mapping[str, Priority]) -> None:
        self._totals, self._priorities = totals, priorities
        self._states: list[tuple[int, str, PodState | None]] = []
        self._ledgers: list[tuple[int, Mapping[str, str]]] = []
        self._version = 0
        self._changed = asyncio.Event()
        self.now: dict[str, PodState] = {}
        """The latest state of each pod, by uid."""
        self.admitted = 0
        """Pods of services that have a node."""

    def note(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Take a change: a listener of a store."""
        metadata = (new or old or {})["metadata"]
        version = int(metadata["resourceVersion"])
        self._changed.set()
        if resource == CONFIG_MAPS and new is not None:
            claims = msgspec.json.decode((new.get("data") or {}).get("ledger.json", "{}")).get("claims", {})
            cells = {uid: "".join(claim["cells"]).removeprefix("node/") for uid, claim in claims.items()}
            self._ledgers.append((version, cells))
        elif resource == PODS:
            # The watch is in order; of a pod that is gone, only an earlier version is known.
            self._version = max(self._version, version)
            self._take(metadata["uid"], self._read(new) if new is not None else None)

    def _take(self, uid: str, state: PodState | None) -> None:
        before = self.now.get(uid)
        if state == before:
            return
        self._states.append((self._version, uid, state))
        self.now.pop(uid, None)
        if state is not None:
            self.now[uid] = state
            self.admitted += before is not None and before.place is not None and state.place is None

    def _read(self, pod: Obj) -> PodState:
        metadata, spec = pod["metadata"], pod["spec"]
        service = (metadata.get("labels") or {}).get(LABEL_SERVICE, "")
        is_waiting = find_gate(pod) is not None
        place = (PRIORITY_RANK[self._priorities[service]], find_own_place(pod), metadata["uid"]) if is_waiting else None
        return PodState(metadata["name"], count_devices(pod), find_taken_node(pod), "nodeName" in spec, place)

    @property
    def decisions(self) -> int:
        """Number of contents of the ledger so far."""
        return len(self._ledgers)

    @property
    def states(self) -> int:
        """Number of states of all pods so far."""
        return len(self._states)

    async def wait(self, condition: Callable[[], bool], limit_seconds: float) -> None:
        """Wait until a condition holds after a change. Raises TimeoutError."""
        async with asyncio.timeout(limit_seconds):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def list_double_bookings(self) -> list[str]:
        """Return every state in which a node has given away more devices than it has."""
        found = []
        used: collections.Counter[str] = collections.Counter()
        known: dict[str, PodState] = {}
        for _, uid, state in self._states:
            before = known.pop(uid, None)
            if before is not None:
                used[before.node] -= before.devices
            if state is None:
                continue
            known[uid] = state
            used[state.node] += state.devices
            if state.node and used[state.node] > self._totals[state.node]:
                found.append(f"{state.name} on {state.node}: {used[state.node]} of {self._totals[state.node]}")
        return found

    def list_passed(self) -> list[str]:
        """Return every decision that gave a node to a pod although one ahead should have had it, or waited for it.

        One of the same priority keeps the nodes that it could ever use. One of a higher priority lets others have what
        is too little for it, since it may evict them.
        """
        found = []
        states = iter(self._states)
        upcoming = next(states, None)
        known: dict[str, PodState] = {}
        before: Mapping[str, str] = {}
        for version, claims in self._ledgers:
            while upcoming is not None and upcoming[0] < version:
                _, uid, state = upcoming
                known.pop(uid, None)
                if state is not None:
                    known[uid] = state
                upcoming = next(states, None)
            waiting = [each for uid, each in known.items() if each.place is not None and uid not in claims]
            left = self._count_left(known, before)
            decided = [(state, uid) for uid in claims.keys() - before.keys() if (state := known.get(uid)) is not None]
            for pod, uid in sorted((each for each in decided if each[0].place is not None), key=_order):
                found += self._list_passed_by(pod, claims[uid], waiting, left[claims[uid]])
                left[claims[uid]] -= pod.devices
            before = claims
        return found

    def _count_left(self, known: Mapping[str, PodState], claims: Mapping[str, str]) -> collections.Counter[str]:
        """Return the devices of each node that are neither used nor claimed."""
        left = collections.Counter(self._totals)
        for uid, state in known.items():
            left[state.node or claims.get(uid, "")] -= state.devices
        return left

    def _list_passed_by(self, pod: PodState, node: str, waiting: Iterable[PodState], left: int) -> list[str]:
        return [
            f"{pod.name} passed {each.name} on {node}"
            for each in waiting
            if pod.place is not None
            and each.place is not None
            and each.place < pod.place
            and each.devices <= (self._totals[node] if each.place[0] == pod.place[0] else left)
        ]

    def list_forgotten(self) -> list[str]:
        """Return the pods that wait although they could have a node now."""
        left = collections.Counter(self._totals)
        for each in self.now.values():
            left[each.node] -= each.devices
        most = max(self._totals.values()) + 1
        found = []
        waiting = [(each.place, each) for each in self.now.values() if each.place is not None]
        for _, each in sorted(waiting):
            usable = [node for node, total in self._totals.items() if each.devices <= total < most]
            if any(left[node] >= each.devices for node in usable):
                found.append(each.name)
            most = min(most, each.devices)  # nodes that it could use wait for it
        return found

    def list_unbound(self) -> list[str]:
        """Return the pods that have left the queue and that the scheduler has not bound."""
        return [each.name for each in self.now.values() if each.place is None and not each.is_bound]


def _order(decided: tuple[PodState, str]) -> tuple[int, float, str]:
    """Return the place of a pod that a decision admits."""
    pod, _ = decided
    return pod.place or (0, 0.0, "")
