"""The devices of ResourceSlices: which of them a claim may get on each node, and which are allocated.

An event costs as much as its node has devices, whatever the size of the cluster. A device is free if no ResourceClaim
has it, also none of others. Between the admission of a pod and its allocation nobody knows which devices it gets, so
until then its node gives no claim to a need that might want the same ones: see CLAIM_SLOT.
"""

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from controller.placement.device_need import DeviceNeed, any_device, decode_need
from controller.placement.pod_requests import find_taken_node, is_noted
from controller.placement.units import CLAIM_SLOT, NOTHING, Amounts, Unit
from controller.reconcile.indexes import discard_from_index
from crds.meta import DEVICE_NEED, LABEL_MANAGED_BY, MANAGED_BY
from devices.vendors import Vendors
from kube.client import Obj
from kube.kinds import Device, ResourceClaim, ResourceSlice, SliceSpec
from kube.resources import ObjectKey, object_key

_WHOLE: Final = "/devices"
"""End of the name with which whole devices of a driver are counted for pools, each once."""
_BLOCKING_TAINTS: Final = frozenset({"NoSchedule", "NoExecute"})


class DeviceId(NamedTuple):
    """Identity of a device in the cluster."""

    driver: str
    pool: str
    name: str


class _PoolKey(NamedTuple):
    driver: str
    pool: str


class _ClaimableAccelerator(NamedTuple):
    """The accelerator whose devices a driver offers."""

    name: str
    whole_device: DeviceNeed
    """The need that each whole device of the driver meets."""


class _ClaimingPod(NamedTuple):
    """A pod of ours that claims devices and has a node."""

    node: str
    need: str
    number: int


class _AllocatedClaim(NamedTuple):
    """A ResourceClaim whose devices are chosen."""

    pod: str
    """uid of the pod for which it was made; empty if it was made for none."""
    devices: tuple[DeviceId, ...]
    is_ours: bool
    """It has our label."""


def find_need(pod: Obj) -> DeviceNeed | None:
    """Return the devices that a pod of ours claims; None if it claims none."""
    text = (pod["metadata"].get("annotations") or {}).get(DEVICE_NEED)
    return decode_need(text) if text else None


def count_need(pod: Obj, *, is_waiting: bool) -> Amounts:
    """Return the devices that a pod claims as amounts of a cell, by name of the need; nothing if it claims none.

    The name stands for a resource. A pod that waits also needs the node's claim slot, since only one pod at a time is
    admitted to a node whose devices meet several needs: see CLAIM_SLOT in `units`.
    """
    need = find_need(pod)
    if need is None:
        return NOTHING
    return {need.name: need.number} | ({CLAIM_SLOT: 1} if is_waiting else {})


def is_whole(name: str) -> bool:
    """Return whether a name stands for all whole devices of a driver, each of which it counts once."""
    return name.endswith(_WHOLE)


