"""Small files of /proc and /sys, read with a limit, and the PCI devices among them that models may run on."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from devices.node.checked_values import clean_text, parse_celsius
from devices.proc import read_limited

_MOST_ENTRIES: Final = 4096
_MODALIAS: Final = re.compile(
    r"pci:v0000(?P<vendor>[0-9A-F]{4})d0000(?P<device>[0-9A-F]{4})sv.*bc(?P<base_class>[0-9A-F]{2})sc[0-9A-F]{2}"
)
_DISPLAY: Final = "03"
_ACCELERATOR: Final = "12"


class PciDevice(NamedTuple):
    """A display controller or processing accelerator on the PCI bus."""

    vendor_id: str
    """Four hexadecimal digits in lower case: 10de is NVIDIA."""
    device_id: str


def list_folder(path: Path, pattern: str) -> Iterator[Path]:
    """Yield the entries of a folder whose whole name matches, in the order of the numbers in their names.

    Nothing is yielded if the folder cannot be read; of a very large one only some entries are read.
    """
    try:
        # `zip` ends with the shorter one: after `_MOST_ENTRIES` entries.
        names = [entry.name for entry, _ in zip(path.iterdir(), range(_MOST_ENTRIES), strict=False)]
    except OSError:
        return
    for name in sorted(names, key=_split_numbers):
        if re.fullmatch(pattern, name):
            yield path / name


def list_pci_devices(sys: Path) -> tuple[PciDevice, ...]:
    """Return the display controllers and accelerators on the PCI bus; no privilege is needed for it."""
    devices = []
    for folder in list_folder(sys / "bus/pci/devices", r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"):
        # A module alias has the ids and the class of a device, by which the kernel finds its driver.
        alias = _MODALIAS.match(read_limited(folder / "modalias"))
        # The class of a display controller, or of a processing accelerator.
        if alias and alias["base_class"] in {_DISPLAY, _ACCELERATOR}:
            devices.append(PciDevice(vendor_id=alias["vendor"].lower(), device_id=alias["device"].lower()))
    return tuple(devices)


def parse_properties(text: str, separator: str = "=") -> dict[str, str]:
    """Read lines of a name, a separator and a value, as files named `uevent` or `properties` have them."""
    pairs = (line.partition(separator) for line in text.splitlines())
    return {key.strip(): value.strip() for key, pair, value in pairs if pair}


def _split_numbers(name: str) -> list[tuple[int, str]]:
    """Return the sort key of a name by which card10 comes after card9: its parts as a number or a text each."""
    parts = [part for part in re.split(r"([0-9]{1,18})", name) if part]
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


class DrmCard(NamedTuple):
    """One card with a PCI device behind it."""

    folder: Path
    """Its folder in /sys/class/drm."""
    address: str
    device_id: str
    """Four hexadecimal digits in lower case."""
    driver: str
    """Name of the kernel's driver."""

    def read(self, name: str) -> str:
        """Return the text of a file of the device, or ""."""
        return read_limited(self.folder / "device" / name)


def list_cards(sys: Path, vendor_id: str) -> tuple[DrmCard, ...]:
    """Return the cards of one vendor, given by the four digits of its PCI id."""
    cards = []
    for folder in list_folder(sys / "class/drm", r"card[0-9]+"):
        facts = parse_properties(read_limited(folder / "device/uevent"))
        # PCI_ID is VENDOR:DEVICE in hexadecimal digits, PCI_SLOT_NAME the address on the bus.
        vendor, _, device = facts.get("PCI_ID", "").lower().partition(":")
        address = clean_text(facts.get("PCI_SLOT_NAME", ""))
        if vendor == vendor_id and device and address:
            cards.append(DrmCard(folder, address, clean_text(device), driver=clean_text(facts.get("DRIVER", ""))))
    return tuple(cards)


def read_temperature_celsius(device: Path) -> int | None:
    """Return the first temperature of a device's sensors, which is that of the chip itself; None if it states none."""
    for monitor in list_folder(device / "hwmon", r"hwmon[0-9]+"):
        for sensor in list_folder(monitor, r"temp[0-9]+_input"):
            celsius = parse_celsius(read_limited(sensor), parts=1000)  # in thousandths of a degree
            if celsius is not None:
                return celsius
    return None


def read_driver_version(sys: Path, proc: Path, driver: str) -> str:
    """Return the version of a driver: its own if it is not the kernel's, else its name and the kernel's version."""
    own = clean_text(read_limited(sys / "module" / driver / "version"))
    return own or clean_text(f"{driver} {read_limited(proc / 'sys/kernel/osrelease')}")
