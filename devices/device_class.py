"""The name of a class of hardware: replicas of a model on two nodes or hosts of one class are equally fast.

Measurements are kept by this name, so a class says all that decides speed and that hardware itself states: vendor,
product, partition, and how many devices a replica has; for an Apple chip also its memory and GPU cores, by which
variants of one chip differ. The name is a key of a ConfigMap.
"""

import re
from typing import Final

_UNFIT: Final = re.compile(r"[^a-z0-9.]+")
_COUNT: Final = re.compile(r"x[0-9]+$")
SINGLE: Final = "x1"
"""End of the class of a single device."""
_MOST_CHARACTERS: Final = 128
"""The key of a ConfigMap may have 253, and a product that a device states may be a lie of any length."""


def name_device_class(vendor: str, product: str, count: int = 1, partition: str = "") -> str:
    """Return the device class of a replica with devices of its own.

    `name_device_class("nvidia", "NVIDIA H100 80GB HBM3")` is `nvidia-h100-80gb-hbm3x1`.

    Args:
        vendor: its name in `devices/vendors.py`.
        product: the product as a label or the vendor's tool names it; empty: unknown.
        count: devices of one replica.
        partition: the partition of a device, such as the MIG profile `1g.10gb`; empty: whole devices.
    """
    # Labellers name the products of partitions and of shared devices, and device plugins the resources of partitions.
    words = _slug(product).removeprefix(f"{_slug(vendor)}-").removesuffix("-shared").replace("-mig-", "-")
    return f"{_join(vendor, words or 'unknown', _slug(partition).removeprefix('mig-'))}x{count}"


def scale_class(single_class: str, count: int) -> str:
    """Return the class of a replica with `count` devices of a class; with 0, as on a host, the class itself.

    `scale_class("nvidia-l4x1", 2)` is `nvidia-l4x2`.
    """
    return f"{single_class.removesuffix(SINGLE)}x{count}" if count and single_class.endswith(SINGLE) else single_class


def find_single_class(device_class: str) -> str:
    """Return the class of one device of a class; that of a host stays."""
    return _COUNT.sub(SINGLE, device_class)


def name_host_class(chip: str, gpu_cores: int | None, memory_bytes: int | None) -> str:
    """Return the device class of an off-cluster host, such as `apple-m2-ultra-76c-192gb`.

    Args:
        chip: the chip as the host states it, for example `Apple M2 Ultra`; empty: unknown.
        gpu_cores: its GPU cores; None: unknown.
        memory_bytes: its memory; None: unknown.
    """
    cores = f"{gpu_cores}c" if gpu_cores else ""
    return _join(_shorten(chip) or "host-unknown", cores, f"{round(memory_bytes / 2**30)}gb" if memory_bytes else "")


def name_processor_class(model: str, cores: int) -> str:
    """Return the device class of a replica without devices, such as `cpu-amd-epyc-7763x8`.

    Args:
        model: the processor as the kernel names it; empty: unknown.
        cores: processor cores that the replica may use.
    """
    return f"{_join('cpu', _slug(_shorten(model)) or 'unknown')}x{cores}"


def _shorten(model: str) -> str:
    """Return the model of a processor without trademarks, clock, and words that all have."""
    return re.sub(r"\((r|tm)\)|\b(processor|cpu)\b|@.*", " ", model, flags=re.IGNORECASE)


def _join(*parts: str) -> str:
    """Join the parts that are not empty with dashes, cut to what a key may have."""
    return "-".join(slug for part in parts if (slug := _slug(part)))[:_MOST_CHARACTERS].rstrip("-.")


def _slug(text: str) -> str:
    """Return the text in lower case, with a dash for all that a key cannot have."""
    return _UNFIT.sub("-", text.lower()).strip("-.")
