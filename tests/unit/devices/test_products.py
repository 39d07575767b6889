"""Products are found by what labels and people call them, with the memory and architecture that the vendors state."""

import re

import pytest

from devices.product_table import PRODUCTS
from devices.products import find_family, find_product, list_families, list_products
from devices.vendors import VENDORS


@pytest.mark.parametrize(
    ("vendor", "text", "name", "family", "memory_mib"),
    [
        ("nvidia", "NVIDIA-H100-80GB-HBM3", "H100-80GB", "hopper", 81_559),
        ("nvidia", "NVIDIA-H100-80GB-HBM3-SHARED", "H100-80GB", "hopper", 81_559),
        ("nvidia", "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "H100-80GB", "hopper", None),
        ("nvidia", "NVIDIA-H100-NVL", "H100-NVL", "hopper", 95_830),
        ("nvidia", "NVIDIA-A100-SXM4-80GB", "A100-80GB", "ampere", 81_920),
        ("nvidia", "NVIDIA-A100-SXM4-40GB", "A100-40GB", "ampere", 40_960),
        ("nvidia", "A100", "A100", "ampere", None),
        ("nvidia", "Tesla-T4", "T4", "turing", 15_360),
        ("nvidia", "Tesla-V100-SXM2-16GB", "V100-16GB", "volta", 16_384),
        ("nvidia", "NVIDIA-GeForce-RTX-4090", "RTX-4090", "ada", 24_564),
        ("nvidia", "NVIDIA-RTX-6000-Ada-Generation", "RTX-6000-Ada", "ada", 49_140),
        ("nvidia", "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "RTX-PRO-6000-Server", "blackwell", 97_887),
        ("nvidia", "NVIDIA-L40S", "L40S", "ada", 46_068),
        ("nvidia", "NVIDIA-B200", "B200", "blackwell", 183_359),
        ("amd", "AMD_Instinct_MI300X_OAM", "MI300X", "cdna3", 196_608),
        ("amd", "74a1", "MI300X", "cdna3", 196_608),
        ("amd", "0x75A3", "MI355X", "cdna4", 294_912),
        ("amd", "AMD Instinct MI350X", "MI350X", "cdna4", 294_912),
        ("amd", "AMD_Radeon_RX_7900_XTX", "RX-7900-XTX", "rdna3", 24_576),
        ("intel-gaudi", "Gaudi2", "Gaudi2", "gaudi2", 98_304),
        ("intel-gaudi", "GAUDI3", "Gaudi3", "gaudi3", 131_072),
    ],
)
def test_product_is_found_by_label_id_or_name(
    vendor: str, text: str, name: str, family: str, memory_mib: int | None
) -> None:
    product = find_product(vendor, text)
    assert product
    assert (product.name, product.family, product.memory_mib) == (name, family, memory_mib)
    assert find_family(vendor, text) == family


@pytest.mark.parametrize(
    ("vendor", "text"),
    [("nvidia", "NVIDIA-X100"), ("nvidia", "MI300X"), ("nvidia", ""), ("npu-of-tomorrow", "H100"), ("amd", "74ff")],
)
def test_unknown_product_has_no_family(vendor: str, text: str) -> None:
    assert find_product(vendor, text) is None
    assert find_family(vendor, text) is None


@pytest.mark.parametrize(
    ("vendor", "text", "family"),
    [("nvidia", "Ada-Lovelace", "ada"), ("nvidia", "rubin", "rubin"), ("nvidia", "hopper", "hopper")],
)
def test_family_label_is_a_family(vendor: str, text: str, family: str) -> None:
    assert find_family(vendor, text) == family


def test_families_are_in_order_of_age_and_have_products() -> None:
    assert list_families("nvidia") == ("pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "rubin")
    assert list_families("amd") == ("gcn5", "cdna1", "cdna2", "cdna3", "cdna4", "rdna2", "rdna3", "rdna3.5", "rdna4")
    assert list(list_products("amd", "cdna4")) == ["MI350X", "MI355X"]
    assert list_families("cpu") == ()


@pytest.mark.parametrize(
    ("text", "memory_mib", "gb_per_second"),
    [
        # The products that a peer takes for others.
        ("NVIDIA H100 80GB HBM3", 81_559, 3350),
        ("NVIDIA H100 PCIe", 81_559, 2000),
        ("H100-PCIe-80GB", None, 2000),
        ("NVIDIA A100-SXM4-80GB", 81_920, 2039),
        ("NVIDIA A100 80GB PCIe", 81_920, 1935),
        ("NVIDIA A100-SXM4-40GB", 40_960, 1555),
        ("A100", 81_920, 2039),
        ("A100", None, None),
        ("NVIDIA H800 PCIe", 81_559, 2000),
        ("NVIDIA A800 80GB PCIe", 81_920, 1935),
        ("NVIDIA RTX A1000", 8188, 192),
        ("NVIDIA T400 4GB", 4096, 80),
        ("NVIDIA GH200 480GB", 97_871, 4000),
        ("NVIDIA GB10", 124_550, 273),
        # One name, two memories, two bandwidths.
        ("NVIDIA GeForce RTX 3060", 12_288, 360),
        ("NVIDIA GeForce RTX 3060", 8192, 240),
        ("NVIDIA GeForce RTX 3060", None, None),
        ("NVIDIA GeForce RTX 3080", 10_240, 760),
        # Another product has the same words and one more.
        ("NVIDIA GeForce RTX 4060", 8188, 272),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 8188, 256),
        ("NVIDIA GeForce RTX 4060 Ti", 16_380, 288),
        ("NVIDIA GeForce GTX 1650 with Max-Q Design", 4096, 112),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97_887, 1792),
        ("NVIDIA RTX 4000 SFF Ada Generation", 20_475, 280),
        ("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", None, None),
    ],
)
def test_bandwidth_is_that_of_the_exact_product(text: str, memory_mib: int | None, gb_per_second: float | None) -> None:
    product = find_product("nvidia", text, memory_mib)
    assert product
    assert product.gb_per_second == gb_per_second


@pytest.mark.parametrize("text", ["NVIDIA GeForce RTX 2080 Laptop GPU", "GeForce RTX 3060 Mobile", "RTX 4070 D"])
def test_unlisted_variant_is_not_taken_for_the_product_of_its_name(text: str) -> None:
    assert find_product("nvidia", text) is None


def test_every_bandwidth_has_a_source_that_agrees_with_it() -> None:
    for product in (listed for products in PRODUCTS.values() for listed in products):
        assert bool(product.source) == (product.gb_per_second is not None), product.name
        if interface := re.match(r"(\d+) bit x ([\d.]+) Gb/s", product.source):
            assert product.gb_per_second == pytest.approx(int(interface[1]) * float(interface[2]) / 8), product.name


def test_every_name_and_id_finds_its_own_product() -> None:
    for vendor, products in PRODUCTS.items():
        assert vendor in VENDORS
        for product in products:
            assert find_product(vendor, product.name) == product
            assert all(find_product(vendor, product_id) == product for product_id in product.ids)
