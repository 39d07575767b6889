"""Graphics cards as the kernel lists them in /sys/class/drm, for the vendors whose drivers state memory there."""

from pathlib import Path
from typing import NamedTuple

from devices.node.checked_values import clean_text, parse_millicelsius
from devices.node.kernel_files import list_folder, parse_properties, read_limited


class DrmCard(NamedTuple):
    """One card with a PCI device behind it."""

    folder: Path
    """Its folder in /sys/class/drm."""
    address: str
    vendor_id: str
    device_id: str
    """Four hexadecimal digits in lower case."""
    driver: str
    """Name of the kernel's driver."""

    def read(self, name: str) -> str:
        """Return the text of a file of the device, or ""."""
        return read_limited(self.folder / "device" / name)


def list_cards(sys: Path, vendor_id: str) -> tuple[DrmCard, ...]:
    """Return the cards of one vendor, given by the four digits of its PCI id."""
    found = []
    for folder in list_folder(sys / "class/drm", r"card[0-9]+"):
        facts = parse_properties(read_limited(folder / "device/uevent"))
        vendor, _, device = facts.get("PCI_ID", "").lower().partition(":")
        address = clean_text(facts.get("PCI_SLOT_NAME", ""))
        if vendor == vendor_id and device and address:
            found.append(DrmCard(folder, address, vendor, clean_text(device), clean_text(facts.get("DRIVER", ""))))
    return tuple(found)


def read_temperature_celsius(device: Path) -> int | None:
    """Return the first temperature of a device's sensors, which is that of the chip itself; None if it states none."""
    for monitor in list_folder(device / "hwmon", r"hwmon[0-9]+"):
        for sensor in list_folder(monitor, r"temp[0-9]+_input"):
            celsius = parse_millicelsius(read_limited(sensor))
            if celsius is not None:
                return celsius
    return None


def read_driver_version(sys: Path, proc: Path, driver: str) -> str:
    """Return the version of a driver: its own if it is not the kernel's, else its name and the kernel's version."""
    own = clean_text(read_limited(sys / "module" / driver / "version"))
    return own or clean_text(f"{driver} {read_limited(proc / 'sys/kernel/osrelease')}")
