"""The devices that a pod claims: what each must be, as the scheduler's CEL and as the queue decides it by itself.

Kubernetes selects devices of ResourceSlices by expressions of CEL. A need is simple enough that both forms follow from
it, so the queue counts by the same rule by which the scheduler chooses.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from crds.quantity import parse_quantity
from crds.size import MIB
from devices.vendors import CLAIMED, AttributeType, DeviceDriver
from kube.client import Obj
from kube.kinds import Device

_MEMORY: Final = "memory"
_LONGEST_NAME: Final = 200
_DIGITS: Final = 8
_PARTS_OF_VERSION: Final = 3


class AttributeDemand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The demand on one attribute: that it has one of some values, or is not less than one."""

    name: str
    """Name as in ResourceSlices; one without a domain is of the driver's own."""
    type: AttributeType
    values: tuple[str, ...] = ()
    at_least: str = ""

    @property
    def text(self) -> str:
        """The demand in a few characters."""
        return f"{self.name}>={self.at_least}" if self.at_least else f"{self.name}={'|'.join(self.values)}"


class DeviceNeed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A need for a number of devices of one driver, each of which meets the same demands."""

    driver: str
    device_class: str
    number: int = 1
    memory_mib: int = 0
    """Least memory of each; 0: any."""
    demands: tuple[AttributeDemand, ...] = ()

    @property
    def name(self) -> str:
        """Name by which the queue counts devices that meet the need, such as `gpu.nvidia.com/[memory>=40960Mi]`.

        It stands for the demands alone: needs of different numbers have the same. A long one is cut and ends with a
        digest.
        """
        memory = [f"{_MEMORY}>={self.memory_mib}Mi"] if self.memory_mib else []
        text = ", ".join([*memory, *(demand.text for demand in self.demands)])
        if len(text) > _LONGEST_NAME:
            text = f"{text[:_LONGEST_NAME]} {hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"
        # CLAIMED is the closing bracket: it tells such a name from that of a resource of a node.
        return f"{self.driver}/[{text or 'any'}{CLAIMED}"

    def matches(self, device: Device) -> bool:
        """Return whether a device of the driver, as in a ResourceSlice, meets all demands."""
        if self.memory_mib and _read_memory(device, self.driver) < self.memory_mib * MIB:
            return False
        attributes = device.attributes
        return all(_meets(demand, _find_qualified(attributes, demand.name, self.driver)) for demand in self.demands)

    def list_expressions(self) -> list[str]:
        """Return the expressions of CEL that select such devices; what a device does not state selects none."""
        expressions = []
        if self.memory_mib:
            capacity = f"device.capacity['{self.driver}']"
            expressions.append(
                f"'{_MEMORY}' in {capacity} && {capacity}.{_MEMORY}.compareTo(quantity('{self.memory_mib}Mi')) >= 0"
            )
        return expressions + [_render_demand(demand, self.driver) for demand in self.demands]


def any_device(driver: DeviceDriver) -> DeviceNeed:
    """Return the need for one whole device of a driver, whatever else it is."""
    return DeviceNeed(
        driver=driver.name,
        device_class=driver.device_class,
        demands=tuple(
            AttributeDemand(name=name, type=driver.attributes.get(name, "string"), values=(value,))
            for name, value in sorted(driver.whole_devices.items())
        ),
    )


def encode_need(need: DeviceNeed) -> str:
    """Return the value of the annotation DEVICE_NEED."""
    return msgspec.json.encode(need).decode()


def decode_need(text: str) -> DeviceNeed | None:
    """Return the need of an annotation; None if people have damaged it."""
    try:
        return msgspec.json.decode(text, type=DeviceNeed)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def pad_version(version: str) -> str:
    """Return a version such as 8.9 with all three of its numbers, which CEL demands."""
    numbers = [str(int(part)) for part in version.split(".")]
    return ".".join([*numbers, *["0"] * (_PARTS_OF_VERSION - len(numbers))])


def _render_demand(demand: AttributeDemand, driver: str) -> str:
    """Return a demand as an expression of CEL, false for a device that does not state the attribute."""
    domain, _, name = demand.name.rpartition("/")
    attributes = f"device.attributes['{domain or driver}']"
    value = f"{attributes}.{name}"
    if demand.type == "version" and demand.at_least:
        test = f"{value}.compareTo(semver('{pad_version(demand.at_least)}')) >= 0"
    elif demand.type == "version":
        tests = [f"{value}.compareTo(semver('{pad_version(wanted)}')) == 0" for wanted in demand.values]
        test = _join_alternatives(tests)
    elif demand.at_least:
        test = f"{value} >= {int(demand.at_least)}"
    else:
        literals = map(_quote, demand.values) if demand.type == "string" else demand.values
        test = _join_alternatives([f"{value} == {literal}" for literal in literals])
    return f"'{name}' in {attributes} && {test}"


def _quote(text: str) -> str:
    """Return a text of a tenant as a literal of CEL, which no character of it ends."""
    escaped = (
        character if character.isprintable() and character not in "'\\" else f"\\U{ord(character):08x}"
        for character in text
    )
    return f"'{''.join(escaped)}'"


def _join_alternatives(tests: Sequence[str]) -> str:
    """Return one expression of CEL that is true if any of the tests is."""
    return tests[0] if len(tests) == 1 else f"({' || '.join(tests)})"


def _find_qualified(values: Mapping[str, Any], name: str, driver: str) -> Any:
    """Return the value with a name, which a driver may write with its own domain or without."""
    domain, _, bare = name.rpartition("/")
    if domain and domain != driver:
        return values.get(name)
    value = values.get(bare)
    if value is None:
        return values.get(f"{driver}/{bare}")
    return value


def _read_memory(device: Device, driver: str) -> int:
    """Return the memory of a device in bytes; 0 if it states none."""
    capacity = _find_qualified(device.capacity, _MEMORY, driver) or {}
    return _parse_bytes(capacity.get("value"))


@functools.lru_cache(maxsize=1024)
def _parse_bytes(quantity: object) -> int:
    """Return a Kubernetes quantity in bytes; 0 if it is none."""
    return int(parse_quantity(quantity) or 0)


def _meets(demand: AttributeDemand, stated: Obj | None) -> bool:
    """Return whether the attribute that a device states meets a demand; `stated` is its value by type, or None."""
    value = (stated or {}).get(demand.type)
    if value is None:
        return False
    if demand.type == "version":
        version = _parse_version(str(value))
        if demand.at_least:
            return version >= _parse_version(pad_version(demand.at_least))
        return any(version == _parse_version(pad_version(wanted)) for wanted in demand.values)
    if demand.at_least:
        return int(value) >= int(demand.at_least)
    if demand.type == "int":
        return any(int(value) == int(wanted) for wanted in demand.values)
    text = str(value).lower() if demand.type == "bool" else str(value)
    return text in demand.values


@functools.lru_cache(maxsize=1024)
def _parse_version(version: str) -> tuple[tuple[int, ...], bool, str]:
    """Return the sort key of a semantic version: its numbers, whether it is a release, then its label.

    So one before a release, such as 1.0.0-rc1, is less than it. A part that is no number counts as -1, the least.
    """
    number, dash, label = version.partition("+")[0].partition("-")
    parts = number.split(".")
    numbers = tuple(int(part) if part.isascii() and part.isdecimal() else -1 for part in parts)
    is_release = not dash
    return numbers, is_release, label
