"""Devices by labels of other labellers, with values as those labellers write them."""

import pytest

from crds.nodefitness import MOST_DEVICES
from crds.size import MIB
from devices.node.labels import read_labels
from devices.node.vendor_reading import VendorReading

GIB = 2**30
# A node with GPU feature discovery, as a user printed it (`kubectl describe node`).
SHARED_P106 = {
    "nvidia.com/cuda.driver.major": "470",
    "nvidia.com/cuda.driver.minor": "199",
    "nvidia.com/cuda.driver.rev": "02",
    "nvidia.com/gpu.compute.major": "6",
    "nvidia.com/gpu.compute.minor": "1",
    "nvidia.com/gpu.count": "1",
    "nvidia.com/gpu.family": "pascal",
    "nvidia.com/gpu.memory": "6080",
    "nvidia.com/gpu.product": "NVIDIA-P106-100-SHARED",
    "nvidia.com/gpu.replicas": "4",
}
H100 = {
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "nvidia.com/gpu.memory": "81559",
    "nvidia.com/gpu.count": "8",
    "nvidia.com/cuda.driver-version.full": "550.54.15",
}
# AMD's documentation of its node labeller.
MI300X = {
    "amd.com/gpu.cu-count": "304",
    "amd.com/gpu.device-id": "74a1",
    "amd.com/gpu.family": "AI",
    "amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM",
    "amd.com/gpu.simd-count": "1216",
    "amd.com/gpu.vram": "192G",
}


def read(labels: dict[str, str]) -> VendorReading:
    reading = read_labels(labels)
    assert reading is not None
    return reading


def test_gpu_is_stated_by_gpu_feature_discovery() -> None:
    reading = read(SHARED_P106)
    (device,) = reading.devices
    assert (device.product, device.architecture, device.memory_bytes) == ("NVIDIA-P106-100", "sm_61", 6080 * MIB)
    assert (reading.vendor, reading.source, reading.driver) == ("nvidia", "labels", "470.199.02")


def test_architecture_comes_from_the_product_if_no_label_states_it() -> None:
    reading = read(H100)
    assert len({device.id for device in reading.devices}) == 8
    assert {device.architecture for device in reading.devices} == {"sm_90"}
    assert reading.driver == "550.54.15"


def test_partition_is_in_the_product() -> None:
    labels = H100 | {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "nvidia.com/gpu.memory": "9984"}
    device = read(labels).devices[0]
    assert (device.product, device.partition) == ("NVIDIA-H100-80GB-HBM3", "1g.10gb")
    assert device.memory_bytes == 9984 * MIB


def test_memory_comes_from_the_product_if_its_label_is_no_size() -> None:
    labels = {"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.count": "1"}
    for memory in ("0", "abc"):
        assert read(labels | {"nvidia.com/gpu.memory": memory}).devices[0].memory_bytes == 15 * GIB


def test_gpu_is_stated_by_amds_labeller() -> None:
    reading = read(MI300X)
    (device,) = reading.devices
    assert (device.architecture, device.memory_bytes) == ("gfx942", 192 * GIB)
    assert "no label states how many devices of AMD" in reading.problems[0]


def test_amds_labeller_states_a_count_beside_the_value() -> None:
    reading = read(MI300X | {"beta.amd.com/gpu.device-id.74a1": "8"})
    assert (len(reading.devices), reading.problems) == (8, ())


def test_gaudi_is_stated_by_node_feature_discovery() -> None:
    reading = read({"intel.feature.node.kubernetes.io/gaudi": "true"})
    assert (reading.vendor, reading.devices[0].memory_bytes) == ("intel-gaudi", None)


def test_intels_card_is_stated_by_its_id_and_an_integrated_gpu_is_not() -> None:
    card = {"gpu.intel.com/device-id.0380-56c0.count": "2", "intel.feature.node.kubernetes.io/gpu": "true"}
    assert [device.product for device in read(card).devices] == ["Data Center GPU Flex 170"] * 2
    integrated = {"gpu.intel.com/device-id.0300-5917.count": "1", "intel.feature.node.kubernetes.io/gpu": "true"}
    assert read_labels(integrated) is None


@pytest.mark.parametrize("count", ["", "many", "0", "-1", "99999999999"])
def test_count_that_is_none_is_a_problem(count: str) -> None:
    reading = read(H100 | {"nvidia.com/gpu.count": count})
    assert (len(reading.devices), len(reading.problems)) == (1, 1)


def test_devices_of_a_liar_are_bounded() -> None:
    assert len(read(H100 | {"nvidia.com/gpu.count": "65536"}).devices) == MOST_DEVICES + 1


def test_labels_without_devices_state_none() -> None:
    assert read_labels({"kubernetes.io/hostname": "n", "nvidia.com/gpu.present": "true"}) is None
