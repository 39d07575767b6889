"""The table of accelerators: the resources, tolerations and node labels with which a pod gets a device.

A vendor is one entry. The code that builds a pod names no vendor, and an administrator's file may change entries or add
some (`devices/vendor_file.py`). The facts are those of the vendors' device plugins and labellers; research found many
guides wrong, so each entry says where its names come from.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from crds.meta import LABEL_PATTERN, Accelerator, Toleration
from crds.size import MIB

_NODE_DEVICE_VARIABLES: Final = frozenset(
    {
        *("AMD_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
        *("NVIDIA_IMEX_CHANNELS", "NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES"),
        # A container with it and without NVIDIA_REQUIRE_CUDA gets all devices, if NVIDIA_VISIBLE_DEVICES is not set.
        "CUDA_VERSION",
    }
)
"""Variables by which the vendors' container runtimes choose devices, also those that other pods have."""
_NODE_DEVICE_PREFIXES: Final = ("DOCKER_RESOURCE_", "HABANA_VISIBLE_DEVICES")
"""Prefixes of such variables. AMD's hook reads each variable with the first one, and NVIDIA's runtime the one that its
configuration names. Habana's runtime compares only the beginning of a name with the second one."""
_NVIDIA_PREFIX: Final = "NVIDIA_"
"""Prefix of all other variables of NVIDIA's runtime, by which a container gets InfiniBand, NVSwitch and other devices
beside its own (NVIDIA_MOFED, NVIDIA_NVSWITCH); later versions of the runtime may read more of them."""
_HARMLESS_VARIABLES: Final = frozenset({"NVIDIA_DISABLE_REQUIRE", "NVIDIA_TF32_OVERRIDE"})
"""Variables with this prefix that give a container nothing: the first one skips a check of the driver's version, and
only libraries of the engine read the second one."""
_ENGINE_DEVICE_VARIABLES: Final = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK"),
    }
)
"""Variables by which the vendors' libraries choose devices of the container: an engine would leave devices unused, or
find none. Guides set HIP_VISIBLE_DEVICES=all, with which an engine on AMD fails."""
_Resource = Annotated[str, Meta(max_length=253, pattern=r"^[a-z0-9][-a-z0-9.]*/[-_.A-Za-z0-9]+\*?$")]
_Label = Annotated[str, Meta(max_length=316, pattern=r"^([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9][-_.A-Za-z0-9]*$")]
_Name = Annotated[str, Meta(max_length=63, pattern=LABEL_PATTERN)]
_Image = Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^\S+$")]


