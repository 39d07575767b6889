"""The probe of AMD GPUs: the kernel's files, which any container may read, and rocm-smi where they state no memory."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from crds.nodefitness import NodeDevice
from devices.node import kernel_files
from devices.node.checked_values import (
    clean_text,
    parse_celsius,
    parse_number,
    parse_percent,
    parse_rest_bytes,
    parse_size_bytes,
    subtract_used,
)
from devices.node.vendor_reading import VendorReading
from devices.node.vendor_tool import quote_output, run_tool
from devices.proc import read_limited
from devices.products import find_product
from devices.tools import find_program

_XGMI: Final = 11
"""Type of a link of Infinity Fabric; 2 is PCI Express."""


class TopologyNode(NamedTuple):
    """One GPU, or one partition of it."""

    number: int
    address: str
    """Its PCI address, which partitions of one GPU share."""
    target: str
    """For example gfx942."""
    linked: tuple[int, ...]
    """Numbers of the nodes that it reaches by Infinity Fabric."""


def read_topology(sys: Path) -> tuple[TopologyNode, ...]:
    """Return the GPUs in the topology of AMD's compute driver (KFD); none if the driver is not loaded.

    The topology numbers processors and GPUs as nodes, and has the links between them.
    """
    nodes = []
    for folder in kernel_files.list_folder(sys / "class/kfd/kfd/topology/nodes", r"[0-9]+"):
        facts = _read_properties(folder)
        links = [_read_properties(link) for link in kernel_files.list_folder(folder / "io_links", r"[0-9]+")]
        node = TopologyNode(
            number=int(folder.name),
            address=format_address(facts["domain"], facts["location_id"]),
            target=format_target(facts["gfx_target_version"]),
            # _XGMI: the type of a link of Infinity Fabric, between two GPUs; others are PCI Express
            linked=tuple(link["node_to"] for link in links if link["type"] == _XGMI),
        )
        if node.target:  # else it is a processor
            nodes.append(node)
    return tuple(nodes)


def format_target(version: int) -> str:
    """Return the compiler target of a version: 90402 is gfx942, and 90010 gfx90a. Empty if it is none."""
    major, minor, stepping = version // 10_000, version // 100 % 100, version % 100
    is_target = 0 < major < 100 and minor < 16 and stepping < 16  # noqa: PLR2004 - hexadecimal digits
    return f"gfx{major}{minor:x}{stepping:x}" if is_target else ""


def format_address(domain: int, location: int) -> str:
    """Return the PCI address of a location: eight bits of bus, five of device and three of function."""
    return f"{domain & 0xFFFF:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _read_properties(folder: Path) -> dict[str, int]:
    """Return the numbers in a file `properties`; 0 stands for those that are none."""
    texts = kernel_files.parse_properties(read_limited(folder / "properties"), " ")
    return defaultdict(int, {name: max(parse_number(text) or 0, 0) for name, text in texts.items()})


_VENDOR_ID: Final = "1002"
_LEAST_BYTES: Final = 2 << 30
"""Memory of the smallest GPU that serves a model. The part of the machine's memory that firmware gives an integrated
GPU is usually smaller, and taking all memory for it, as other tools do, would promise it twice."""
_MOST_LINKS: Final = 32
_ARGUMENTS: Final = (
    *("--showproductname", "--showuniqueid", "--showbus", "--showmeminfo", "vram", "--showuse", "--showtemp"),
    *("--showdriverversion", "--showid", "--json"),
)


def read_amd(sys: Path, proc: Path) -> VendorReading | None:
    """Read AMD's GPUs from the kernel's files, or by the tool rocm-smi if these state none.

    None: the kernel's files state none, and the tool is not installed. A tool that fails is a problem of the reading.
    """
    cards = [card for card in kernel_files.list_cards(sys, _VENDOR_ID) if card.driver == "amdgpu"]
    devices = list_amd_devices(cards, read_topology(sys))
    if devices:
        return VendorReading("amd", "sysfs", devices, driver=kernel_files.read_driver_version(sys, proc, "amdgpu"))
    program = find_program("rocm-smi") or find_program("/opt/rocm/bin/rocm-smi")
    if program is None:
        return None
    answer = run_tool(program, *_ARGUMENTS)
    if answer.problem:
        return VendorReading("amd", "rocm-smi", problems=(f"rocm-smi {answer.problem}",))
    return parse_rocm_smi(answer.text)


def list_amd_devices(cards: Sequence[kernel_files.DrmCard], topology: Sequence[TopologyNode]) -> tuple[NodeDevice, ...]:
    """Return the devices of these cards, without integrated GPUs, which have little memory of their own.

    The cards are those of the graphics driver. The topology is that of the compute driver: it adds the architecture of
    a card, and the links to other cards, and is matched by the PCI address.
    """
    # Reversed, so that of the partitions at one address the first is kept.
    node_at = {node.address: node for node in reversed(topology)}
    # Links of the topology name cards by its numbers: these lead to addresses, and addresses to the ids of cards.
    address_of_number = {node.number: node.address for node in topology}
    id_at = {card.address: clean_text(card.read("unique_id")) or card.address for card in cards}

    devices = []
    for card in cards:
        # What the topology adds to the card, if the compute driver knows it.
        node = node_at.get(card.address)
        linked_addresses = [address_of_number.get(number) for number in (node.linked if node else ())]
        linked_ids = [id_at[address] for address in linked_addresses if address in id_at]
        device = _read_device(card, id_at[card.address], node.target if node else "", linked_ids)

        # _LEAST_BYTES: what the smallest GPU has that serves a model; integrated GPUs usually have less
        if (device.memory_bytes or 0) >= _LEAST_BYTES:
            devices.append(device)
    return tuple(devices)


def parse_rocm_smi(text: str) -> VendorReading:
    """Read the JSON of rocm-smi: a section for each card, and one for the system, which names the driver.

    The names of fields are compared in lower case, since their capitals differ between versions.
    """
    # Some versions print warnings before it.
    try:
        answer = json.loads("{" + text.partition("{")[2])
    except (ValueError, RecursionError):
        answer = None
    fields = answer if isinstance(answer, dict) else {}
    sections = {name: section for name, section in fields.items() if isinstance(section, dict)}
    cards = (section for name, section in sections.items() if name.startswith("card"))
    devices = tuple(device for card in cards if (device := _parse_card(card)))

    if not devices:
        problem = f"rocm-smi {quote_output(text)}, which states no GPU with memory of its own"
        return VendorReading("amd", "rocm-smi", problems=(problem,))
    driver = _lower_keys(sections.get("system", {})).get("driver version", "")
    return VendorReading("amd", "rocm-smi", devices=devices, driver=clean_text(driver))


def _read_device(card: kernel_files.DrmCard, device_id: str, target: str, linked: Sequence[str]) -> NodeDevice:
    """Return the device of a card by the kernel's files; a GPU that is not partitioned (SPX) has no partition."""
    product = find_product("amd", card.device_id)
    total_bytes = parse_size_bytes(card.read("mem_info_vram_total"))

    # A partition is named by how the card divides its compute units and its memory, such as cpx_nps4.
    compute, memory = clean_text(card.read("current_compute_partition")), card.read("current_memory_partition")
    partition = clean_text(f"{compute}_{memory}").lower() if compute and compute.upper() != "SPX" else ""

    # The name by the kernel, by the table of products, or the number.
    listed_name = product.name if product else clean_text(f"AMD {card.device_id}")
    return NodeDevice(
        id=device_id,
        product=clean_text(card.read("product_name")) or listed_name,
        architecture=target or (product.capability if product else ""),
        partition=partition,
        memory_bytes=total_bytes,
        free_bytes=subtract_used(total_bytes, parse_rest_bytes(card.read("mem_info_vram_used"))),
        utilization_percent=parse_percent(card.read("gpu_busy_percent")),
        temperature_celsius=kernel_files.read_temperature_celsius(card.folder / "device"),
        links=list(linked)[:_MOST_LINKS],
    )


