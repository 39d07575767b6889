"""The nodes in the store: the part of each that is kept, and the devices and memory that exist on any of them.

Of each node only labels, taints, allocatable resources and the condition Ready are kept, and an index of devices: a
message about a service reads the few sizes that exist, however many nodes there are.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from controller.placement.pod_requests import count_allocatable
from controller.placement.units import CPU, MEMORY
from crds.acceleratorpool import WHOLE_PERCENT
from crds.meta import COST
from crds.size import GIB, MIB
from devices.node_labels import DeviceShare, read_device_mib, read_share
from devices.vendors import Vendor, Vendors
from kube.client import Obj
from kube.resources import ACCELERATOR_POOLS, NODES
from kube.store import Store

_OF_TAINT: Final = ("key", "value", "effect")
_OF_CONDITION: Final = ("type", "status", "reason", "message")
_OF_READY: Final = frozenset({"type", "status"})
_DEVICE_INDEX: Final = "device"
"""From `ACCELERATOR=MIB`, or `ACCELERATOR=MIB/PODS` if pods share a device, to the nodes that have such devices; MIB is
empty if a node does not state it."""


def declare_nodes(store: Store, vendors: Vendors) -> None:
    """Keep a part of each node in the store (`reduce`), and index nodes by the sizes of their devices and memory."""

    def reduce(node: Obj) -> Obj:
        """Return the part of a node that the store keeps; the store calls this for each node that it gets."""
        metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}

        # `_OF_TAINT`: key, value and effect, but not the time since when the taint is there.
        taints = [{name: taint[name] for name in _OF_TAINT if name in taint} for taint in spec.get("taints") or ()]

        # Of the annotations, only that by which the administrator states the cost of the node.
        cost = (metadata.get("annotations") or {}).get(COST)
        annotations = {"annotations": {COST: cost}} if cost else {}

        return {
            "metadata": {
                "name": metadata["name"],
                "uid": metadata.get("uid", ""),
                "resourceVersion": metadata.get("resourceVersion", ""),
                "labels": metadata.get("labels") or {},
                **annotations,
            },
            "spec": {"taints": taints, "unschedulable": bool(spec.get("unschedulable"))},
            "status": {"allocatable": status.get("allocatable") or {}, "conditions": _find_ready(status)},
        }

    store.set_reduction(NODES, reduce)
    store.add_index(NODES, _DEVICE_INDEX, _build_device_lister(vendors))


def read_sizes(node: Obj) -> object:
    """Return what `find_device_sizes` and `find_largest_memory` read of a node."""
    return node["metadata"]["labels"], node["status"]["allocatable"]


def _find_ready(status: Obj) -> list[Obj]:
    """Return a node's condition Ready, in a list, without the times that change with each heartbeat.

    Its reason and message are kept only while it is not True, since they are shown then only.
    """
    return [
        {
            name: condition[name]
            # `_OF_CONDITION`: type, status, reason and message. `_OF_READY`: type and status.
            for name in _OF_CONDITION
            if name in condition and (condition["status"] != "True" or name in _OF_READY)
        }
        for condition in status.get("conditions") or ()
        if condition["type"] == "Ready"
    ]


def _build_device_lister(vendors: Vendors) -> Callable[[Obj], list[str]]:
    """Return the function that lists a node's values in the index of devices."""

    def list_devices(node: Obj) -> list[str]:
        """Return `ACCELERATOR=SIZE` for each accelerator of which the node offers whole devices.

        Accelerators are the keys of `vendors`; SIZE is the text of `_describe_size`, which may be empty.
        """
        allocatable: dict[str, str] = node["status"]["allocatable"]
        labels: dict[str, str] = node["metadata"]["labels"]
        return [
            f"{accelerator}={_describe_size(accelerator, vendor, labels)}"
            for accelerator, vendor in vendors.items()
            # A node whose devices are all partitioned has no whole one left, although its labels tell their memory.
            if allocatable.get(vendor.resource or "", "0") != "0"
        ]

    return list_devices


