"""The topology of AMD's compute driver: the compiler target of each GPU, and its links of Infinity Fabric to others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from devices.node.checked_values import parse_number
from devices.node.kernel_files import list_folder, parse_properties, read_limited

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
    """Return the GPUs of the topology; none if the compute driver is not loaded."""
    return tuple(_read_nodes(sys / "class/kfd/kfd/topology/nodes"))


def format_target(version: int) -> str:
    """Return the compiler target of a version: 90402 is gfx942, and 90010 gfx90a. Empty if it is none."""
    major, minor, stepping = version // 10_000, version // 100 % 100, version % 100
    is_target = 0 < major < 100 and minor < 16 and stepping < 16  # noqa: PLR2004 - hexadecimal digits
    return f"gfx{major}{minor:x}{stepping:x}" if is_target else ""


def format_address(domain: int, location: int) -> str:
    """Return the PCI address of a location: eight bits of bus, five of device and three of function."""
    return f"{domain & 0xFFFF:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _read_nodes(folder: Path) -> Iterator[TopologyNode]:
    for node in list_folder(folder, r"[0-9]+"):
        facts = parse_properties(read_limited(node / "properties"), " ")
        target = format_target(_number(facts, "gfx_target_version"))
        if not target:
            continue  # a processor
        links = (
            parse_properties(read_limited(each / "properties"), " ")
            for each in list_folder(node / "io_links", r"[0-9]+")
        )
        yield TopologyNode(
            number=int(node.name),
            address=format_address(_number(facts, "domain"), _number(facts, "location_id")),
            target=target,
            linked=tuple(_number(each, "node_to") for each in links if _number(each, "type") == _XGMI),
        )


def _number(facts: dict[str, str], name: str) -> int:
    return max(parse_number(facts.get(name, "")) or 0, 0)
