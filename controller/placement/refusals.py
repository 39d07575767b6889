"""The reasons for which a node or host does not run a unit: what each means, its words and its way out.

A rule returns a reason: `Unit.refuse`, a limit, the state of a round, or `Cell.closed`. All that is said about it is in
one row of `REFUSALS`, and in one of docs/queue-commands.md, which a test compares with this table.
"""

import shlex
from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, cast

from controller.placement.found_place import RESERVED, order_parts
from controller.placement.node_rules import find_untolerated
from controller.placement.planner import PlanRules, Round
from controller.placement.pool_limits import DEVICES, LimitReason, LimitRefusal, PoolRules, amount_text, limit_text
from controller.placement.units import (
    CLAIM_SLOT,
    MEMORY,
    NOT_FASTER,
    SPEED_UNKNOWN,
    TOO_SLOW,
    TOO_TIGHT,
    Amounts,
    Cell,
    HostRequirement,
    NodeRequirement,
    SliceDemand,
    Unit,
)
from crds.rate import format_rate
from crds.size import size_text

FITS: Final = "Fits"
NOMINATED: Final = "Nominated"
HEAD_OF_LINE: Final = "HeadOfLine"
AVOIDED: Final = "Avoided"
OTHER_POOL: Final = "OtherPool"
TOO_SMALL: Final = "TooSmall"
INSUFFICIENT: Final = "Insufficient"

RefusalMeaning = Literal["elsewhere", "never", "closed", "limited", "short", "open", "ready"]
"""elsewhere: the cell is none of those that count. never: it can never run the unit. closed: it takes nothing new.
limited: a limit keeps the unit out. short: too little is free. open: it could run the unit, but not now. ready: it runs
the unit next."""
_OF_ONE: Final = {"are": "is", "do": "does", "fit": "fits", "have": "has", "lack": "lacks"}
"""Verbs about one cell by those about several."""
ReasonAndRemedy = tuple[str, str]
"""Why a cell does not run a unit, and what would help, in words; the latter is empty if nothing is needed."""


class RefusedPlace(NamedTuple):
    """A unit and a cell that does not run it, after a round."""

    unit: Unit
    cell: Cell
    resource: str
    """The resource of which the cell has too little, if that is the reason."""
    limit: LimitRefusal | None
    """The limit that keeps the unit out of the pool of the cell."""
    made: Round
    rules: PlanRules

    @property
    def on_host(self) -> HostRequirement:
        """The demands of a unit that only a host can have refused."""
        return cast("HostRequirement", self.unit.requirement)

    @property
    def on_node(self) -> NodeRequirement:
        """The rules of a unit that only a node can have refused."""
        return cast("NodeRequirement", self.unit.requirement)


class Refusal(NamedTuple):
    """A reason, with all that is said about it."""

    meaning: RefusalMeaning
    effort: int
    """Effort to end it, in comparison with others of the same meaning."""
    many: str
    """The words about several cells, such as `lack its engine`."""
    explain: Callable[[RefusedPlace], ReasonAndRemedy]

    @property
    def one(self) -> str:
        """The words about one cell, such as `lacks its engine`."""
        verb, space, rest = self.many.partition(" ")
        return f"{_OF_ONE.get(verb, verb)}{space}{rest}"

    def count_cells(self, number: int, noun: str) -> str:
        """Return how many cells have this reason, such as `2 hosts lack its engine`."""
        return f"1 {noun} {self.one}" if number == 1 else f"{number} {noun}s {self.many}"


def find_refusal_of(reason: str) -> Refusal:
    """Return the row of a reason; a reason without one is that of a closed cell, which brings its own message."""
    return REFUSALS.get(reason, _CLOSED)


def largest_part(unit: Unit) -> Amounts:
    """Return what the largest part of a unit needs."""
    return unit.parts[order_parts(unit)[0]]


def or_raise_priority(unit: Unit) -> str:
    """Return the further remedy of a higher priority; empty if there is none above that of the unit."""
    return ", or raise spec.priority" if unit.rank else ""


