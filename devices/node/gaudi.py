"""The probe of Intel Gaudi cards: hl-smi, else the kernel's files, which state no memory."""

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from crds.nodefitness import NodeDevice
from crds.size import MIB
from devices.node import kernel_files
from devices.node.checked_values import clean_text, parse_celsius, parse_percent, parse_rest_bytes, parse_size_bytes
from devices.node.vendor_reading import VendorReading
from devices.node.vendor_tool import quote_output, run_tool
from devices.proc import read_limited
from devices.products import find_product
from devices.tools import find_program

_PCI_VENDOR: Final = "1da3"
_FIELDS: Final = (
    *("index", "name", "bus_id", "driver_version", "uuid", "memory.total", "memory.free"),
    *("utilization.aip", "temperature.aip"),
)
_COMMON_FIELD_COUNT: Final = 7
"""Number of the first fields that all versions know; those of utilization and temperature have other names in some."""
_NAME: Final = re.compile(r"HL-(20|2|3)[0-9]", re.IGNORECASE)
_ARCHITECTURES: Final = {"20": "gaudi", "2": "gaudi2", "3": "gaudi3"}


def read_gaudi(sys: Path, proc: Path) -> VendorReading | None:
    """Read the cards by the vendor's tool hl-smi; None if the node has neither the tool nor cards.

    Without the tool, or if it states no card, the cards are read from the kernel's files, which state no memory; the
    problems of the tool are reported with them.
    """
    by_kernel = _read_kernel_files(sys, proc)
    program = find_program("hl-smi") or find_program("/opt/habanalabs/bin/hl-smi")
    if program is None:
        return by_kernel
    by_tool = _ask_tool(program)
    return by_tool if by_tool.devices or by_kernel is None else by_kernel._replace(problems=by_tool.problems)


def _ask_tool(program: str) -> VendorReading:
    """Return the tool's answer to a query of all fields, or of fewer if this version refuses one that it does not know.

    A refusal is an output without a card. A tool that prints nothing has failed otherwise, and is not asked again.
    """
    # All versions know the first `_COMMON_FIELD_COUNT` fields.
    for fields in (_FIELDS, _FIELDS[:_COMMON_FIELD_COUNT]):
        answer = run_tool(program, "-Q", ",".join(fields), "-f", "csv")
        reading = parse_hl_smi(answer.text)
        if answer.problem:
            reading = reading._replace(problems=(f"hl-smi {answer.problem}",))
        if reading.devices or not answer.text:
            break
    return reading


def parse_hl_smi(text: str) -> VendorReading:
    """Read the CSV table of hl-smi, whose columns are named by its header, such as `memory.total [MiB]`.

    Without a header, the columns are all of `_FIELDS`. Lines with another number of cells are no rows.
    """
    lines = [line for line in csv.reader(text.splitlines(), skipinitialspace=True) if len(line) > 1]
    # _FIELDS: the fields that `_ask_tool` asks for first, in their order
    header = next((line for line in lines if line[0].strip() == "index"), None)
    names = [cell.partition("[")[0].strip() for cell in header] if header else list(_FIELDS)
    rows = [dict(zip(names, line, strict=True)) for line in lines if line is not header and len(line) == len(names)]
    devices = tuple(device for row in rows if (device := _parse_card(row)))
    if not devices:
        return VendorReading("intel-gaudi", "hl-smi", problems=(f"hl-smi {quote_output(text)}, which states no card",))
    driver = next((version for row in rows if (version := clean_text(row.get("driver_version", "")))), "")
    return VendorReading("intel-gaudi", "hl-smi", devices=devices, driver=driver)


def name_gaudi_architecture(name: str) -> str:
    """Return the architecture of a card, such as gaudi2 for HL-225 or for GAUDI2; empty if it is not known."""
    # _NAME finds the digits of HL-205, HL-225 or HL-325 that name the generation, the key in `_ARCHITECTURES`.
    match = _NAME.match(name)
    if match:
        return _ARCHITECTURES[match[1]]
    product = find_product("intel-gaudi", re.sub(r"[^A-Za-z0-9]", "", name))
    return product.family if product else ""


def _parse_card(row: Mapping[str, str]) -> NodeDevice | None:
    """Return the device of a row of hl-smi; None if it has no name or id."""
    name, bus_id = clean_text(row.get("name", "")), clean_text(row.get("bus_id", ""))
    device_id = clean_text(row.get("uuid", "")) or bus_id
    if not name or not device_id:
        return None
    architecture = name_gaudi_architecture(name)
    product = find_product("intel-gaudi", architecture)
    return NodeDevice(
        id=device_id,
        product=product.name if product else name,
        architecture=architecture,
        memory_bytes=parse_size_bytes(row.get("memory.total", ""), MIB),
        free_bytes=parse_rest_bytes(row.get("memory.free", ""), MIB),
        utilization_percent=parse_percent(row.get("utilization.aip", "")),
        temperature_celsius=parse_celsius(row.get("temperature.aip", "")),
    )


def _read_kernel_files(sys: Path, proc: Path) -> VendorReading | None:
    """Read Intel's Gaudi cards among the accelerators in the kernel's files; None if the node has none.

    The files state neither memory nor utilization; the memory is that of the product.
    """
    devices = []
    for folder in kernel_files.list_folder(sys / "class/accel", r"accel[0-9]+"):
        device = folder / "device"
        facts = kernel_files.parse_properties(read_limited(device / "uevent"))
        address = clean_text(facts.get("PCI_SLOT_NAME") or read_limited(device / "pci_addr"))
        if not facts.get("PCI_ID", "").lower().startswith(f"{_PCI_VENDOR}:") or not address:
            continue  # another vendor's accelerator, such as the NPU of a notebook

        # Memory and architecture are those of the product that the kernel names.
        kind = clean_text(read_limited(device / "device_type"))
        architecture = name_gaudi_architecture(kind)
        product = find_product("intel-gaudi", architecture)
        node_device = NodeDevice(
            id=address,
            # The same name whether the tool (HL-225) or the kernel (GAUDI2) states it.
            product=product.name if product else kind or "Gaudi",
            architecture=architecture,
            memory_bytes=product.memory_bytes if product else None,
            temperature_celsius=kernel_files.read_temperature_celsius(device),
        )
        devices.append(node_device)
    if not devices:
        return None
    driver = kernel_files.read_driver_version(sys, proc, "habanalabs")
    return VendorReading("intel-gaudi", "sysfs", devices=tuple(devices), driver=driver)