class DeviceRegistry:
    """All devices of known drivers; each method that takes a change returns the nodes that it concerns.

    Args:
        vendors: the table of accelerators, which names the drivers.
    """

    def __init__(self, vendors: Vendors) -> None:
        """Start without devices; `take_slice`, `take_claim` and `take_pod` bring them in.

        A need is what a claim asks of each device, such as a least memory. Several needs may be met by one device. A
        pool (`_PoolKey`: driver and name) is a set of ResourceSlices of one driver.
        """
        self._accelerators = {
            vendor.driver.name: _ClaimableAccelerator(name, any_device(vendor.driver))
            for name, vendor in vendors.items()
            if vendor.driver is not None
        }
        """By name of the driver."""

        # The devices, as slices list them.
        self._slices: dict[_PoolKey, dict[str, ResourceSlice]] = {}
        """Slices of each pool by name."""
        self._devices: dict[_PoolKey, Mapping[str, Mapping[DeviceId, Device]]] = {}
        """Devices of each pool by node."""
        self._pools_on_node: dict[str, dict[_PoolKey, None]] = {}
        """By node, the pools with devices there."""
        self._node_of_device: dict[DeviceId, str] = {}

        # Who has devices: claims, and the pods for which they were made.
        self._claims: dict[ObjectKey, _AllocatedClaim] = {}
        """Claims of all pods, also of others, that have devices."""
        self._claims_of_device: dict[DeviceId, set[ObjectKey]] = {}
        self._claim_of_pod: dict[str, ObjectKey] = {}
        """By uid of the pod."""
        self._our_pods: dict[str, _ClaimingPod] = {}
        """Pods of ours that claim devices and have a node, by uid."""
        self._pods_on_node: dict[str, set[str]] = {}
        """By node, the uids of these pods."""

        # The needs of our pods, and the devices that meet them.
        self._needs: dict[str, DeviceNeed] = {}
        """Needs of pods of ours that exist, by name."""
        self._uids_by_need: dict[str, set[str]] = {}
        """uids of the pods that have a need, by its name."""
        self._need_of_pod: dict[str, str] = {}
        """Name of its need, by uid of the pod."""
        self._matching_devices: dict[str, dict[str, frozenset[DeviceId]]] = {}
        """By node, then by name of the need; found anew after a change of slices."""

    def take_slice(self, old: Obj | None, new: Obj | None) -> set[str]:
        """Note a change of a ResourceSlice; return the nodes that have, or had, devices of its pool."""
        nodes: set[str] = set()
        # First take out the old version, then put in the new one: its pool may be another.
        for obj in (old, new):
            if obj is None or obj["spec"]["driver"] not in self._accelerators:
                continue

            changed = msgspec.convert(obj, ResourceSlice)
            key = _PoolKey(changed.spec.driver, changed.spec.pool.name)
            slices = self._slices.setdefault(key, {})
            if obj is new:
                slices[changed.metadata.name] = changed
            else:
                slices.pop(changed.metadata.name, None)
            nodes |= self._locate_devices(key)

        for node in nodes:
            # Which devices there meet which needs is found anew when it is asked for.
            self._matching_devices.pop(node, None)
        return nodes

    def _locate_devices(self, key: _PoolKey) -> set[str]:
        """Find anew on which nodes the devices of a pool are; return the nodes that have, or had, one of them.

        A pool here is a set of ResourceSlices of one driver.
        """
        # 1. Forget all of its devices.
        devices_before = self._devices.pop(key, {})
        for node, devices in devices_before.items():
            del self._pools_on_node[node][key]
            for device_id in devices:
                del self._node_of_device[device_id]

        # 2. Sort the devices that its slices have now by node.
        by_node: dict[str, dict[DeviceId, Device]] = {}
        for spec, device in _list_devices(self._slices[key].values()):
            # A device that is not on a single node, such as one in the network, is left to the scheduler.
            if node_name := spec.node_name or device.node_name:
                by_node.setdefault(node_name, {})[DeviceId(*key, device.name)] = device

        # 3. Note them.
        if by_node:
            self._devices[key] = by_node
        if not self._slices[key]:
            del self._slices[key]
        for node, devices in by_node.items():
            self._pools_on_node.setdefault(node, {})[key] = None
            self._node_of_device |= dict.fromkeys(devices, node)
        return {*devices_before, *by_node}

    def take_claim(self, old: Obj | None, new: Obj | None) -> set[str]:
        """Note a change of any ResourceClaim, also of others; return the nodes of the devices that it has or had."""
        obj = new or old
        if obj is None:
            return set()

        # 1. Forget what the claim had.
        key = object_key(obj)
        nodes = set[str]()
        if (allocated_claim := self._claims.pop(key, None)) is not None:
            nodes |= self._list_nodes_of(allocated_claim)
            for device in allocated_claim.devices:
                discard_from_index(self._claims_of_device, device, key)
            if self._claim_of_pod.get(allocated_claim.pod) == key:
                del self._claim_of_pod[allocated_claim.pod]

        # 2. Note what it has now.
        claim = _read_claim(new) if new is not None else None
        if claim is None:
            return nodes
        self._claims[key] = claim
        for device in claim.devices:
            self._claims_of_device.setdefault(device, set()).add(key)
        if claim.pod:
            self._claim_of_pod[claim.pod] = key
        return nodes | self._list_nodes_of(claim)

    def _list_nodes_of(self, claim: _AllocatedClaim) -> set[str]:
        """Return the nodes of the devices that a claim has, as far as these are known."""
        return {node for device in claim.devices if (node := self._node_of_device.get(device)) is not None}

    def take_pod(self, pod: Obj, *, is_gone: bool) -> set[str]:
        """Note that a pod of ours has come, changed or gone; return the nodes whose counts of devices may change.

        These are the node of the pod, and, if its need is new or the last of its kind has gone, all nodes of the
        driver.
        """
        # 1. Note its need.
        uid: str = pod["metadata"]["uid"]
        need = None if is_gone else find_need(pod)
        nodes = self._take_need(uid, need)

        # 2. Take it from the node where it was.
        if (claiming_pod := self._our_pods.pop(uid, None)) is not None:
            self._pods_on_node[claiming_pod.node].discard(uid)
            nodes.add(claiming_pod.node)

        # 3. Put it on the node where it is. Tenants make pods with the labels and annotations of ours, but only the
        #    queue notes places (`is_noted`: the pod is annotated with its queue place).
        node = find_taken_node(pod) if need is not None and is_noted(pod) else ""
        if need is not None and node:
            self._our_pods[uid] = _ClaimingPod(node, need.name, need.number)
            self._pods_on_node.setdefault(node, set()).add(uid)
            nodes.add(node)
        return nodes

    def _take_need(self, uid: str, need: DeviceNeed | None) -> set[str]:
        """Note the need of a pod, or None if it has none any more; return the nodes whose counts change.

        These are all nodes of the driver, if the need is new or no pod has the earlier one any more.
        """
        name = need.name if need is not None else ""
        before = self._need_of_pod.get(uid, "")
        if before == name:
            return set()

        changed = list[DeviceNeed]()  # needs that are new or gone
        # 1. Take its earlier need from it; forget the need itself with its last pod.
        if before:
            self._uids_by_need[before].discard(uid)
            if not self._uids_by_need[before]:
                del self._uids_by_need[before]
                changed.append(self._needs.pop(before))
            del self._need_of_pod[uid]

        # 2. Note the new one.
        if need is not None:
            self._need_of_pod[uid] = name
            if name not in self._needs:
                self._needs[name] = need
                changed.append(need)
            self._uids_by_need.setdefault(name, set()).add(uid)

        return {node for device_need in changed for node in self._match_need(device_need)}

    def _match_need(self, need: DeviceNeed) -> set[str]:
        """Match all devices of its driver with a need that is new, or forget one that is gone; return their nodes.

        Whether it is new or gone is seen from `_needs`. The need for a whole device is always counted. No other need is
        matched anew: that would take as long as there are needs and devices.
        """
        if need.driver not in self._accelerators:
            return set()

        name = need.name
        is_counted = name in self._needs or name == self._accelerators[need.driver].whole_device.name
        nodes = {node for key in self._devices if key.driver == need.driver for node in self._devices[key]}

        # All other nodes are matched when they are asked for.
        for node in nodes & self._matching_devices.keys():
            if is_counted:
                self._matching_devices[node][name] = self._list_matching(node, need)
            else:
                del self._matching_devices[node][name]
        return nodes

    def find_accelerator(self, node: str) -> str:
        """Return the accelerator of the devices that may be claimed on a node; empty if there are none."""
        return next((self._accelerators[key.driver].name for key in self._pools_on_node.get(node, ())), "")

    def count_room(self, node: str) -> tuple[Amounts, Amounts]:
        """Return the devices of a node in all, and the free ones, as amounts.

        The amounts are numbers of devices by name of each need that they meet, and of whole devices by driver.
        Subtracted are devices of claims, and those for which a pod is admitted but not allocated yet, whichever these
        will be. While such a pod exists on a node where needs overlap, the node's one CLAIM_SLOT is taken, so that no
        other pod that claims devices is admitted there.
        """
        matching = self._find_matching(node)  # devices by name of the need
        if not matching:
            return NOTHING, NOTHING
        free_devices = self._list_free(node)

        # Pods that are admitted here, while their claims have no devices yet; what they reserve, by name of the need.
        pending = [self._our_pods[uid] for uid in self._pods_on_node.get(node, ()) if uid not in self._claim_of_pod]
        reserved_for = Counter[str]()
        for pod in pending:
            reserved_for[pod.need] += pod.number

        total, free = {}, {}
        # 1. By name of the need; most needs are met by the same devices, which are compared once.
        free_numbers = {devices: len(devices & free_devices) for devices in set(matching.values())}
        for name, devices in matching.items():
            total[name] = len(devices)
            free[name] = free_numbers[devices] - reserved_for.get(name, 0)

        # 2. By driver: its whole devices, each counted once, from which any pending pod of the driver takes.
        for driver in {key.driver for key in self._pools_on_node[node]}:
            whole_devices = matching[self._accelerators[driver].whole_device.name]
            total[f"{driver}{_WHOLE}"] = len(whole_devices)
            free[f"{driver}{_WHOLE}"] = len(whole_devices & free_devices) - self._sum_pending(pending, driver)

        # 3. One pod at a time, if different needs may get the same device.
        if self._has_overlap(matching):
            total[CLAIM_SLOT] = 1
            free[CLAIM_SLOT] = 0 if pending else 1
        return total, free

    def _sum_pending(self, pending: Iterable[_ClaimingPod], driver: str) -> int:
        """Return the devices of a driver that pods without an allocation get."""
        return sum(pod.number for pod in pending if self._needs[pod.need].driver == driver)

    def _has_overlap(self, matching: Mapping[str, frozenset[DeviceId]]) -> bool:
        """Return whether pods with different needs might get the same device."""
        matched_before = set[DeviceId]()
        for name in self._needs:
            devices = matching.get(name, frozenset[DeviceId]())
            if not matched_before.isdisjoint(devices):
                return True
            matched_before |= devices
        return False

    def add_freed(self, unit: Unit) -> Unit:
        """Return a unit with the amounts that its end frees beyond its own parts.

        A device that it has claimed may also meet needs of other units, and is counted for each of them. A unit that
        ends frees the claim slot as well. Units that wait, or that claim nothing, are returned as they are.
        """
        pod = self._our_pods.get(unit.uid) if unit.state != "waiting" else None
        if pod is None:
            return unit

        freed = {CLAIM_SLOT: 1} if unit.state == "ending" else {}
        claim_key = self._claim_of_pod.get(unit.uid)  # None: its devices are not chosen yet
        if claim_key is not None:
            claimed_devices = self._claims[claim_key].devices
            for name, devices in self._find_matching(pod.node).items():
                amount = len(devices.intersection(claimed_devices))
                # What it frees of its own need is in its parts already.
                if amount and name != pod.need:
                    freed[name] = amount

        return msgspec.structs.replace(unit, freed_beside=freed) if freed else unit

    def _find_matching(self, node: str) -> Mapping[str, frozenset[DeviceId]]:
        """Return the devices of a node by the name of each need that they meet; kept until its slices change.

        The needs are those of our pods, and for each driver that for any whole device.
        """
        pools = self._pools_on_node.get(node)
        if not pools:
            return {}

        matching = self._matching_devices.get(node)
        if matching is None:
            matching = self._matching_devices[node] = {}
            drivers = {key.driver for key in pools}
            whole_devices = {need.name: need for need in (self._accelerators[name].whole_device for name in drivers)}
            for name, need in (whole_devices | self._needs).items():
                if need.driver in drivers:
                    matching[name] = self._list_matching(node, need)
        return matching

    def _list_matching(self, node: str, need: DeviceNeed) -> frozenset[DeviceId]:
        """Return the devices of a node that meet a need; equal sets are the same object (`_share`)."""
        return _share(
            frozenset(
                device_id
                for key in self._pools_on_node[node]
                if key.driver == need.driver
                for device_id, device in self._devices[key][node].items()
                if need.matches(device)
            )
        )

    def _list_free(self, node: str) -> frozenset[DeviceId]:
        """Return the devices of a node that are free.

        A device is not free if a claim has it, or if it shares its chip with an allocated partition: both then take
        from the same set of counters.
        """
        free: set[DeviceId] = set()
        for key in self._pools_on_node[node]:
            devices = self._devices[key][node]
            taken = {device_id for device_id in devices if self._is_taken(device_id)}

            # The sets of counters, each of a chip, from which taken devices take something.
            parts = {part for device_id in taken for part in _list_parts(devices[device_id])}
            free |= {
                device_id
                for device_id, device in devices.items()
                if device_id not in taken and parts.isdisjoint(_list_parts(device))
            }
        return frozenset(free)

    def _is_taken(self, device: DeviceId) -> bool:
        """Return whether a claim has a device; that of a pod of ours has it until the pod is gone."""
        claims = (self._claims[key] for key in self._claims_of_device.get(device, ()))
        return any(not claim.is_ours or claim.pod in self._our_pods for claim in claims)


