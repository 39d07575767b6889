"""`NodeFitness`: the hardware of a node, as its node agent reads it; a MetalHost states the same of a host."""

from typing import Annotated, Final

from msgspec import Meta

from crds.meta import AS_SET, ApiObject, ApiStruct, Conditions, Count, ShortText, Time

MOST_DEVICES: Final = 64
"""Devices that a node reports at most; more are partitions of a few."""
STALE_SECONDS: Final = 150.0
"""A reader that has seen no new `observedAt` for this time takes the facts as stale: two heartbeats were missed."""

_Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]


class NodeDevice(ApiStruct, frozen=True):
    """One accelerator device of a node, or one partition of it."""

    id: Annotated[ShortText, "UUID or PCI address by which the vendor names the device."]
    product: Annotated[ShortText, "Product, as the vendor names it, for example NVIDIA H100 80GB HBM3."] = ""
    architecture: Annotated[ShortText, "Architecture, for example sm_90 or gfx942."] = ""
    partition: Annotated[
        ShortText, "Partition that this entry is, for example the MIG profile 1g.10gb; empty: a whole device."
    ] = ""
    memory_bytes: Annotated[_Bytes | None, "Memory of the device, in bytes."] = None
    free_bytes: Annotated[
        _Bytes | None, "Memory of the device that nothing uses, in bytes, updated in steps of about 1 GiB."
    ] = None
    memory_bandwidth_bytes_per_second: Annotated[
        _Bytes | None, "Memory bandwidth in bytes per second, by its maker or by the vendor's tool."
    ] = None
    utilization_percent: Annotated[
        Annotated[int, Meta(ge=0, le=100)] | None,
        "Utilization in percent when it was last read, updated in steps of about 10.",
    ] = None
    temperature_celsius: Annotated[
        Annotated[int, Meta(ge=-50, le=200)] | None, "Temperature in degrees Celsius, updated in steps of about 5."
    ] = None
    links: Annotated[
        list[ShortText],
        Meta(max_length=32),
        "Devices of this node that it reaches by a link of its own, such as NVLink, by their id.",
    ] = []


class NodeFitnessStatus(ApiStruct, frozen=True):
    """Observed hardware of a node. An unknown value is absent, never 0.

    A value that changes all the time is written when it has changed by at least one step, and with each heartbeat.
    """

    observed_at: Annotated[
        Time | None,
        "Heartbeat: when the node agent last read these facts, at least once a minute. Facts that are older than "
        "150 seconds are stale, and no replica is placed by them.",
    ] = None
    vendor: Annotated[ShortText, "Vendor of the devices: nvidia, amd, intel-gaudi or intel; cpu if there are none."] = (
        ""
    )
    device_class: Annotated[
        ShortText,
        "Class of a single device, or of the processor if there are none, for example nvidia-h100-80gb-hbm3x1. "
        "Measured speeds are kept by it.",
    ] = ""
    driver: Annotated[ShortText, "Version of the driver of the devices."] = ""
    source: Annotated[
        ShortText,
        "Where the facts of the devices come from: nvidia-smi, rocm-smi, hl-smi, sysfs, labels (of another "
        "labeller of nodes), or proc if there are no devices.",
    ] = ""
    devices: Annotated[list[NodeDevice], Meta(max_length=MOST_DEVICES), "Accelerator devices of the node."] = []
    int4: Annotated[bool | None, "True if the devices compute with 4-bit integers."] = None
    fp8: Annotated[bool | None, "True if the devices compute with 8-bit floating-point numbers."] = None
    processor: Annotated[ShortText, "Model of the processor, as the kernel names it."] = ""
    cpu_cores: Annotated[Count | None, "Number of processor cores."] = None
    cpu_features: Annotated[
        list[ShortText],
        Meta(max_length=32),
        "Instructions of the processor that engines use, for example avx2, avx512f, amx_tile, sve.",
        AS_SET,
    ] = []
    architecture: Annotated[ShortText, "Processor architecture, for example x86_64."] = ""
    memory_bytes: Annotated[_Bytes | None, "Memory of the node, in bytes."] = None
    available_bytes: Annotated[
        _Bytes | None, "Memory of the node that is available, in bytes, updated in steps of about 1 GiB."
    ] = None
    memory_bandwidth_bytes_per_second: Annotated[
        _Bytes | None, "Memory bandwidth of the processor, measured when the agent started."
    ] = None
    disk_bytes: Annotated[_Bytes | None, "Size of the file system of the node's pods, in bytes."] = None
    disk_free_bytes: Annotated[
        _Bytes | None, "Free part of that file system, in bytes, updated in steps of about 1 GiB."
    ] = None
    agent_version: Annotated[ShortText, "Version of the node agent."] = ""
    conditions: Conditions = []


class NodeFitness(ApiObject, frozen=True):
    """The hardware of a node, and a heartbeat; its name is that of the Node."""

    status: Annotated[NodeFitnessStatus, "Facts that the node agent reports."] = NodeFitnessStatus()