_LIMIT_FIELDS: Final[Mapping[LimitReason, ReasonAndRemedy]] = {
    "Quota": ("the quota", "end services of the namespace"),
    "Nominal": ("nominal", "end services at home in the pool"),
    "Lending": ("lendingLimit", "end services that borrow from the pool"),
    "Borrowing": ("borrowingLimit", "end services of the pool that borrow from others"),
}


def describe_limit(refusal: LimitRefusal, unit: Unit) -> ReasonAndRemedy:
    """Return what a limit allows, and what would help a unit that it refuses."""
    # `owner`: the pool, or namespace/pool of a quota. `ending`: whose end makes room.
    field, ending = _LIMIT_FIELDS[refusal.reason]
    namespace, _, pool = refusal.key.owner.rpartition("/")
    limit = f"{field} of namespace {namespace} in pool {pool}" if namespace else f"{field} of pool {pool}"
    measure = refusal.key.measure
    message = f"{limit} allows {limit_text(measure, refusal.allowed)}"

    # 1. The limit is lower than the need: no end of others helps.
    if not refusal.could_ever_fit:
        return message, f"ask for less, or raise {field}" if refusal.allowed else f"raise {field}"
    # 2. It has room, which is kept for a unit ahead.
    if refusal.used + refusal.needed <= refusal.allowed:
        return f"{limit} has room, but a replica ahead waits for it", f"wait{or_raise_priority(unit)}"
    # 3. Others use it up. A unit of rank 0 has the highest priority already.
    is_one = measure == DEVICES and refusal.used == 1
    used = f"{amount_text(measure, refusal.used)} {'is' if is_one else 'are'} used"
    if unit.rank:
        return f"{message}, of which {used}", f"raise {field}, {ending}, or raise spec.priority"
    return f"{message}, of which {used}", f"raise {field}, or {ending}"


