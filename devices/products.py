"""The table of accelerator products: memory and architecture of what the vendors' node labels name.

Labels of NVIDIA state memory and architecture themselves; for the other vendors this table does. A name is found as a
label has it (`NVIDIA-H100-80GB-HBM3-SHARED`, `AMD_Instinct_MI300X_OAM`), by AMD's device id (`74a1`), or as people say
it (`H100`, `MI300X`, `Gaudi2`). A product that is not listed is unknown, which is no error.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

_MIB_PER_GIB: Final = 1024


class Product(NamedTuple):
    """One product of a vendor."""

    name: str
    family: str
    """Architecture, in lower case: for NVIDIA as in the label `nvidia.com/gpu.family`."""
    capability: str
    """Compute capability of NVIDIA, or the target of AMD's compiler; empty if the vendor has none."""
    memory_mib: int | None = None
    """Memory as labels and the vendor's tool state it; None if products of this name differ in it."""
    ids: tuple[str, ...] = ()
    """Values of the label `amd.com/gpu.device-id`."""


PRODUCTS: Final[Mapping[str, tuple[Product, ...]]] = MappingProxyType(
    {
        # Memory as nvidia-smi states it: an H100 has less than 80 GiB, while an A100 has all of it.
        "nvidia": (
            Product("V100-16GB", "volta", "7.0", 16_384),
            Product("V100-32GB", "volta", "7.0", 32_768),
            Product("T4", "turing", "7.5", 15_360),
            Product("A100-40GB", "ampere", "8.0", 40_960),
            Product("A100-80GB", "ampere", "8.0", 81_920),
            Product("A30", "ampere", "8.0", 24_576),
            Product("A10", "ampere", "8.6", 23_028),
            Product("A10G", "ampere", "8.6", 23_028),
            Product("A40", "ampere", "8.6", 46_068),
            Product("RTX-A6000", "ampere", "8.6", 49_140),
            Product("RTX-3090", "ampere", "8.6", 24_576),
            Product("L4", "ada", "8.9", 23_034),
            Product("L40", "ada", "8.9", 46_068),
            Product("L40S", "ada", "8.9", 46_068),
            Product("RTX-4090", "ada", "8.9", 24_564),
            Product("RTX-6000-Ada", "ada", "8.9", 49_140),
            Product("H100-80GB", "hopper", "9.0", 81_559),
            Product("H100-PCIe", "hopper", "9.0", 81_559),
            Product("H100-NVL", "hopper", "9.0", 95_830),
            Product("H200", "hopper", "9.0", 143_771),
            Product("GH200", "hopper", "9.0"),
            Product("B200", "blackwell", "10.0", 183_359),
            Product("GB200", "blackwell", "10.0"),
            Product("B300", "blackwell", "10.3"),
            Product("GB300", "blackwell", "10.3"),
            Product("GB10", "blackwell", "12.1"),
            Product("RTX-5090", "blackwell", "12.0", 32_607),
            Product("RTX-PRO-6000", "blackwell", "12.0", 97_887),
            # Products of these names differ in memory.
            Product("V100", "volta", "7.0"),
            Product("A100", "ampere", "8.0"),
            Product("H100", "hopper", "9.0"),
        ),
        # Ids as AMD's GPU operator and metrics exporter map them; one of the two chips of an MI250X is one device.
        "amd": (
            Product("MI100", "cdna1", "gfx908", 32 * _MIB_PER_GIB, ("738c", "738e")),
            Product("MI210", "cdna2", "gfx90a", 64 * _MIB_PER_GIB, ("740f", "7410")),
            Product("MI250", "cdna2", "gfx90a", 64 * _MIB_PER_GIB),
            Product("MI250X", "cdna2", "gfx90a", 64 * _MIB_PER_GIB, ("7408", "740c")),
            Product("MI300A", "cdna3", "gfx942", 128 * _MIB_PER_GIB, ("74a0",)),
            Product("MI300X", "cdna3", "gfx942", 192 * _MIB_PER_GIB, ("74a1", "74a9", "74b5", "74bd")),
            Product("MI308X", "cdna3", "gfx942", 192 * _MIB_PER_GIB, ("74a2", "74a8", "74b6", "74bc")),
            Product("MI325X", "cdna3", "gfx942", 256 * _MIB_PER_GIB, ("74a5", "74b9")),
            Product("MI350X", "cdna4", "gfx950", 288 * _MIB_PER_GIB, ("75a0", "75b0")),
            Product("MI355X", "cdna4", "gfx950", 288 * _MIB_PER_GIB, ("75a3", "75b3")),
            Product("V620", "rdna2", "gfx1030", 32 * _MIB_PER_GIB, ("73a1", "73ae")),
            Product("W6800", "rdna2", "gfx1030", 32 * _MIB_PER_GIB, ("73a3",)),
            Product("W7900", "rdna3", "gfx1100", 48 * _MIB_PER_GIB, ("7448", "744a")),
            Product("RX-7900", "rdna3", "gfx1100", None, ("744c",)),
            Product("RX-9070", "rdna4", "gfx1201", 16 * _MIB_PER_GIB, ("7550",)),
        ),
        # Memory as hl-smi states it.
        "intel-gaudi": (
            Product("Gaudi2", "gaudi2", "", 96 * _MIB_PER_GIB),
            Product("Gaudi3", "gaudi3", "", 128 * _MIB_PER_GIB),
        ),
    }
)
"""By the name of the vendor in `devices/vendors.py`."""

