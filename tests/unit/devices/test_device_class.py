"""Device classes: names by which measurements are kept."""

import re
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.device_class import name_device_class, name_host_class, name_processor_class

KEY: Final = re.compile(r"[-._a-zA-Z0-9]{1,253}")


def test_label_and_tool_of_a_product_name_the_same_class() -> None:
    assert name_device_class("nvidia", "NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3x1"
    assert name_device_class("nvidia", "NVIDIA-H100-80GB-HBM3") == "nvidia-h100-80gb-hbm3x1"
    assert name_device_class("amd", "AMD_Instinct_MI300X_OAM", 8) == "amd-instinct-mi300x-oamx8"


def test_class_says_partition_and_number() -> None:
    assert name_device_class("nvidia", "A100-SXM4-80GB", 2, "1g.10gb") == "nvidia-a100-sxm4-80gb-1g.10gbx2"
    assert name_device_class("nvidia", "") == "nvidia-unknownx1"


def test_host_class_tells_variants_of_a_chip_apart() -> None:
    assert name_host_class("Apple M2 Ultra", 76, 192 * 2**30) == "apple-m2-ultra-76c-192gb"
    assert name_host_class("", None, None) == "host-unknown"


def test_processor_class_has_neither_trademark_nor_clock() -> None:
    assert name_processor_class("AMD EPYC 7763 64-Core Processor", 8) == "cpu-amd-epyc-7763-64-corex8"
    assert name_processor_class("Intel(R) Xeon(R) CPU @ 2.20GHz", 2) == "cpu-intel-xeonx2"


@given(st.text(), st.text(), st.text(), st.integers(1, 10**6))
def test_every_class_is_a_key_of_a_config_map(vendor: str, product: str, partition: str, count: int) -> None:
    # A vendor comes from the table, never from a device.
    assert KEY.fullmatch(name_device_class("nvidia", product, count, partition))
    assert KEY.fullmatch(name_host_class(product, count, count))
    assert KEY.fullmatch(name_processor_class(vendor, count))


@pytest.mark.parametrize(
    ("product", "partition"),
    [
        ("NVIDIA A100-SXM4-40GB", "1g.5gb"),
        ("NVIDIA-A100-SXM4-40GB", "mig-1g.5gb"),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", ""),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb-SHARED", ""),
    ],
)
def test_partition_is_of_one_class_whether_tool_label_or_resource_names_it(product: str, partition: str) -> None:
    assert name_device_class("nvidia", product, 1, partition) == "nvidia-a100-sxm4-40gb-1g.5gbx1"