def _explain_limit(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that a limit of a pool or a quota keeps the unit out."""
    return describe_limit(cast("LimitRefusal", place.limit), place.unit)


def _explain_fit(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the cell has room, so that the unit gets it soon."""
    return f"the {place.cell.kind} has room", "wait for the next round"


def _explain_nomination(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the cell is held for the unit until its victims have ended."""
    number = len(place.unit.nomination.victims) if place.unit.nomination is not None else 0
    return f"held for it until {number} replica{' has' if number == 1 else 's have'} ended", ""


def _explain_head(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that a unit ahead waits for the cell.

    If the cell is reserved down to the lowest rank, a higher priority does not help.
    """
    closure = place.made.closed[place.cell.id]
    head = closure.head
    waiting = f"{head.key} of priority {head.priority} is ahead and waits for this {place.cell.kind}"
    if closure.rank == RESERVED:
        return f"{waiting}, where it may soon evict others", "wait"
    return waiting, f"wait{or_raise_priority(place.unit)}"


def _explain_kind(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the unit cannot run on such a cell: a pod on a host, or a process on a node."""
    needed = "nodes" if isinstance(place.unit.requirement, NodeRequirement) else "hosts"
    return f"a {place.unit.key.kind} runs on {needed}", f"let the service use a pool of {place.cell.kind}s"


def _explain_pool(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the cell is in a pool that the service does not use."""
    pool, pools = place.cell.pool, ", ".join(place.unit.pools)
    return f"pool {pool} is not among {pools}", f"let the service use pool {pool}"


def _explain_small(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the cell has too little of a resource even if nothing else runs there."""
    remedy = f"lower the need of {place.resource}, or add a larger {place.cell.kind}"
    return _describe_shortage(place, place.cell.total.get(place.resource, 0), "in all", remedy)


def _explain_shortage(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that too little of a resource is left on the cell."""
    unit, cell, name, made = place.unit, place.cell, place.resource, place.made
    # A node whose devices meet several claims admits one pod with a claim at a time (CLAIM_SLOT).
    if name == CLAIM_SLOT:
        return "the scheduler is about to choose the devices of an earlier claim there", "wait"
    left = max(0, made.left[cell.id].get(name, 0))
    lacking = _amount_text(name, largest_part(unit).get(name, 0) - left)
    raising = ", or raise spec.priority" if made.candidates.priority_helps(unit, {cell.id: cell}, made.left) else ""
    return _describe_shortage(place, left, "left", f"end replicas that hold {lacking} of {name} there{raising}")


def _describe_shortage(place: RefusedPlace, has: int, where: str, remedy: str) -> ReasonAndRemedy:
    """Return what is needed of a resource and what is there, with the remedy and that of an elastic pool."""
    name = place.resource
    needed = _amount_text(name, largest_part(place.unit).get(name, 0))
    elastic = place.rules.pools.get(place.cell.pool, PoolRules()).elastic
    if elastic > 0:
        remedy += f"; an autoscaler adds nodes for up to {elastic} replica{'' if elastic == 1 else 's'} at once"
    return f"{needed} of {name} needed, {_amount_text(name, has)} {where}", remedy


def _amount_text(name: str, amount: int) -> str:
    """Return an amount in words: bytes of memory as a size."""
    return size_text(amount) if name == MEMORY or "memory" in name else f"{amount}"


def _explain_shared(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that a replica with several devices cannot have shared ones."""
    demand = place.on_node.slices or SliceDemand(0)
    return f"{demand.number} slices of its shared devices may be of the same device", f"{_WHOLE}, or ask for one"


def _explain_slices(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that a slice (part) of a shared device has too little memory for the replica, or may have."""
    # `bytes_each`: memory that a replica takes of each device; None: unknown. `_WHOLE` advises to use whole devices.
    bytes_each = (place.on_node.slices or SliceDemand(0)).bytes_each
    if bytes_each is None:
        return "a slice of a shared device is no whole one, and how much the replica takes of it is unknown", _WHOLE
    sizes = f"{size_text(place.cell.slice_bytes or 0)}, and the replica takes {size_text(bytes_each)}"
    remedy = f"lower contextLength or parallel, {_WHOLE}, or raise memoryOvercommitPercent of pool {place.cell.pool}"
    return f"a slice of its shared devices has {sizes}", remedy


_WHOLE: Final = "use a node whose devices are not shared"


def _explain_node_rules(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that rules of the service refuse the node."""
    rules = "nodeSelector, affinity or tolerations of the service"
    return f"{rules} do not admit the node", f"change them, or labels and taints of {place.cell.name}"


def _explain_volume(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that a volume of the pod is on other nodes."""
    names = ", ".join(sorted(place.on_node.volume_nodes or ())) or "no node"
    return f"a volume of the pod is bound to {names}", "use a volume that is reachable from more nodes"


def _explain_runtime(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the host does not have the engine."""
    runtime = place.on_host.runtime
    return f"{runtime} is not installed there", f"install {runtime} on {place.cell.name}"


def _explain_namespace(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the host is given to other namespaces."""
    names = ", ".join(sorted(place.cell.namespaces))
    remedy = f"add {place.unit.key.namespace} to spec.namespaces of MetalHost {place.cell.name}"
    return f"the host is given to {names}", remedy


def _explain_label(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the host lacks labels that the service requires."""
    missing = [f"{key}={value}" for key, value in sorted(place.on_host.selector - place.cell.labels)]
    remedy = f"kubectl label metalhost {place.cell.name} {shlex.join(missing)}"
    return f"the host lacks {', '.join(missing)} of nodeSelector", remedy


def _explain_taint(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that a host has a taint that the service does not tolerate."""
    taint = find_untolerated(place.cell.taints, place.on_host.tolerations)
    key, text = (taint.key, taint.text) if taint is not None else ("", "")
    remedy = f"add it to spec.tolerations, or pomona host taint {place.cell.name} {key}-"
    return f"the service does not tolerate the taint {text}", remedy


def _name_class(place: RefusedPlace) -> str:
    """Return the device class of the cell for a sentence."""
    return f"device class {place.cell.device_class or 'unknown'} of the {place.cell.kind}"


def _explain_slow(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the replica would be slower there than the service demands."""
    speed = format_rate(place.unit.speeds.tokens_per_second.get(place.cell.device_class, 0.0))
    remedy = "lower spec.placement.minTokensPerSecond, or use a smaller quantization"
    return f"the replica has {speed} tokens/s on {_name_class(place)}", remedy


def _explain_unknown_speed(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the service demands a speed, and that of this device class is not known."""
    remedy = "remove spec.placement.minTokensPerSecond, or measure the speed: pomona bench"
    return f"the speed of the replica on {_name_class(place)} is unknown", remedy


def _explain_tight(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the replica would fit there less well than the service demands."""
    return f"the replica fits on {_name_class(place)} less well than minFit", "lower spec.placement.minFit"


def _explain_not_faster(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the cell is no better place for the successor of a slow replica."""
    least = f"{format_rate(place.unit.speeds.least)} tokens/s"
    return f"it replaces a slow replica, and {_name_class(place)} is not known to reach {least}", ""


def _explain_avoided(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that a predecessor was rejected there or had to leave."""
    return f"the {place.cell.kind} has rejected or displaced the replica before", "wait, or solve the cause there"


def _explain_closed(place: RefusedPlace) -> ReasonAndRemedy:
    """Explain that the cell takes no new unit, mostly in the words of the cell."""
    kind = place.cell.kind
    return place.cell.closed_message or f"the {kind} takes no new replica", f"open the {kind}"


_CLOSED: Final = Refusal("closed", 0, "take nothing new", _explain_closed)
REFUSALS: Final[Mapping[str, Refusal]] = {
    FITS: Refusal("ready", 0, "have room", _explain_fit),
    NOMINATED: Refusal("ready", 0, "are held for it until others have ended", _explain_nomination),
    HEAD_OF_LINE: Refusal("open", 1, "are kept for a replica ahead, which waits for more", _explain_head),
    AVOIDED: Refusal("open", 4, "have rejected or displaced the replica before", _explain_avoided),
    INSUFFICIENT: Refusal("short", 0, "have too little of a resource left", _explain_shortage),
    "Quota": Refusal("limited", 2, "are in a pool whose quota for the namespace is used up", _explain_limit),
    "Nominal": Refusal("limited", 2, "are in a pool that uses all of its nominal amount", _explain_limit),
    "Lending": Refusal("limited", 2, "are in a pool that lends no more", _explain_limit),
    "Borrowing": Refusal("limited", 2, "are in a pool from which its own pool borrows no more", _explain_limit),
    "OtherNamespace": Refusal("never", 3, "are not given to its namespace", _explain_namespace),
    "NodeRules": Refusal("never", 3, "do not match its nodeSelector, affinity or tolerations", _explain_node_rules),
    "LabelMissing": Refusal("never", 3, "lack a label of its nodeSelector", _explain_label),
    "Taint": Refusal("never", 3, "have taints that it does not tolerate", _explain_taint),
    "SharedDevices": Refusal(
        "never", 3, "have devices that pods share, of which it would need several", _explain_shared
    ),
    "SliceTooSmall": Refusal(
        "never", 3, "have devices that pods share, with too little memory for each", _explain_slices
    ),
    TOO_SLOW: Refusal("never", 3, "are slower than spec.placement.minTokensPerSecond", _explain_slow),
    SPEED_UNKNOWN: Refusal(
        "never",
        3,
        "have a speed that is unknown, and spec.placement.minTokensPerSecond is stated",
        _explain_unknown_speed,
    ),
    TOO_TIGHT: Refusal("never", 3, "fit it less well than spec.placement.minFit", _explain_tight),
    "RuntimeMissing": Refusal("never", 4, "lack its engine", _explain_runtime),
    "VolumeElsewhere": Refusal("never", 4, "cannot mount the volume of its weights", _explain_volume),
    NOT_FASTER: Refusal(
        "never", 4, "are not known to be faster than the slow replica that it replaces", _explain_not_faster
    ),
    TOO_SMALL: Refusal("elsewhere", 0, "have too little of a resource in all", _explain_small),
    OTHER_POOL: Refusal("elsewhere", 1, "are in a pool that the service does not use", _explain_pool),
    "OtherKind": Refusal("elsewhere", 2, "are of the other kind: pods run on nodes, processes on hosts", _explain_kind),
}
"""The rows by reason; of one meaning, the reasons that take more to end come later."""