@functools.lru_cache(maxsize=16384)
def _share(devices: frozenset[DeviceId]) -> frozenset[DeviceId]:
    """Return the object that equal sets share: most needs are met by the same devices, and those are counted once."""
    return devices


def _list_devices(slices: Collection[ResourceSlice]) -> list[tuple[SliceSpec, Device]]:
    """Return the devices of a pool, each with its slice; none while the driver has not written all slices of it.

    A device with a taint is left out: no claim of ours tolerates one.
    """
    # Slices of an earlier generation are outdated; each of the latest says how many of these there are.
    latest = max((resource_slice.spec.pool.generation for resource_slice in slices), default=0)
    current = [resource_slice.spec for resource_slice in slices if resource_slice.spec.pool.generation == latest]
    if not current or len(current) != current[0].pool.resource_slice_count:
        return []
    return [
        (spec, device)
        for spec in current
        for device in spec.devices
        if not any(taint.effect in _BLOCKING_TAINTS for taint in device.taints)
    ]


def _list_parts(device: Device) -> set[str]:
    """Return the sets of counters from which a device takes something: it shares a chip with others that do."""
    return {counter.counter_set for counter in device.consumes_counters}


def _read_claim(obj: Obj) -> _AllocatedClaim | None:
    """Return a claim that has devices, or None; those with admin access do not count: it only looks at them."""
    claim = msgspec.convert(obj, ResourceClaim)
    devices = tuple(
        DeviceId(result.driver, result.pool, result.device)
        for result in claim.status.allocation.devices.results
        if not result.admin_access
    )
    pod = next((owner.uid for owner in claim.metadata.owner_references if owner.kind == "Pod"), "")
    is_ours = claim.metadata.labels.get(LABEL_MANAGED_BY) == MANAGED_BY
    return _AllocatedClaim(pod, devices, is_ours) if devices else None
