"""Products of accelerators, found by what people and vendors call them.

Labels of NVIDIA state memory and architecture themselves; for the other vendors the table of products does. A name is
found as a label or the vendor's tool has it (`NVIDIA-H100-80GB-HBM3-SHARED`, `NVIDIA GeForce RTX 4060 Laptop GPU`), by
AMD's device id (`74a1`), or as people say it (`H100`, `MI300X`, `Gaudi2`). A product that is not listed is unknown,
which is no error.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Final

from crds.size import divide_up
from devices.product_table import PRODUCTS, Product

_FAMILY_ALIASES: Final[Mapping[str, str]] = {"ada-lovelace": "ada"}
_PARTITION: Final = re.compile(r"-MIG-.*$", re.IGNORECASE)
"""End of a product's label on a node whose devices are partitioned alike."""
_VARIANTS: Final = frozenset({"laptop", "mobile", "ti", "super", "xt", "xtx", "gre", "d", "q", "nvl", "sff"})
"""Words that make another product of a name: a GeForce RTX 4060 Laptop is no RTX 4060."""
_LABEL_GIB: Final = re.compile(r"\d+g[bi]?b?", re.IGNORECASE)


@functools.lru_cache(maxsize=1024)
def find_product(vendor: str, text: str, memory_mib: int | None = None) -> Product | None:
    """Return the product of `vendor` that a label, a device id or a person names; None if it is not listed.

    1. A text that is a device id, such as 74a1, names the product with this id.
    2. Otherwise all words of the product's name must be in the text, and none that makes another product of it, such as
       laptop. Of several such products, the one with the most words is meant; the memory of the device is a word, too,
       if the text has none, such as 80gb.
    3. A text that names a partition of a product gets the product without memory and speed, which are unknown for it.

    Args:
        vendor: its name in `devices/vendors.py`.
        text: the name.
        memory_mib: memory of the device, if it is known: it tells products of one name apart.
    """
    # _PARTITION: the end of a label such as -MIG-1g.10gb, which is no part of the product's name
    words = _split_words(_PARTITION.sub("", text))
    if memory_mib and not any(_LABEL_GIB.fullmatch(word) for word in words):
        # Rounded up: tools state a little less than the product's name does.
        words = (*words, f"{divide_up(memory_mib, 1024)}gb")

    # A device id decides, else the name.
    listed = PRODUCTS.get(vendor, ())
    device_id = text.strip().lower().removeprefix("0x")
    match = next((product for product in listed if device_id in product.ids), None)
    if match is None:
        # A100-80GB has both names A100 and A100-80GB in it: the longer one says more.
        named = [product for product in listed if _names_product(words, _split_words(product.name))]
        match = max(named, key=_rank_name, default=None)

    # A partition has only a part of the product's memory and speed.
    if match and _PARTITION.search(text):
        return match._replace(memory_mib=None, gb_per_second=None, source="", tflops=None)
    return match


def find_family(vendor: str, text: str) -> str | None:
    """Return the architecture of a product or the family that `text` names; None if it is not listed."""
    name = _FAMILY_ALIASES.get(text.lower(), text.lower())
    if name in list_families(vendor):
        return name
    product = find_product(vendor, text)
    return product.family if product else None


def list_families(vendor: str) -> tuple[str, ...]:
    """Return the listed architectures of a vendor, the oldest first."""
    families = [product.family for product in PRODUCTS.get(vendor, ())]
    # No product of it is listed yet, but the label has a value for it.
    return (*dict.fromkeys(families), *(("rubin",) if vendor == "nvidia" else ()))


def list_family_labels(family: str) -> tuple[str, ...]:
    """Return the values that a node label may have for an architecture."""
    return (family, *(alias for alias, name in _FAMILY_ALIASES.items() if name == family))


def list_products(vendor: str, family: str) -> Iterator[str]:
    """Yield the names of the listed products of one architecture."""
    return (product.name for product in PRODUCTS.get(vendor, ()) if product.family == family)


def _split_words(name: str) -> tuple[str, ...]:
    """Return the words of a name in lower case."""
    return tuple(word for word in re.split(r"[^a-z0-9]+", name.lower()) if word)


def _names_product(words: tuple[str, ...], product_words: tuple[str, ...]) -> bool:
    """Return whether all words of a product are among `words`, in any order, with no other word that is a variant."""
    other_words = set(words) - set(product_words)
    return set(product_words) <= set(words) and other_words.isdisjoint(_VARIANTS)


def _rank_name(product: Product) -> tuple[int, bool]:
    """Return the sort key by which the most specific of several products is the greatest: it has the most words.

    Of names with equally many words, one with `PCIe` is preferred.
    """
    words = _split_words(product.name)
    return len(words), "pcie" in words
