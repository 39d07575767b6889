"""The record of a queue as watches showed it: each state of all pods, and each content of the ledger, in their order.

It judges what a benchmark of crashes promises, by the rules of the queue and by none of the controller's decisions.
"""

import asyncio
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from controller.placement.pod_requests import is_gated
from controller.placement.queue_places import find_place
from crds.meta import LABEL_SERVICE, PRIORITY_RANK, Priority
from kube.client import Obj
from kube.resources import CONFIG_MAPS, PODS, Resource
from tests.support.simulated_nodes import count_devices

Claims = Mapping[str, str]
"""The node that the ledger gives to a pod, by uid."""


class PodState(NamedTuple):
    """A pod in one state of the cluster."""

    name: str
    service: str
    """Its service; empty for a pod of others."""
    devices: int
    node: str
    """The node that it is bound to, or that it is pinned to without a gate; empty if it has none."""
    is_bound: bool
    place: tuple[int, float, str] | None
    """Rank, time and uid of one that waits in the queue; None: it does not."""


class _Books:
    """The devices of each node that pods have at one moment, or that the ledger gives to pods that wait."""

    def __init__(self) -> None:
        self.pods: dict[str, PodState] = {}
        self.claims: Claims = {}
        self.used: collections.Counter[str] = collections.Counter()

    def put_pod(self, uid: str, state: PodState | None) -> None:
        """Take a state of a pod; None: it is gone."""
        self._book(uid, -1)
        self.pods.pop(uid, None)
        if state is not None:
            self.pods[uid] = state
        self._book(uid, 1)

    def put_claims(self, claims: Claims) -> None:
        """Take a content of the ledger."""
        changed = self.claims.keys() | claims.keys()
        for uid in changed:
            self._book(uid, -1)
        self.claims = claims
        for uid in changed:
            self._book(uid, 1)

    def find_node(self, uid: str) -> str:
        """Return the node that a pod has, or is given by the ledger; empty if it has none."""
        state = self.pods.get(uid)
        if state is None:
            return ""
        return state.node or self.claims.get(uid, "")

    def _book(self, uid: str, sign: int) -> None:
        if node := self.find_node(uid):
            self.used[node] += sign * self.pods[uid].devices