_FAMILY_ALIASES: Final[Mapping[str, str]] = MappingProxyType({"ada-lovelace": "ada"})
_PARTITION: Final = re.compile(r"-MIG-.*$", re.IGNORECASE)
"""End of a product's label on a node whose devices are partitioned alike."""


@functools.lru_cache(maxsize=1024)
def find_product(vendor: str, text: str) -> Product | None:
    """Return the product of `vendor` that a label, a device id or a person names; None if it is not listed.

    The memory of a partition is not that of the product, so it is unknown.
    """
    words = _split_words(_PARTITION.sub("", text))
    listed = PRODUCTS.get(vendor, ())
    found = next((each for each in listed if text.strip().lower().removeprefix("0x") in each.ids), None)
    if found is None:
        # Of two names that are in the text, the one with more words says more: A100-80GB, not A100.
        named = [each for each in listed if _contains(words, _split_words(each.name))]
        found = max(named, key=lambda each: len(_split_words(each.name)), default=None)
    return found._replace(memory_mib=None) if found and _PARTITION.search(text) else found


def find_family(vendor: str, text: str) -> str | None:
    """Return the architecture of a product or the family that `text` names; None if it is not listed."""
    name = _FAMILY_ALIASES.get(text.lower(), text.lower())
    if name in list_families(vendor):
        return name
    found = find_product(vendor, text)
    return found.family if found else None


def list_families(vendor: str) -> tuple[str, ...]:
    """Return the listed architectures of a vendor, the oldest first."""
    families = [each.family for each in PRODUCTS.get(vendor, ())]
    # No product of it is listed yet, but the label has a value for it.
    return (*dict.fromkeys(families), *(("rubin",) if vendor == "nvidia" else ()))


def list_products(vendor: str, family: str) -> Iterator[str]:
    """Yield the names of the listed products of one architecture."""
    return (each.name for each in PRODUCTS.get(vendor, ()) if each.family == family)


def _split_words(name: str) -> tuple[str, ...]:
    return tuple(word for word in re.split(r"[^a-z0-9]+", name.lower()) if word)


def _contains(words: tuple[str, ...], part: tuple[str, ...]) -> bool:
    """Return whether all words of `part` are among `words`, in whatever order and with others between them."""
    return set(part) <= set(words)
