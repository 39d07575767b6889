"""The probe of Intel's graphics cards, by the files of the kernel's drivers i915 and xe.

An integrated GPU is no device of a node: it computes in the memory of the machine, which the processor's facts state
already. A card has memory of its own and is not at 0000:00:02.0, where every integrated GPU is.
"""

from pathlib import Path
from typing import Final

from crds.nodefitness import NodeDevice
from devices.node import kernel_files
from devices.node.checked_values import check_bytes, clean_text, parse_size_bytes
from devices.node.vendor_reading import VendorReading
from devices.proc import read_limited

_VENDOR_ID: Final = "8086"
_INTEGRATED: Final = "0000:00:02.0"
INTEL_CARDS: Final = {
    "56a0": "Arc A770",
    "56a1": "Arc A750",
    "56c0": "Data Center GPU Flex 170",
    "56c1": "Data Center GPU Flex 140",
    "0bd5": "Data Center GPU Max 1550",
    "0bda": "Data Center GPU Max 1100",
    "e20b": "Arc B580",
    "e20c": "Arc B570",
    "e211": "Arc Pro B60",
    "e212": "Arc Pro B50",
}
"""Names by PCI device id, as in the public list of PCI ids: the drivers state no name."""


def read_intel(sys: Path, proc: Path) -> VendorReading | None:
    """Read Intel's graphics cards from the kernel's files, without the integrated GPU; None if the node has none.

    A card whose driver does not state its memory is a problem, too.
    """
    # _INTEGRATED: the PCI address of Intel's integrated GPU
    cards = [card for card in kernel_files.list_cards(sys, _VENDOR_ID) if card.address != _INTEGRATED]
    if not cards:
        return None

    devices = tuple(_read_device(card) for card in cards)
    problems = tuple(
        f"the driver {card.driver or 'of no name'} does not state the memory of the graphics card {card.address}: "
        "use the driver xe, or an i915 that has lmem_total_bytes"
        for card, device in zip(cards, devices, strict=True)
        if device.memory_bytes is None
    )
    driver = kernel_files.read_driver_version(sys, proc, cards[0].driver)
    return VendorReading("intel", "sysfs", devices=devices, driver=driver, problems=problems)


def _read_device(card: kernel_files.DrmCard) -> NodeDevice:
    """Return the device of a card."""
    return NodeDevice(
        id=card.address,
        product=INTEL_CARDS.get(card.device_id) or clean_text(f"Intel {card.device_id}"),
        memory_bytes=_read_memory_bytes(card),
        temperature_celsius=kernel_files.read_temperature_celsius(card.folder / "device"),
    )


def _read_memory_bytes(card: kernel_files.DrmCard) -> int | None:
    """Return the memory of a card, as i915 states it or as xe states it of each tile; None if neither does.

    If xe does not state it of every tile, the memory of the card is unknown.
    """
    card_bytes = parse_size_bytes(read_limited(card.folder / "lmem_total_bytes"))
    if card_bytes is not None:
        return card_bytes
    total_bytes = 0
    for tile in kernel_files.list_folder(card.folder / "device", r"tile[0-9]+"):
        tile_bytes = parse_size_bytes(read_limited(tile / "physical_vram_size_bytes"))
        if tile_bytes is None:
            return None
        total_bytes += tile_bytes
    return check_bytes(total_bytes) or None  # 0 without any tile
