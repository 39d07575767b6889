"""Products are found by what labels and people call them, with the memory and architecture that the vendors state."""

import pytest

from devices.products import PRODUCTS, find_family, find_product, list_families, list_products
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
        ("nvidia", "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "RTX-PRO-6000", "blackwell", 97_887),
        ("nvidia", "NVIDIA-L40S", "L40S", "ada", 46_068),
        ("nvidia", "NVIDIA-B200", "B200", "blackwell", 183_359),
        ("amd", "AMD_Instinct_MI300X_OAM", "MI300X", "cdna3", 196_608),
        ("amd", "74a1", "MI300X", "cdna3", 196_608),
        ("amd", "0x75A3", "MI355X", "cdna4", 294_912),
        ("amd", "AMD Instinct MI350X", "MI350X", "cdna4", 294_912),
        ("amd", "AMD_Radeon_RX_7900_XTX", "RX-7900", "rdna3", None),
        ("intel-gaudi", "Gaudi2", "Gaudi2", "gaudi2", 98_304),
        ("intel-gaudi", "GAUDI3", "Gaudi3", "gaudi3", 131_072),
    ],
)
def test_product_is_found_by_label_id_or_name(
    vendor: str, text: str, name: str, family: str, memory_mib: int | None
) -> None:
    found = find_product(vendor, text)
    assert found
    assert (found.name, found.family, found.memory_mib) == (name, family, memory_mib)
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
    assert list_families("nvidia") == ("volta", "turing", "ampere", "ada", "hopper", "blackwell", "rubin")
    assert list_families("amd") == ("cdna1", "cdna2", "cdna3", "cdna4", "rdna2", "rdna3", "rdna4")
    assert list(list_products("amd", "cdna4")) == ["MI350X", "MI355X"]
    assert list_families("cpu") == ()


def test_every_name_and_id_finds_its_own_product() -> None:
    for vendor, products in PRODUCTS.items():
        assert vendor in VENDORS
        for product in products:
            assert find_product(vendor, product.name) == product
            assert all(find_product(vendor, each) == product for each in product.ids)