class Exporter(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The vendor's own Prometheus exporter of device metrics.

    It is for the dashboards of users: only the vendor's page shows it, since Pomona does not scrape nodes.
    """

    port: Annotated[int, Meta(ge=1, le=65535)]
    utilization: str
    """Metric of the utilization, in percent."""
    memory_used: str
    """Metric of the memory in use."""
    memory_unit_bytes: Annotated[int, Meta(ge=1)] = 1


AttributeType = Literal["string", "int", "bool", "version"]


class DeviceDriver(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The vendor's driver for Dynamic Resource Allocation, by which pods claim devices with stated properties."""

    name: Annotated[str, Meta(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
    """Name in `spec.driver` of its ResourceSlices, and the domain of its attributes."""
    device_class: Annotated[str, Meta(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
    """DeviceClass that claims name."""
    attributes: dict[str, AttributeType]
    """Attributes that services may select by."""
    states_memory: bool = True
    """True if each device has the capacity `memory`."""
    whole_devices: dict[str, str] = {}
    """Values of attributes that a device must have in any case: its class may have partitions or sick devices, too."""


CLAIMED: Final = "]"
"""Last character of the name by which the queue counts devices that a claim selects; no resource of a node has it."""


class Vendor(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """One accelerator, as pods get it."""

    in_pods: bool = True
    """True when replicas are pods; else they are processes of an off-cluster host."""
    resource: _Resource | None = None
    """Extended resource of the vendor's device plugin; None if there is no device to count."""
    further_resources: tuple[_Resource, ...] = ()
    """Further resources that spec.hardware.resource may name, such as partitions; a `*` at the end stands for the rest
    of the name."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that keep other pods off the vendor's nodes, by the vendor's convention. Taints of devices that are sick
    or being changed are never here."""
    product_label: _Label | None = None
    """Node label with the name of the product, which spec.hardware.products is compared with."""
    family_label: _Label | None = None
    """Node label with the architecture of the devices, such as volta."""
    memory_label: _Label | None = None
    """Node label with the memory of one device."""
    memory_values: dict[str, Annotated[int, Meta(ge=1)]] = {}
    """MiB of each value that the memory label may have; empty: its value is a number of MiB."""
    shared_label: _Label | None = None
    """Node label by which a node says that several pods share a device."""
    shared_values: tuple[str, ...] = ()
    """Values of `shared_label` with which the memory of a device is not one pod's own."""
    limited_values: tuple[str, ...] = ()
    """Those of them with which no pod can take more than its share of the memory."""
    replicas_label: _Label | None = None
    """Node label with the number of pods that share each device."""
    shared_resource: _Resource | None = None
    """One of `further_resources`, by which a service asks for a part of a shared device."""
    runtime_class: _Name | None = None
    environment: dict[str, str] = {}
    """Variables of every container with a device; none chooses devices, but some may give others beside them."""
    supplemental_groups: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    """Groups that own the device files, for containers without root."""
    shared_memory_mib: Annotated[int, Meta(ge=64)] = 8192
    """Limit of /dev/shm for each device, or for the processor, for engines whose processes exchange tensors there."""
    hugepages_mib: Annotated[int, Meta(ge=0)] = 0
    """Memory in pages of 2 MiB that each device needs."""
    images: dict[str, _Image] = {}
    """Container image by engine, where it differs from the engine's own default or the engine has none."""
    exporter: Exporter | None = None
    """The vendor's own exporter; None: it has none, or none is documented."""
    driver: DeviceDriver | None = None
    """The vendor's DRA driver; None: devices cannot be claimed."""

    @property
    def has_devices(self) -> bool:
        """True if models run on devices of this vendor, false if they run on the processor."""
        return self.resource is not None or not self.in_pods

    def offers(self, resource: str) -> bool:
        """Return True if devices of this vendor are counted by this resource.

        It is the vendor's own or a further resource, which may be a pattern that ends in `*`, or the name by which the
        queue counts devices that a claim selects (Dynamic Resource Allocation): it begins with that of the driver.
        """
        if resource == self.resource:
            return True
        # CLAIMED: the last character of the queue's name for claimed devices, which no resource of a node has.
        if resource.endswith(CLAIMED):
            return self.driver is not None and resource.startswith(f"{self.driver.name}/")
        return any(
            resource == further_resource
            or (further_resource.endswith("*") and resource.startswith(further_resource[:-1]))
            for further_resource in self.further_resources
        )


Vendors = Mapping[Accelerator, Vendor]
"""The table: entries by the name that spec.hardware.accelerator states."""


def explain_device_variable(name: str) -> str | None:
    """Return why neither a service nor a vendor may set a variable that chooses devices; None for any other."""
    # Variables that container runtimes of nodes read, then those that libraries in the container read.
    if name in _NODE_DEVICE_VARIABLES or name.startswith(_NODE_DEVICE_PREFIXES):
        return "by which a node would give the container devices of other pods"
    if name in _ENGINE_DEVICE_VARIABLES:
        return "which overrides the device plugin's choice of devices"
    return None


def is_runtime_variable(name: str) -> bool:
    """Return whether NVIDIA's container runtime may read a variable, so that only an administrator may set it."""
    return name.startswith(_NVIDIA_PREFIX) and name not in _HARMLESS_VARIABLES


def _tolerate(key: str) -> tuple[Toleration, ...]:
    """Return a toleration of the taint with this key, whatever its value."""
    return (Toleration(key=key, operator="Exists", effect="NoSchedule"),)


CPU: Final = Vendor(shared_memory_mib=4096)

VENDORS: Final[Vendors] = MappingProxyType(
    {
        "cpu": CPU,
        # Labels: GPU feature discovery. `gpu.memory` is a whole number of MiB, and that of a slice under MIG "single".
        "nvidia": Vendor(
            resource="nvidia.com/gpu",
            further_resources=("nvidia.com/gpu.shared", "nvidia.com/mig-*"),
            tolerations=_tolerate("nvidia.com/gpu"),
            product_label="nvidia.com/gpu.product",
            family_label="nvidia.com/gpu.family",
            memory_label="nvidia.com/gpu.memory",
            shared_label="nvidia.com/gpu.sharing-strategy",
            shared_values=("time-slicing", "mps"),
            limited_values=("mps",),
            replicas_label="nvidia.com/gpu.replicas",
            shared_resource="nvidia.com/gpu.shared",
            exporter=Exporter(
                port=9400,
                utilization="DCGM_FI_DEV_GPU_UTIL",
                memory_used="DCGM_FI_DEV_FB_USED",
                memory_unit_bytes=MIB,
            ),
            # The class selects whole GPUs; ResourceSlices of the driver have MIG devices, too.
            driver=DeviceDriver(
                name="gpu.nvidia.com",
                device_class="gpu.nvidia.com",
                attributes={
                    **dict.fromkeys(("productName", "brand", "architecture"), "string"),
                    **dict.fromkeys(("cudaComputeCapability", "cudaDriverVersion", "driverVersion"), "version"),
                },
                whole_devices={"type": "gpu"},
            ),
        ),
        # Labels: AMD's node labeller, whose memory is text such as 192G. HIP_VISIBLE_DEVICES=all is not valid.
        "amd": Vendor(
            resource="amd.com/gpu",
            further_resources=("amd.com/spx_*", "amd.com/dpx_*", "amd.com/qpx_*", "amd.com/cpx_*"),
            tolerations=_tolerate("amd.com/gpu"),
            product_label="amd.com/gpu.product-name",
            memory_label="amd.com/gpu.vram",
            memory_values={f"{gib}G": gib * 1024 for gib in (8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 288)},
            # The groups video and render as Debian and Ubuntu number them.
            supplemental_groups=(44, 109, 110, 992, 993),
            exporter=Exporter(
                port=5000, utilization="gpu_gfx_activity", memory_used="gpu_used_vram", memory_unit_bytes=MIB
            ),
            # The class has partitions, too.
            driver=DeviceDriver(
                name="gpu.amd.com",
                device_class="gpu.amd.com",
                attributes=dict.fromkeys(("productName", "family", "deviceID", "partitionProfile"), "string"),
                whole_devices={"type": "amdgpu"},
            ),
        ),
        # HABANA_VISIBLE_DEVICES is the device plugin's: with `all` a pod would see the cards of others.
        "intel-gaudi": Vendor(
            resource="habana.ai/gaudi",
            tolerations=_tolerate("habana.ai/gaudi"),
            environment={"OMPI_MCA_btl_vader_single_copy_mechanism": "none"},
            hugepages_mib=11876,
            exporter=Exporter(
                port=41611, utilization="habanalabs_utilization", memory_used="habanalabs_memory_used_bytes"
            ),
            driver=DeviceDriver(
                name="gaudi.intel.com",
                device_class="gaudi.intel.com",
                attributes={"model": "string", "healthy": "bool"},
                states_memory=False,
                whole_devices={"healthy": "true"},
            ),
        ),
        "intel": Vendor(
            resource="gpu.intel.com/i915",
            further_resources=("gpu.intel.com/xe",),
            supplemental_groups=(44, 109, 110, 992, 993),
            driver=DeviceDriver(
                name="gpu.intel.com",
                device_class="gpu.intel.com",
                attributes=dict.fromkeys(("model", "family"), "string"),
            ),
        ),
        "metal": Vendor(in_pods=False),
    }
)
