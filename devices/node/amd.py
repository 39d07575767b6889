"""The probe of AMD GPUs: the kernel's files, which any container may read, and rocm-smi where they state no memory."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from crds.nodefitness import NodeDevice
from devices.node.amd_topology import TopologyNode, read_topology
from devices.node.checked_values import (
    clean_text,
    parse_celsius,
    parse_percent,
    parse_rest_bytes,
    parse_size_bytes,
    subtract_used,
)
from devices.node.drm_cards import DrmCard, list_cards, read_driver_version, read_temperature_celsius
from devices.node.vendor_reading import VendorReading
from devices.node.vendor_tool import find_tool, quote_output, run_tool
from devices.products import find_product

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
    """Read the GPUs by the kernel's files, else by rocm-smi; None if neither is there."""
    cards = [card for card in list_cards(sys, _VENDOR_ID) if card.driver == "amdgpu"]
    devices = list_amd_devices(cards, read_topology(sys))
    if devices:
        return VendorReading("amd", "sysfs", devices, read_driver_version(sys, proc, "amdgpu"))
    program = find_tool("rocm-smi", "/opt/rocm/bin/rocm-smi")
    if program is None:
        return None
    answer = run_tool(program, *_ARGUMENTS)
    if answer.problem:
        return VendorReading("amd", "rocm-smi", problems=(f"rocm-smi {answer.problem}",))
    return parse_rocm_smi(answer.text)


def list_amd_devices(cards: Sequence[DrmCard], topology: Sequence[TopologyNode]) -> tuple[NodeDevice, ...]:
    """Return the devices of these cards, without integrated GPUs."""
    nodes = {node.address: node for node in reversed(topology)}
    addresses = {node.number: node.address for node in topology}
    ids = {card.address: clean_text(card.read("unique_id")) or card.address for card in cards}
    found = []
    for card in cards:
        node = nodes.get(card.address)
        linked = [ids[addresses[each]] for each in node.linked if addresses.get(each) in ids] if node else []
        device = _read_device(card, ids[card.address], node.target if node else "", linked)
        if (device.memory_bytes or 0) >= _LEAST_BYTES:
            found.append(device)
    return tuple(found)


def parse_rocm_smi(text: str) -> VendorReading:
    """Read the JSON of rocm-smi, whose names of fields differ between versions in their capitals."""
    # Some versions print warnings before it.
    try:
        answer = json.loads(text[max(text.find("{"), 0) :])
    except (ValueError, RecursionError):
        answer = None
    cards = [] if not isinstance(answer, dict) else [each for key, each in answer.items() if key.startswith("card")]
    devices = tuple(device for card in cards if isinstance(card, dict) and (device := _parse_card(card)))
    if not isinstance(answer, dict) or not devices:
        return VendorReading(
            "amd", "rocm-smi", problems=(f"rocm-smi {quote_output(text)}, which states no GPU with memory of its own",)
        )
    system = answer.get("system")
    driver = _lower(system).get("driver version", "") if isinstance(system, dict) else ""
    return VendorReading("amd", "rocm-smi", devices, clean_text(driver))


def _read_device(card: DrmCard, device_id: str, target: str, linked: Sequence[str]) -> NodeDevice:
    product = find_product("amd", card.device_id)
    total_bytes = parse_size_bytes(card.read("mem_info_vram_total"))
    compute, memory = clean_text(card.read("current_compute_partition")), card.read("current_memory_partition")
    partition = clean_text(f"{compute}_{memory}").lower() if compute and compute.upper() != "SPX" else ""
    return NodeDevice(
        id=device_id,
        product=clean_text(card.read("product_name"))
        or (product.name if product else clean_text(f"AMD {card.device_id}")),
        architecture=target or (product.capability if product else ""),
        partition=partition,
        memory_bytes=total_bytes,
        free_bytes=subtract_used(total_bytes, parse_rest_bytes(card.read("mem_info_vram_used"))),
        utilization_percent=parse_percent(card.read("gpu_busy_percent")),
        temperature_celsius=read_temperature_celsius(card.folder / "device"),
        links=list(linked)[:_MOST_LINKS],
    )


def _parse_card(card: Mapping[str, Any]) -> NodeDevice | None:
    facts = _lower(card)
    total_bytes = parse_size_bytes(facts.get("vram total memory (b)", ""))
    device_id = clean_text(facts.get("unique id", "")) or clean_text(facts.get("pci bus", ""))
    if not device_id or (total_bytes or 0) < _LEAST_BYTES:
        return None
    # Versions differ in which of these is the name and which a number.
    names = [clean_text(facts.get(each, "")) for each in ("card series", "device name", "card model", "device id")]
    product = find_product("amd", facts.get("device id", "").strip()) or find_product("amd", names[0])
    heat = (facts.get(f"temperature (sensor {each}) (c)", "") for each in ("edge", "junction"))
    return NodeDevice(
        id=device_id,
        product=next((each for each in names if each and not each.startswith("0x")), product.name if product else ""),
        architecture=clean_text(facts.get("gfx version", "")) or (product.capability if product else ""),
        memory_bytes=total_bytes,
        free_bytes=subtract_used(total_bytes, parse_rest_bytes(facts.get("vram total used memory (b)", ""))),
        utilization_percent=parse_percent(facts.get("gpu use (%)", "")),
        temperature_celsius=next((found for each in heat if (found := parse_celsius(each)) is not None), None),
    )


def _lower(facts: Mapping[str, Any]) -> dict[str, str]:
    return {key.lower(): value for key, value in facts.items() if isinstance(value, str)}
