"""The devices of a node as the labels of the vendors' labellers state them: their memory, and how pods share them."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from crds.acceleratorpool import WHOLE_PERCENT
from crds.size import MIB
from devices.products import find_product
from devices.vendors import Vendor

_PRODUCT: Final = re.compile(r"(?P<name>.*?)(-MIG-(?P<partition>.+?))?(-SHARED)?")
"""Value of a product label, of which GPU feature discovery makes names of partitions and shared devices."""


def read_device_mib(accelerator: str, vendor: Vendor, labels: Mapping[str, str]) -> int | None:
    """Return the memory of each device of a node by its labels, in MiB; None if they do not state it.

    The value of the vendor's memory label is a number of MiB, or one of the texts that `memory_values` lists, such as
    64G. Without this label, the memory is that of the product, if the table of products lists it.
    """
    value = labels.get(vendor.memory_label or "", "")
    if not value:
        product = find_product(accelerator, labels.get(vendor.product_label or "", ""))
        return product.memory_mib if product else None
    # memory_values: the MiB of each text that the label may have; another text is unknown
    if vendor.memory_values:
        return vendor.memory_values.get(value)
    return int(value) if re.fullmatch(r"[0-9]{1,15}", value) else None


class LabelledProduct(NamedTuple):
    """The product that a label names."""

    name: str
    partition: str
    """The partition that each device of the node is, such as the MIG profile 1g.10gb; empty: whole devices."""


def read_product(vendor: Vendor, labels: Mapping[str, str]) -> LabelledProduct:
    """Return the product of the devices of a node by its labels; its name is empty if they state none."""
    match = _PRODUCT.fullmatch(labels.get(vendor.product_label or "", ""))
    return LabelledProduct(match["name"], match["partition"] or "") if match else LabelledProduct("", "")


class DeviceShare(NamedTuple):
    """The devices of a node of which several pods get the same one."""

    memory_mib: int
    """Memory of a whole device; 0: unknown."""
    pods: int
    """Pods that share each device."""
    is_limited: bool
    """No pod can take more than its share."""

    def count_bytes(self, percent: int) -> int:
        """Return the memory for each pod, if all together may take a percentage of that of the device.

        Shares that are limited take the whole device, whatever the percentage.
        """
        usable_percent = WHOLE_PERCENT if self.is_limited else percent
        return self.memory_mib * usable_percent // WHOLE_PERCENT // self.pods * MIB


def read_share(accelerator: str, vendor: Vendor, labels: Mapping[str, str]) -> DeviceShare | None:
    """Return how pods share the devices of a node by its labels; None: each device is for one pod.

    Devices are shared if a label names a strategy of sharing, such as time-slicing, or states several pods for each
    device. Without that number, `memory_mib` is 0, since a share may be of any size.
    """
    # The value of the vendor's label for sharing, and the number of pods for each device, as its labeller states them.
    strategy, replicas = labels.get(vendor.shared_label or "", ""), labels.get(vendor.replicas_label or "", "")
    pods = int(replicas) if replicas.isascii() and replicas.isdecimal() else 0
    is_shared = strategy in vendor.shared_values or pods > 1
    if not is_shared:
        return None
    memory_mib = read_device_mib(accelerator, vendor, labels) if pods else None
    return DeviceShare(memory_mib=memory_mib or 0, pods=max(1, pods), is_limited=strategy in vendor.limited_values)