def _describe_size(accelerator: str, vendor: Vendor, labels: dict[str, str]) -> str:
    """Return the memory of a node's devices as it is in the index; empty if it is unknown.

    `MIB` of a device that a pod has alone, or of the share of one if the vendor limits each pod to it; `MIB/PODS` if
    that many pods share a device without such a limit.
    """
    share = read_share(accelerator, vendor, labels)
    if share is None:
        mib = read_device_mib(accelerator, vendor, labels)
        return "" if mib is None else f"{mib}"
    # 0: the memory is not stated, or not among how many pods a device is shared.
    if not share.memory_mib:
        return ""
    return f"{share.memory_mib // share.pods}" if share.is_limited else f"{share.memory_mib}/{share.pods}"


class DeviceSizes(NamedTuple):
    """The memory of an accelerator's devices in the cluster."""

    smallest_bytes: int | None = None
    """The least that a node states; None: no node states it."""
    largest_bytes: int | None = None
    """None: no node has a device, or one does not state the memory of its devices, so that a larger one may exist."""


def find_device_sizes(store: Store, accelerator: str) -> DeviceSizes:
    """Return the least and the most memory that a pod may get of one device of an accelerator, on any node.

    A pod that shares a device gets a part, which a pool may overcommit: the highest percentage of all pools counts. The
    most is None if the memory of any device is unknown.
    """
    percent = _find_overcommit_percent(store, accelerator)
    # The index has values `ACCELERATOR=SIZE`; SIZE is empty for a node that does not state it.
    sizes = [
        value.partition("=")[2]
        for value in store.index_values(NODES, _DEVICE_INDEX)
        if value.partition("=")[0] == accelerator
    ]
    stated = [_read_size(size, percent) for size in sizes if size]
    largest = max(stated) if stated and all(sizes) else None  # with an empty size, a larger device may exist
    return DeviceSizes(smallest_bytes=min(stated, default=None), largest_bytes=largest)


def _find_overcommit_percent(store: Store, accelerator: str) -> int:
    """Return the most that any pool of an accelerator promises of a shared device's memory, at least 100."""
    specs = (pool["spec"] for pool in store.list(ACCELERATOR_POOLS))
    stated: list[int] = [spec.get("memoryOvercommitPercent", 0) for spec in specs if spec["accelerator"] == accelerator]
    return max((WHOLE_PERCENT, *stated))


def _read_size(text: str, percent: int) -> int:
    """Return the bytes that a pod may take of a device, by its size in the index: `MIB`, or `MIB/PODS` if shared.

    Args:
        text: the size.
        percent: how much of a shared device's memory pods may take together.
    """
    mib, _, pods = text.partition("/")
    if not pods:
        return int(mib) * MIB
    # Only shares without a limit for each pod have the form `MIB/PODS`: the percentage counts for these.
    return DeviceShare(int(mib), int(pods), is_limited=False).count_bytes(percent)


def find_largest_memory(store: Store) -> int | None:
    """Return the largest allocatable memory of a node, rounded down to GiB, in bytes; None: no node is known."""
    return store.summarize(
        (NODES,), "largest memory", lambda: max((_read_memory(node) for node in store.list(NODES)), default=None)
    )


def _read_memory(node: Obj) -> int:
    return count_allocatable(node["status"]["allocatable"]).get(MEMORY, 0) // GIB * GIB


class NodeSize(NamedTuple):
    """The memory of one device of a node, and what the node has for it; without devices, what the node has in all."""

    device_bytes: int | None
    """Memory that a pod may get of one device; None: unknown."""
    memory_bytes: int
    """Allocatable memory, rounded down to GiB: an equal part for each device."""
    millicores: int
    """Allocatable CPU: an equal part for each device."""


def list_node_sizes(store: Store, accelerator: str, vendor: Vendor, admits: Callable[[Obj], bool]) -> set[NodeSize]:
    """Return the different sizes of the nodes that are admitted, of those with devices if the vendor has some."""
    percent = _find_overcommit_percent(store, accelerator)

    def read_size(node: Obj) -> NodeSize | None:
        amounts = count_allocatable(node["status"]["allocatable"])
        count = amounts.get(vendor.resource, 0) if vendor.resource is not None else 1
        if not count:
            return None
        text = _describe_size(accelerator, vendor, node["metadata"]["labels"])
        device_bytes = _read_size(text, percent) if text else None
        return NodeSize(device_bytes, amounts.get(MEMORY, 0) // GIB * GIB // count, amounts.get(CPU, 0) // count)

    sizes = (
        store.derive(NODES, node, f"size for {accelerator} {percent}", partial(read_size, node))
        for node in store.list(NODES)
        if admits(node)
    )
    return {size for size in sizes if size is not None}
