"""The table of accelerators: the resources and tolerations with which a pod gets a device. A vendor is one entry.

The code that builds a pod names no vendor. The container images for a vendor are in the module of each engine.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from crds.meta import Accelerator, Toleration


class Vendor(NamedTuple):
    """One accelerator: its pods and its llama.cpp settings."""

    in_pods: bool
    """True when replicas are pods; else they are processes of an off-cluster host."""
    device_resource: str | None = None
    """Extended resource of the vendor's device plugin; None if there is no device to count."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that keep other pods off the vendor's nodes, by the vendor's convention."""
    gpu_layers: int | None = None
    """Layers that llama.cpp keeps in device memory; None leaves it to llama.cpp."""


_ALL_LAYERS = 999
"""More than any model has. A model that does not fit then fails, instead of silently running on the CPU."""

VENDORS: Final[Mapping[Accelerator, Vendor]] = MappingProxyType(
    {
        "cpu": Vendor(in_pods=True),
        "nvidia": Vendor(
            in_pods=True,
            device_resource="nvidia.com/gpu",
            tolerations=(Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule"),),
            gpu_layers=_ALL_LAYERS,
        ),
        "metal": Vendor(in_pods=False, gpu_layers=_ALL_LAYERS),
    }
)
