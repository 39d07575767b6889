"""Units, which wait for room, and cells, which have room: the same types for pods and for hosts.

A unit is what is placed as a whole: one pod, one MetalProcess, or a gang of pods of which all or none run. A cell is a
node or a host. The planner knows nothing else, so one queue serves both.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from controller.placement.node_rules import NodeRules, find_untolerated
from crds.meta import PRIORITY_RANK, Priority, Toleration
from crds.metalhost import HostTaint
from kube.client import Obj
from kube.resources import ObjectKey

MEMORY: Final = "memory"
CPU: Final = "cpu"
PODS: Final = "pods"
CLAIM_SLOT: Final = "claim-slots"
"""The one admission at a time on a node whose devices meet several needs: nobody knows which of them a claim gets
before the scheduler has allocated it. A pod that runs frees none, so that nothing is evicted for a slot."""
Amounts = Mapping[str, int]
"""Amounts by the name of a Kubernetes resource: bytes, but millicores of `cpu`, and a number of devices or pods."""
NOTHING: Final[Amounts] = MappingProxyType({})
TOO_SLOW: Final = "TooSlow"
SPEED_UNKNOWN: Final = "SpeedUnknown"
TOO_TIGHT: Final = "TooTight"
"""Reasons for which a service does not accept a device class."""
NOT_FASTER: Final = "NotFaster"
"""Reason for which a class is no better place than that of a slow replica."""
MOST_STEPS: Final = 10
"""Step of the fastest device class in a `SpeedProfile`."""

CellKind = Literal["node", "host"]
UnitKind = Literal["pod", "process", "gang"]
UnitState = Literal["waiting", "running", "ending"]
"""waiting: has no room; running: it was admitted, whether it has started or not; ending: it frees its room soon."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A node or a host, with what it has in all and what is free."""

    name: str
    kind: CellKind
    pool: str
    total: Amounts
    """Amounts for units in all; a resource that is absent is not counted on this cell."""
    free: Amounts
    """Amounts that nothing holds: no unit, running or ending, no other pod, and no process of the host's owner.
    What benchmarks hold is free: they end as soon as a unit is admitted there."""
    lasting: Amounts = NOTHING
    """Processor, memory and the like that pods hold which are no units, such as those of DaemonSets: these may not end.
    Devices are not among them: who holds these, such as a training job, ends."""
    closed: str = ""
    """The reason why the cell takes no new unit, as one CamelCase word; empty if it takes units."""
    closed_message: str = ""
    node: Obj | None = None
    """Labels and taints of a node, in the form of a Node."""
    runtimes: frozenset[str] = frozenset()
    """Engines of a host."""
    labels: frozenset[tuple[str, str]] = frozenset()
    """Labels of a host."""
    taints: tuple[HostTaint, ...] = ()
    """Taints of a host."""
    namespaces: frozenset[str] = frozenset()
    """Namespaces that a host is given to; none: all."""
    weights: frozenset[str] = frozenset()
    """Identities of the weights that are there already; none: they are unknown, or there are none."""
    bandwidth_bytes_per_second: int = 0
    """Memory bandwidth; 0 if it is unknown."""
    device_class: str = ""
    """Class of one device of a node, or of a host, by which speeds are known; empty if it is unknown."""
    utilization_percent: int | None = None
    """Utilization of its devices, if others may share them; None: unknown."""
    cost_permille: int | None = None
    """Its cost by the administrator, of the most expensive cell, in thousandths; None: none is stated."""
    slice_bytes: int | None = None
    """Memory of a device that one pod may take, if several share each device of the node; 0: that is unknown. None:
    each device is for one pod."""
    devices: frozenset[str] | None = None
    """The resources of `total` that count its devices, each device once; None: all that have a domain."""

    @property
    def id(self) -> str:
        """Name with the kind: a host may have the name of a node."""
        return f"{self.kind}/{self.name}"


