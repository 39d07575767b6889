"""Devices as the labels of other labellers state them, for nodes where neither a tool nor the kernel answers.

GPU feature discovery, AMD's labeller, Intel's plugins and node feature discovery state product and memory, but nothing
that changes: free memory, utilization and temperature stay unknown. The keys of product and memory are those of the
table of vendors.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

from msgspec.structs import replace

from crds.nodefitness import MOST_DEVICES, NodeDevice
from crds.size import MIB
from devices.node.checked_values import check_bytes, clean_text, parse_number
from devices.node.intel import INTEL_CARDS
from devices.node.nvidia import format_architecture
from devices.node.vendor_reading import VENDOR_NAMES, NodeVendor, VendorReading
from devices.node_labels import read_device_mib, read_product
from devices.products import find_product
from devices.vendors import VENDORS

Labels = Mapping[str, str]
_GAUDI: Final = ("intel.feature.node.kubernetes.io/gaudi", "habana.ai/gaudi")
_AMD_COUNT: Final = re.compile(r"(?:beta\.)?amd\.com/gpu\.(?:device-id|product-name|vram)\.\S+")
_INTEL_COUNT: Final = re.compile(r"gpu\.intel\.com/device-id\.[0-9a-f]{4}-(?P<device_id>[0-9a-f]{4})\.count")


def read_labels(labels: Labels) -> VendorReading | None:
    """Return the devices that labels of a Node state; None if no labeller states any."""
    readers: tuple[Callable[[Labels], VendorReading | None], ...] = (_read_nvidia, _read_amd, _read_gaudi, _read_intel)
    return next((reading for read in readers if (reading := read(labels))), None)


def _read_nvidia(labels: Labels) -> VendorReading | None:
    """Return the devices that GPU feature discovery, NVIDIA's labeller, states; None if it states no product.

    What no label states comes from the table of products; a partition has not the memory of its product.
    """
    name, partition = read_product(VENDORS["nvidia"], labels)
    if not name:
        return None
    product = find_product("nvidia", name)

    # The compute capability, such as 9.0, from which the architecture sm_90 follows; "listed" is what the table of
    # products states.
    capability = f"{labels.get('nvidia.com/gpu.compute.major', '')}.{labels.get('nvidia.com/gpu.compute.minor', '')}"
    listed_capability = product.capability if product else ""
    listed_bytes = product.memory_bytes if product and not partition else None
    device = NodeDevice(
        id="",
        product=clean_text(name),
        architecture=format_architecture(capability) or format_architecture(listed_capability),
        partition=clean_text(partition),
        memory_bytes=_read_memory_bytes("nvidia", labels) or listed_bytes,
    )

    # The version of the driver is one label, or one for each of its parts.
    parts = [labels.get(f"nvidia.com/cuda.driver.{key}", "") for key in ("major", "minor", "rev")]
    driver = labels.get("nvidia.com/cuda.driver-version.full", "") or ".".join(part for part in parts if part)
    return _build_reading("nvidia", device, parse_number(labels.get("nvidia.com/gpu.count", "")), driver)


def _read_amd(labels: Labels) -> VendorReading | None:
    """Return the devices that AMD's labeller states; None if it states neither product nor device id.

    What no label states comes from the table of products.
    """
    stated_name = clean_text(labels.get(VENDORS["amd"].product_label or "", ""))
    device_id = labels.get("amd.com/gpu.device-id", "") or labels.get("beta.amd.com/gpu.device-id", "")
    if not stated_name and not device_id:
        return None

    product = find_product("amd", device_id) or find_product("amd", stated_name)
    device = NodeDevice(
        id="",
        product=stated_name or (product.name if product else clean_text(f"AMD {device_id}")),
        architecture=product.capability if product else "",
        memory_bytes=_read_memory_bytes("amd", labels) or (product.memory_bytes if product else None),
    )

    # The labeller writes each fact twice: amd.com/gpu.vram=64G, and amd.com/gpu.vram.64G=8 for 8 devices with it. The
    # largest of these numbers is the number of devices. _AMD_COUNT matches the second form.
    counts = [parse_number(value) for key, value in labels.items() if _AMD_COUNT.fullmatch(key)]
    count = max((amount for amount in counts if amount), default=None)
    return _build_reading("amd", device, count, labels.get("amd.com/gpu.driver-version", ""))


def _read_gaudi(labels: Labels) -> VendorReading | None:
    """Return a device if node feature discovery has seen Gaudi cards; no label states more of them."""
    if not any(labels.get(key) == "true" for key in _GAUDI):
        return None
    return _build_reading("intel-gaudi", NodeDevice(id="", product="Gaudi"), count=None, driver="")


def _read_intel(labels: Labels) -> VendorReading | None:
    """Return the cards that Intel's device plugins count in a label with their PCI id; None if no label does."""
    for key, value in labels.items():
        # _INTEL_COUNT: a label such as gpu.intel.com/device-id.0380-56c0.count; the digits before .count are the device
        # id
        match = _INTEL_COUNT.fullmatch(key)
        # The plugins label integrated GPUs as well, which are no devices of a node.
        if match and match["device_id"] in INTEL_CARDS:
            device = NodeDevice(id="", product=INTEL_CARDS[match["device_id"]])
            return _build_reading("intel", device, count=parse_number(value), driver="")
    return None


def _read_memory_bytes(vendor: NodeVendor, labels: Labels) -> int | None:
    """Return the memory of each device by the labels; None if they state none, or more than a machine can have."""
    mib = read_device_mib(vendor, VENDORS[vendor], labels)
    return check_bytes(mib * MIB) if mib else None


def _build_reading(vendor: NodeVendor, device: NodeDevice, count: int | None, driver: str) -> VendorReading:
    """Return the reading of a node with this number of equal devices, which get their product and a number as ids.

    If the number is unknown, or cannot be right, one device is reported, with a problem that says so.
    """
    problems = []
    if count is None or not 0 < count <= 1 << 16:
        problems.append(
            f"no label states how many devices of {VENDOR_NAMES[vendor]} the node has, so one is reported: "
            "give the node agent the vendor's tool, or see what the device plugin allocates"
        )
        count = 1

    # An id is the product and a number, cut to its last 64 characters, so that the number stays.
    name = device.product.lower().replace(" ", "-")
    # Up to one more than can be reported: `choose_reading` then leaves it out, and reports a problem.
    devices = tuple(replace(device, id=f"{name}-{index}"[-64:]) for index in range(min(count, MOST_DEVICES + 1)))
    return VendorReading(vendor, "labels", devices=devices, driver=clean_text(driver), problems=tuple(problems))
