"""A need for devices selects the same ones by our own rule as by the expressions of CEL that it renders."""

from typing import Any

import msgspec
import pytest

from controller.placement.device_need import AttributeDemand, DeviceNeed, any_device, decode_need, encode_need
from devices.vendors import VENDORS
from kube.client import Obj
from kube.kinds import Device
from tests.support.device_slices import DRIVER, H100, L4, gpu


def need(*demands: AttributeDemand, memory_mib: int = 0) -> DeviceNeed:
    return DeviceNeed(driver=DRIVER, device_class=DRIVER, memory_mib=memory_mib, demands=demands)


def demand(name: str, type_: Any, *values: str, at_least: str = "") -> AttributeDemand:
    return AttributeDemand(name=name, type=type_, values=values, at_least=at_least)


def device(**attributes: Obj) -> Obj:
    return {"name": "d", "attributes": attributes}


@pytest.mark.parametrize(
    ("wanted", "there", "matches"),
    [
        (need(memory_mib=81559), gpu("a", H100), True),
        (need(memory_mib=81560), gpu("a", H100), False),
        (need(memory_mib=1), device(), False),
        (need(demand("productName", "string", "NVIDIA L4", H100[0])), gpu("a", H100), True),
        (need(demand("productName", "string", "NVIDIA L4")), gpu("a", H100), False),
        (need(demand("productName", "string", "x")), device(), False),
        (need(demand("cudaComputeCapability", "version", at_least="8.9")), gpu("a", L4), True),
        (need(demand("cudaComputeCapability", "version", at_least="8.10")), gpu("a", L4), False),
        (need(demand("cudaComputeCapability", "version", at_least="9")), gpu("a", H100), True),
        (need(demand("cudaComputeCapability", "version", "9")), gpu("a", H100), True),
        (
            need(demand("cudaComputeCapability", "version", at_least="9")),
            device(cudaComputeCapability={"version": "9.0.0-rc1"}),
            False,
        ),
        (need(demand("healthy", "bool", "true")), device(healthy={"bool": True}), True),
        (need(demand("healthy", "bool", "true")), device(healthy={"bool": False}), False),
        (need(demand("index", "int", at_least="2")), device(index={"int": 2}), True),
        (need(demand("index", "int", "3")), device(index={"int": 2}), False),
        # A value of another type than the driver's documentation says meets nothing.
        (need(demand("index", "int", "2")), device(index={"string": "2"}), False),
        # A driver may write its own domain before a name; another domain is another attribute.
        (need(demand("model", "string", "A")), device(**{f"{DRIVER}/model": {"string": "A"}}), True),
        (need(demand("other.example/model", "string", "A")), device(model={"string": "A"}), False),
        (need(demand("other.example/model", "string", "A")), device(**{"other.example/model": {"string": "A"}}), True),
    ],
)
def test_device_meets_all_demands_or_is_not_counted(wanted: DeviceNeed, there: Obj, *, matches: bool) -> None:
    assert wanted.matches(msgspec.convert(there, Device)) is matches


def test_each_expression_asks_first_whether_the_device_states_the_value() -> None:
    """The scheduler gives up on a whole claim when an expression reads what a device does not state."""
    wanted = need(
        demand("cudaComputeCapability", "version", at_least="8.9"),
        demand("productName", "string", "A", "B"),
        demand("healthy", "bool", "true"),
        demand("index", "int", at_least="2"),
        demand("other.example/rack", "string", "r1"),
        demand("driverVersion", "version", "550", "560.1"),
        memory_mib=71516,
    )
    own, capacity = "device.attributes['gpu.nvidia.com']", "device.capacity['gpu.nvidia.com']"
    versions = [f"{own}.driverVersion.compareTo(semver('{version}')) == 0" for version in ("550.0.0", "560.1.0")]
    assert wanted.list_expressions() == [
        f"'memory' in {capacity} && {capacity}.memory.compareTo(quantity('71516Mi')) >= 0",
        f"'cudaComputeCapability' in {own} && {own}.cudaComputeCapability.compareTo(semver('8.9.0')) >= 0",
        f"'productName' in {own} && ({own}.productName == 'A' || {own}.productName == 'B')",
        f"'healthy' in {own} && {own}.healthy == true",
        f"'index' in {own} && {own}.index >= 2",
        "'rack' in device.attributes['other.example'] && device.attributes['other.example'].rack == 'r1'",
        f"'driverVersion' in {own} && ({' || '.join(versions)})",
    ]


@pytest.mark.parametrize(
    ("value", "literal"),
    [
        ("x' || true || 'a' == 'a", r"'x\U00000027 || true || \U00000027a\U00000027 == \U00000027a'"),
        ("a\\", r"'a\U0000005c'"),
        ("a\nb", r"'a\U0000000ab'"),
        ('a"b', "'a\"b'"),
    ],
)
def test_value_of_a_tenant_ends_no_string_of_cel(value: str, literal: str) -> None:
    own = "device.attributes['gpu.nvidia.com']"
    (expression,) = need(demand("productName", "string", value)).list_expressions()
    assert expression == f"'productName' in {own} && {own}.productName == {literal}"


def test_whole_device_is_no_partition() -> None:
    driver = VENDORS["nvidia"].driver
    assert driver is not None
    whole = any_device(driver)
    partition = gpu("m") | {"attributes": {"type": {"string": "mig"}}}
    assert [whole.matches(msgspec.convert(device, Device)) for device in (gpu("a"), partition)] == [True, False]


def test_needs_have_one_name_if_they_count_the_same_devices() -> None:
    one, other = need(memory_mib=1), need(demand("productName", "string", "A"), memory_mib=1)
    assert one.name == "gpu.nvidia.com/[memory>=1Mi]"
    assert other.name == "gpu.nvidia.com/[memory>=1Mi, productName=A]"
    assert DeviceNeed(driver=DRIVER, device_class=DRIVER, memory_mib=1, number=4).name == one.name
    long = [need(demand("productName", "string", *("x" * 60 + end for end in ends))) for ends in ("abcde", "abcdf")]
    assert long[0].name != long[1].name
    assert all(VENDORS["nvidia"].offers(device_need.name) for device_need in (one, other, *long))


def test_annotation_is_read_as_it_was_written_and_a_damaged_one_is_none() -> None:
    wanted = need(demand("productName", "string", "A"), memory_mib=1)
    assert decode_need(encode_need(wanted)) == wanted
    assert decode_need("{") is None
    assert decode_need('{"driver": 1}') is None