class QueueRecord:
    """All states, to be judged once they are all there: two watches are in step by resourceVersions only.

    Args:
        totals: devices of each node.
        priorities: the priority of each service.
    """

    def __init__(self, totals: Mapping[str, int], priorities: Mapping[str, Priority]) -> None:
        self._totals, self._priorities = totals, priorities
        self._states: list[tuple[int, str, PodState | None]] = []
        self._ledgers: list[tuple[int, Claims]] = []
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
        place = None
        if is_gated(spec):
            place = (PRIORITY_RANK[self._priorities[service]], find_place(pod, 0.0), metadata["uid"])
        return PodState(metadata["name"], service, count_devices(pod), _find_node(spec), "nodeName" in spec, place)

    @property
    def decisions(self) -> int:
        """Number of contents of the ledger so far."""
        return len(self._ledgers)

    @property
    def promised(self) -> int:
        """Number of pods to which the ledger gives a node that they do not have yet."""
        claims = self._ledgers[-1][1] if self._ledgers else {}
        return sum(uid in self.now and self.now[uid].place is not None for uid in claims)

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

    def _replay(self) -> Iterator[tuple[_Books, str | None, Claims]]:
        """Yield the books after each change, with the uid of the pod that changed, or None and the ledger before."""
        books = _Books()
        states = collections.deque(self._states)
        ledgers = collections.deque(self._ledgers)
        while states or ledgers:
            if states and not (ledgers and ledgers[0][0] <= states[0][0]):
                _, uid, state = states.popleft()
                books.put_pod(uid, state)
                yield books, uid, {}
            else:
                before = books.claims
                _, claims = ledgers.popleft()
                books.put_claims(claims)
                yield books, None, before

    def list_double_bookings(self) -> list[str]:
        """Return every state in which a node has given away, or the ledger has promised, more devices than it has."""
        bookings = []
        for books, changed, _ in self._replay():
            nodes = {books.find_node(changed)} if changed is not None else {*books.claims.values()}
            for node in sorted(nodes - {""}):
                if books.used[node] > self._totals[node]:
                    cause = "the ledger" if changed is None else books.pods[changed].name
                    bookings.append(f"{cause} on {node}: {books.used[node]} of {self._totals[node]}")
        return bookings

    def list_unpinned(self) -> list[str]:
        """Return every pod that had neither the gate nor a node: the scheduler could put it on what is promised."""
        states = (state for _, _, state in self._states if state is not None)
        return sorted({state.name for state in states if state.place is None and not state.node})

    def list_passed(self) -> list[str]:
        """Return every decision that gave a node to a pod although one ahead should have had it, or waited for it.

        One of the same priority keeps the nodes that it could ever use. Of each higher priority, the first that could
        ever use the node holds back those of its own priority only: it may evict others. So they may have what is too
        little for it.
        """
        passed = []
        for books, changed, before in self._replay():
            if changed is not None:
                continue
            pods = books.pods.items()
            waiting = sorted((state.place, state) for uid, state in pods if state.place and uid not in books.claims)
            admitted = books.claims.keys() - before.keys()
            decided = sorted((state.place, uid, state) for uid, state in pods if state.place and uid in admitted)
            left = collections.Counter(self._totals)
            left.subtract(books.used)
            for _, uid, pod in decided:  # what this decision gives away was left before it
                left[books.claims[uid]] += pod.devices
            for place, uid, pod in decided:
                node = books.claims[uid]
                ahead = [state for other, state in waiting if other < place]
                passed += [
                    f"{pod.name} ({pod.devices}) passed {state.name} ({state.devices}) on {node}: "
                    f"{left[node]} were left"
                    for state in self._list_passed_by(pod, node, ahead, left[node])
                ]
                left[node] -= pod.devices
        return passed

    def _list_passed_by(self, pod: PodState, node: str, ahead: Iterable[PodState], left: int) -> Iterator[PodState]:
        """Yield those that should have had a node before a pod, of those ahead of it in their order."""
        heads: set[int] = set()
        for state in ahead:
            rank = _rank_of(state)
            if state.devices > self._totals[node]:
                continue
            if rank == _rank_of(pod) or (rank not in heads and state.devices <= left):
                yield state
            heads.add(rank)

    def list_forgotten(self) -> list[str]:
        """Return the pods that wait although they could have a node now.

        Those ahead of the same priority keep the nodes that they could ever use. Of those of higher priorities, all
        that are alike keep one node: where they wait only for others to have run long enough to be evicted.
        """
        left = collections.Counter(self._totals)
        for state in self.now.values():
            left[state.node] -= state.devices
        open_nodes = {node: self._totals[node] for node, free in left.items() if node and free > 0}
        names = []
        ahead: set[tuple[int, int]] = set()
        waiting = [(state.place, state) for state in self.now.values() if state.place is not None]
        for (rank, _, _), state in sorted(waiting):
            kept_from = min((devices for other, devices in ahead if other == rank), default=None)
            usable = [
                node
                for node, total in open_nodes.items()
                if left[node] >= state.devices and (kept_from is None or total < kept_from)
            ]
            if len(usable) > sum(other < rank for other, _ in ahead):
                names.append(state.name)
            ahead.add((rank, state.devices))
        return names

    def list_unbound(self) -> list[str]:
        """Return the pods that have left the queue and that the scheduler has not bound."""
        return [state.name for state in self.now.values() if state.place is None and not state.is_bound]


def _find_node(spec: Obj) -> str:
    """Return the node that a pod is bound to, or the only one to which the scheduler may bind it now.

    It is read from the spec alone, without the marks by which the controller knows its own pins.
    """
    if "nodeName" in spec or is_gated(spec):
        return str(spec.get("nodeName", ""))
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    fields = [
        [requirement for requirement in term.get("matchFields") or () if requirement["key"] == "metadata.name"]
        for term in terms
    ]
    names = [[name for requirement in field for name in requirement["values"]] for field in fields]
    is_pinned = bool(names) and all(group == names[0] and len(group) == 1 for group in names)
    return str(names[0][0]) if is_pinned else ""


def _rank_of(pod: PodState) -> int:
    """Return the rank of a pod that waits."""
    return pod.place[0] if pod.place is not None else 0
