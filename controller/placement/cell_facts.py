"""The facts that a cell takes over from its node or host: its accelerator, resources, and why it takes no new unit."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from controller.placement.capacity import CORDONED, OPEN, Closure, HostCapacity
from controller.placement.cell_costs import read_cost
from controller.placement.pod_requests import count_allocatable
from controller.placement.units import Amounts
from devices.node_labels import DeviceShare, read_share
from devices.vendors import Vendors
from kube.client import Obj

NODE_NOT_READY: Final = "NodeNotReady"
HOST_LOST: Final = "HostLost"
SUSPECT: Final = "Suspect"
"""Reasons for which a cell is closed, beside those of `HostCapacity`."""

_CONDITION_TAINT: Final = "node.kubernetes.io/"
"""Prefix of taints that Kubernetes sets for the time of a condition, such as a full disk: no pod is placed there,
although the hardware exists."""
_CORDON_TAINT: Final = f"{_CONDITION_TAINT}unschedulable"


class NodeFacts(NamedTuple):
    """The parts of a node that its cell takes over."""

    accelerator: str
    """Empty: it has none."""
    total: Amounts
    closure: Closure
    node: Obj
    devices: frozenset[str] = frozenset()
    """The resources that count its devices, partitions included."""
    share: DeviceShare | None = None
    """The way in which pods share its devices; None: they do not."""
    cost: float | None = None
    """Its cost by the administrator; None: none is stated."""


def find_accelerator(node: Obj, vendors: Vendors) -> str:
    """Return the accelerator of a node; empty if it has none.

    A node whose devices are all sick, so that it offers 0 of the resource, still has the accelerator.
    """
    allocatable: Mapping[str, str] = node["status"]["allocatable"]  # amounts by resource, such as nvidia.com/gpu: 8
    sick_accelerator = ""  # the first one of which only sick devices are there
    for accelerator, vendor in vendors.items():
        for name, count in allocatable.items():
            if not vendor.offers(name):
                continue
            if count != "0":
                return accelerator
            sick_accelerator = sick_accelerator or accelerator
    return sick_accelerator


def find_node_closure(node: Obj) -> Closure:
    """Return why a node takes no new pods at the moment; OPEN if it does."""
    name = node["metadata"]["name"]
    # The store keeps no other condition than Ready.
    ready: Obj = (node["status"].get("conditions") or [{}])[0]
    if ready.get("status") != "True":
        cause = ready.get("message") or ready.get("reason") or "its kubelet has reported nothing yet"
        return Closure(NODE_NOT_READY, f"node {name} is not ready: {cause}")

    taints = _list_condition_taints(node)
    if node["spec"].get("unschedulable") or _CORDON_TAINT in taints:
        return Closure(CORDONED, f"node {name} is cordoned: kubectl uncordon {name}")
    return Closure(NODE_NOT_READY, f"node {name} has the taint {taints[0]}") if taints else OPEN


def find_host_closure(capacity: HostCapacity, *, is_alive: bool) -> Closure:
    """Return why a host takes no new processes at the moment; OPEN if it does."""
    name = capacity.host
    if not is_alive:
        return Closure(HOST_LOST, f"host {name} does not renew its Lease: see that its agent runs and has a network")
    return capacity.closure


def read_node(node: Obj, vendors: Vendors, claimable: str = "") -> NodeFacts:
    """Return the facts of a node that its cell is built from: what it has, whether it is closed, its rules for pods.

    Args:
        node: the node.
        vendors: the table of accelerators.
        claimable: the accelerator of its devices that pods get by a ResourceClaim; empty if there are none.
    """
    # 1. Reduce the node to its rules for pods. A taint that closes the cell for some time is no rule that holds for
    #    ever, so it is left out.
    taints = [taint for taint in node["spec"]["taints"] if not taint["key"].startswith(_CONDITION_TAINT)]
    labels = node["metadata"]["labels"]
    reduced_node = {"metadata": {"name": node["metadata"]["name"], "labels": labels}, "spec": {"taints": taints}}

    # 2. Read its resources, and why it takes no new pods, if so.
    total, closure = count_allocatable(node["status"]["allocatable"]), find_node_closure(node)
    accelerator = find_accelerator(node, vendors) or claimable
    if not accelerator:
        return NodeFacts(accelerator="", total=total, closure=closure, node=reduced_node)

    # 3. Add the facts that only a node with an accelerator has.
    devices = frozenset(filter(vendors[accelerator].offers, total))  # names of the resources that count devices
    # How several pods share one device, such as by time-slicing; None: a device is for one pod.
    share = read_share(accelerator, vendors[accelerator], labels)
    cost = read_cost(node["metadata"].get("annotations") or {})
    return NodeFacts(accelerator, total, closure, reduced_node, devices=devices, share=share, cost=cost)


def _list_condition_taints(node: Obj) -> list[str]:
    """Return the keys of the taints that Kubernetes sets for the time of a condition, and that keep pods away."""
    return [
        taint["key"]
        for taint in node["spec"]["taints"]
        if taint["key"].startswith(_CONDITION_TAINT) and taint.get("effect") != "PreferNoSchedule"
    ]