def _parse_card(card: Mapping[str, Any]) -> NodeDevice | None:
    """Return the device of a card's section in rocm-smi's JSON; None for an integrated GPU, or one without an id.

    An integrated GPU has little memory of its own. What the section lacks comes from the table of products.
    """
    facts = _lower_keys(card)
    total_bytes = parse_size_bytes(facts.get("vram total memory (b)", ""))
    device_id = clean_text(facts.get("unique id", "")) or clean_text(facts.get("pci bus", ""))
    # _LEAST_BYTES: what the smallest GPU has that serves a model; integrated GPUs usually have less
    if not device_id or (total_bytes or 0) < _LEAST_BYTES:
        return None

    # Versions differ in which of these is the name and which a number.
    names = [clean_text(facts.get(key, "")) for key in ("card series", "device name", "card model", "device id")]
    stated_name = next((name for name in names if name and not name.startswith("0x")), "")
    product = find_product("amd", facts.get("device id", "").strip()) or find_product("amd", names[0])

    # The first of these two sensors that states a temperature counts.
    heat = (facts.get(f"temperature (sensor {sensor}) (c)", "") for sensor in ("edge", "junction"))

    return NodeDevice(
        id=device_id,
        product=stated_name or (product.name if product else ""),
        architecture=clean_text(facts.get("gfx version", "")) or (product.capability if product else ""),
        memory_bytes=total_bytes,
        free_bytes=subtract_used(total_bytes, parse_rest_bytes(facts.get("vram total used memory (b)", ""))),
        utilization_percent=parse_percent(facts.get("gpu use (%)", "")),
        temperature_celsius=next((celsius for text in heat if (celsius := parse_celsius(text)) is not None), None),
    )


def _lower_keys(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a section by their keys in lower case."""
    return {key.lower(): value for key, value in facts.items() if isinstance(value, str)}