class SliceDemand(NamedTuple):
    """The demand of a pod on devices that it might share with others."""

    number: int
    bytes_each: int | None = None
    """Memory that it takes of each; None: unknown."""
    wants_slice: bool = False
    """It asks for a part of a shared device by name."""

    def refuse(self, slice_bytes: int) -> str:
        """Return why slices (the parts of shared devices that pods get) of this size do not do; empty if they do.

        The reason is one CamelCase word.
        """
        # Several slices may be of the same device: they do not replace several devices.
        if self.number > 1:
            return "SharedDevices"
        if self.bytes_each is None:
            # Memory unknown: a unit that asks for a part by name gets one; one that asks for whole devices does not.
            return "" if self.wants_slice else "SliceTooSmall"
        return "SliceTooSmall" if self.bytes_each > slice_bytes else ""


class NodeRequirement(msgspec.Struct, frozen=True, dict=True):
    """The rules of a pod about the labels and taints of its node."""

    shape: str
    """Digest of `pod_spec`: pods with the same rules have the same."""
    pod_spec: Obj
    """nodeSelector, affinity and tolerations of the pod, as Kubernetes has them."""
    volume_nodes: frozenset[str] | None = None
    """The only nodes on which a bound volume of the pod can be; None: its volumes are anywhere, or not bound."""
    slices: SliceDemand | None = None
    """The demand of the pod on devices that it might share; None: it asks for none such."""

    @functools.cached_property
    def rules(self) -> NodeRules:
        """The rules in the form in which nodes are compared with them."""
        return NodeRules(self.pod_spec)

    @property
    def identity(self) -> tuple[object, ...]:
        """Key that pods have in common whose rules admit the same nodes."""
        return "node", self.shape, self.volume_nodes, self.slices

    def allows(self, labels: Iterable[tuple[str, str]]) -> bool:
        """Return whether the nodeSelector of the pod contradicts none of these labels of a node."""
        selector: Mapping[str, str] = self.pod_spec.get("nodeSelector") or {}
        return all(selector.get(name, value) == value for name, value in labels)

    def demands(self, labels: Iterable[tuple[str, str]]) -> bool:
        """Return whether the node affinity of the pod requires each of these labels by an expression."""
        affinity: Obj = (self.pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
        required: Obj = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
        terms: list[Obj] = required.get("nodeSelectorTerms") or []
        wanted = [{"key": name, "operator": "In", "values": [value]} for name, value in labels]
        return bool(terms) and all(
            expression in (term.get("matchExpressions") or ()) for term in terms for expression in wanted
        )

    def refuse(self, cell: Cell) -> str:
        """Return why a cell can never run the pod, as one CamelCase word; empty if it can."""
        if cell.kind != "node" or cell.node is None:
            return "OtherKind"
        if self.volume_nodes is not None and cell.name not in self.volume_nodes:
            return "VolumeElsewhere"
        if not self.rules.admit(cell.node):
            return "NodeRules"
        return self.slices.refuse(cell.slice_bytes) if self.slices and cell.slice_bytes is not None else ""


class HostOffer(Protocol):
    """The facts of a host that a requirement reads."""

    @property
    def runtimes(self) -> frozenset[str]:
        """Engines that it has."""

    @property
    def namespaces(self) -> frozenset[str]:
        """Namespaces that it is given to; none: all."""

    @property
    def labels(self) -> frozenset[tuple[str, str]]:
        """Its labels."""

    @property
    def taints(self) -> tuple[HostTaint, ...]:
        """Its taints."""


class HostRequirement(msgspec.Struct, frozen=True):
    """The demands of a MetalProcess and of its service on a host."""

    runtime: str
    namespace: str
    selector: frozenset[tuple[str, str]] = frozenset()
    """Labels that the host must have."""
    tolerations: tuple[Toleration, ...] = ()

    @property
    def shape(self) -> str:
        """Key that processes with the same demands have in common."""
        return f"{self.runtime} {self.namespace} {sorted(self.selector)} {self.tolerations}"

    @property
    def identity(self) -> tuple[object, ...]:
        """Key that processes have in common which the same hosts admit."""
        return "host", self.runtime, self.namespace, self.selector, self.tolerations

    def refuse(self, cell: Cell) -> str:
        """Return why a cell can never run the process, as one CamelCase word; empty if it can."""
        return self.refuse_host(cell) if cell.kind == "host" else "OtherKind"

    def refuse_host(self, host: HostOffer) -> str:
        """Return why a host can never run the process, as one CamelCase word; empty if it can."""
        if self.runtime not in host.runtimes:
            return "RuntimeMissing"
        if host.namespaces and self.namespace not in host.namespaces:
            return "OtherNamespace"
        if not self.selector <= host.labels:
            return "LabelMissing"
        return "" if find_untolerated(host.taints, self.tolerations) is None else "Taint"


class UnitKey(NamedTuple):
    """Identity of a unit in the API."""

    kind: UnitKind
    namespace: str
    name: str
    """Name of the pod or process; of a gang, the name that its pods share."""

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class Nomination(NamedTuple):
    """A promise: the unit gets these cells as soon as its victims have ended."""

    cells: tuple[str, ...]
    """`Cell.id` of each part."""
    victims: frozenset[str]
    """`Unit.uid` of the units that end for it, or that it replaces."""


class SpeedProfile(msgspec.Struct, frozen=True, dict=True):
    """The speed of one replica on each device class: measured or estimated, of a single stream."""

    speeds: tuple[tuple[str, float], ...] = ()
    """Tokens/s of generation by `Cell.device_class`; a class that is absent is unknown."""
    refused: frozenset[tuple[str, str]] = frozenset()
    """Device classes that the service does not accept, each with the reason as one CamelCase word."""
    accepted: frozenset[str] = frozenset()
    """Device classes that were assessed and are accepted; none are stated if `unlisted` is empty."""
    unlisted: str = ""
    """Reason for which a class that was not assessed is refused, as one CamelCase word; empty: it is accepted."""
    least: float = 0.0
    """Least speed of a better place in tokens/s: slower and unknown classes are refused as `NOT_FASTER`; 0: none is."""

    def refuse(self, device_class: str) -> str:
        """Return why a replica is not placed on a device class, as one CamelCase word; empty if it may be.

        In this order: the service refuses the class, the class was not assessed, or it is not faster than the place of
        the slow replica that is replaced (`least`).
        """
        if refusal := self.refusals.get(device_class):
            return refusal
        if self.unlisted and device_class not in self.accepted:
            return self.unlisted
        if not self.least:
            return ""
        speed = self.tokens_per_second.get(device_class)
        return NOT_FASTER if speed is None or speed < self.least else ""

    @property
    def acceptance(self) -> tuple[object, ...]:
        """Key that profiles have in common which accept the same classes."""
        return self.refused, self.accepted, self.unlisted, self.least

    @functools.cached_property
    def steps(self) -> Mapping[str, int]:
        """The speed on each class in tenths of the fastest that the service accepts."""
        refusals = self.refusals
        fastest = max((speed for name, speed in self.speeds if name not in refusals), default=0.0)
        return {name: min(MOST_STEPS, round(MOST_STEPS * speed / fastest)) for name, speed in self.speeds if fastest}

    @functools.cached_property
    def refusals(self) -> Mapping[str, str]:
        """The reasons of `refused` by class."""
        return dict(self.refused)

    @functools.cached_property
    def tokens_per_second(self) -> Mapping[str, float]:
        """The speeds by class."""
        return dict(self.speeds)


NO_SPEEDS: Final = SpeedProfile()


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """A pod, a gang of pods, or a MetalProcess, which is placed as a whole."""

    key: UnitKey
    uid: str
    service: ObjectKey
    service_uid: str = ""
    priority: Priority = "normal"
    enqueued_at: float
    """Since when the replica has its place in the queue, in seconds since 1970; a successor inherits it."""
    parts: tuple[Amounts, ...]
    """Needs of its pods, one part for each; all but a gang have one."""
    pools: tuple[str, ...]
    """Pools that it may use, in the order in which the service prefers them; the first is its home."""
    requirement: NodeRequirement | HostRequirement
    members: tuple[str, ...] = ()
    """Names of the pods of a gang, one for each part."""
    state: UnitState = "waiting"
    cells: tuple[str, ...] = ()
    """`Cell.id` of each part of a unit that is not waiting; empty if that is not known."""
    nomination: Nomination | None = None
    evictable_since: float | None = None
    """When it was admitted, in seconds since 1970, from which its minimum run time counts; None: it waits, or
    does not run yet."""
    ends_by: float | None = None
    """When it has ended at the latest, in seconds since 1970; None: it does not end, or that is not known."""
    is_protected: bool = False
    """It is never evicted for another."""
    has_other_gate: bool = False
    """Another gate than that of the queue holds a pod of it: no scheduler places it, and no autoscaler adds a node."""
    replaces: frozenset[str] = frozenset()
    """`uid` of units of an earlier spec of the same service, in whose place it may go."""
    is_superseded: bool = False
    """One of a later spec waits in its stead, so that it gets nothing more."""
    avoid: frozenset[str] = frozenset()
    """`Cell.id` of cells that have rejected or displaced its predecessor."""
    refused_by: frozenset[str] = frozenset()
    """`Cell.id` of cells to which the API server refused it: they are tried last."""
    weights: str = ""
    """Identity of its weights, as `artifacts.source.weights_identity` has it; a cell that has them starts it sooner."""
    speeds: SpeedProfile = NO_SPEEDS
    """Its speed by device class."""
    is_assessed: bool = True
    """Its service has been decided for the present spec; until then its speeds are not known."""
    is_last: bool = False
    """It is after all others in the queue and passes none of them: it replaces a slow replica that serves meanwhile."""
    freed_beside: Amounts = NOTHING
    """Amounts that its end frees on its cell beside its parts: for other needs, the devices that it has claimed."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Key that units have in common which the same cells admit."""
        return self.requirement.identity, *self.speeds.acceptance

    def refuse(self, cell: Cell) -> str:
        """Return why a cell can never run the unit, as one CamelCase word; empty if it can."""
        return self.requirement.refuse(cell) or self.speeds.refuse(cell.device_class)

    @property
    def freed(self) -> dict[str, Amounts]:
        """Amounts that its end frees, by `Cell.id`: those of its parts, and those in `freed_beside`.

        The latter are claimed devices, which count for several needs. Empty unless the cell of each part is known.
        """
        freed = add_by_cell(self.parts, self.cells)
        if not self.freed_beside:
            return freed
        return {cell: add_amounts(amounts, self.freed_beside) for cell, amounts in freed.items()}

    @property
    def objects(self) -> tuple[ObjectKey, ...]:
        """The pods or the process that it consists of, one for each part."""
        return tuple(ObjectKey(self.key.namespace, name) for name in self.members or (self.key.name,))

    @property
    def rank(self) -> int:
        """Position of its priority: 0 is the most important."""
        return PRIORITY_RANK[self.priority]

    @property
    def order(self) -> tuple[int, float, str]:
        """Sort key of the queue: the first is admitted first."""
        return self.rank + self.is_last, self.enqueued_at, self.uid


def fits(need: Amounts, free: Amounts) -> bool:
    """Return whether a need is free; a resource that the cell does not count is no obstacle, unless it is a device.

    Names of devices have a `/`, as in nvidia.com/gpu; others, such as memory, have none.
    """
    for name, amount in need.items():
        # A cell may have less than nothing left: it shrank. That is no obstacle to a unit that needs nothing of it.
        if amount > 0 and amount > free.get(name, 0 if "/" in name else amount):
            return False
    return True


def find_shortage(need: Amounts, free: Amounts) -> str:
    """Return the name of the first resource of which too little is free; empty if the need is free."""
    if fits(need, free):
        return ""
    return next(name for name, amount in need.items() if not fits({name: amount}, free))


def add_by_cell(parts: Sequence[Amounts], cells: Sequence[str]) -> dict[str, Amounts]:
    """Return the sum of the parts by cell, or nothing unless the cell of every part is known."""
    if len(cells) != len(parts):
        return {}
    needs: dict[str, Amounts] = {}
    for part, cell in zip(parts, cells, strict=True):
        needs[cell] = add_amounts(needs[cell], part) if cell in needs else part
    return needs


def add_amounts(one: Amounts, other: Amounts) -> Amounts:
    """Return the sum of two amounts."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def add_room(free: Amounts, freed: Amounts) -> Amounts:
    """Return what is free once more was freed; a resource that the cell does not count stays uncounted."""
    return {name: amount + freed.get(name, 0) for name, amount in free.items()}


def subtract_amounts(free: Amounts, need: Amounts) -> Amounts:
    """Return what is left of the free amounts; a resource that the cell does not count stays uncounted."""
    return {name: amount - need.get(name, 0) for name, amount in free.items()}
