"""The hardware of a node as cluster objects state it: a node agent's token changes no class that labels state."""

from crds.nodefitness import NodeDevice, NodeFitnessStatus
from devices.vendors import VENDORS
from fitness.stated_hardware import describe_node

L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"}


def claim(product: str, memory_bytes: int, bandwidth: int) -> NodeFitnessStatus:
    device = NodeDevice(
        id="GPU-1", product=product, memory_bytes=memory_bytes, memory_bandwidth_bytes_per_second=bandwidth
    )
    return NodeFitnessStatus(
        vendor="nvidia",
        device_class="nvidia-h100-80gb-hbm3x1",
        devices=[device],
        processor="AMD EPYC 7763",
        cpu_cores=8,
    )


def test_labels_of_the_vendor_outrank_what_an_agent_claims() -> None:
    """One forged report made a whole device class unusable, or drew all services to its node."""
    hardware = describe_node(L4, claim("NVIDIA H100 80GB HBM3", 1, 1), VENDORS)
    assert (hardware.single_class, hardware.memory_bytes) == ("nvidia-l4x1", (23034 * 2**20,))
    assert hardware.processor_class == "cpu-amd-epyc-7763x8"
    assert hardware.describe_replica(1).bandwidth_bytes_per_second == 300 * 10**9


def test_bandwidth_of_a_device_is_that_of_its_product_alone() -> None:
    listed = describe_node({}, claim("NVIDIA H100 80GB HBM3", 80 << 30, 1 << 50), VENDORS).describe_replica(1)
    assert listed.bandwidth_bytes_per_second == 3350 * 10**9
    unknown = describe_node({}, claim("Imaginary", 80 << 30, 1 << 50), VENDORS).describe_replica(1)
    assert unknown.bandwidth_bytes_per_second is None


def test_architecture_is_that_of_the_label_of_the_labeller() -> None:
    labels = {**L4, "nvidia.com/gpu.family": "ada-lovelace"}
    for claimed in (None, claim("NVIDIA L4", 1, 1)):
        assert describe_node(labels, claimed, VENDORS).describe_replica(1).family == "ada-lovelace"
    assert describe_node(L4, None, VENDORS).describe_replica(1).family == ""
