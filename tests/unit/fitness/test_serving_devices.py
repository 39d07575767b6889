"""Figures of a product fill in what a probe could not read, and never contradict it."""

import pytest

from crds.metalhost import MetalHostStatus
from fitness.serving_devices import describe_devices
from fitness.stated_hardware import describe_host

GIB, MIB = 2**30, 2**20


def test_devices_have_the_figures_of_their_product() -> None:
    devices = describe_devices("nvidia", "NVIDIA H100 80GB HBM3", 2, free_bytes=40 * GIB)
    assert devices.device_class == "nvidia-h100-80gb-hbm3x2"
    assert devices.bandwidth_bytes_per_second == 3_350 * 10**9
    assert devices.flops == 989e12
    assert (devices.memory_bytes, devices.free_bytes, devices.device_count) == (81_559 * MIB, 40 * GIB, 2)


def test_memory_tells_products_of_one_name_apart() -> None:
    sizes = (8192, 12_288, None)
    described = [describe_devices("nvidia", "GeForce RTX 3060", memory_bytes=siz and siz * MIB) for siz in sizes]
    assert [devices.bandwidth_bytes_per_second for devices in described] == [240 * 10**9, 360 * 10**9, None]


def test_probed_figures_count_more_than_those_of_the_product() -> None:
    devices = describe_devices("amd", "AMD Instinct MI300X", memory_bytes=190 * GIB, bandwidth=5 * 10**12)
    assert (devices.memory_bytes, devices.bandwidth_bytes_per_second) == (190 * GIB, 5 * 10**12)


def test_partition_has_its_share_of_the_bandwidth() -> None:
    devices = describe_devices("nvidia", "NVIDIA A100-SXM4-40GB", partition="1g.5gb", memory_bytes=5 * GIB)
    assert devices.bandwidth_bytes_per_second == pytest.approx(1555e9 / 8, rel=0.01)
    assert devices.flops is None
    assert devices.device_class == "nvidia-a100-sxm4-40gb-1g.5gbx1"
    unknown = describe_devices("nvidia", "NVIDIA A100-SXM4-40GB", partition="1g.5gb")
    assert (unknown.memory_bytes, unknown.bandwidth_bytes_per_second) == (None, None)


def test_unlisted_product_has_what_was_probed_only() -> None:
    devices = describe_devices("nvidia", "NVIDIA Titan of Tomorrow", memory_bytes=GIB)
    assert (devices.memory_bytes, devices.bandwidth_bytes_per_second, devices.flops) == (GIB, None, None)


def test_host_has_the_bandwidth_of_its_chip() -> None:
    status = MetalHostStatus(chip="Apple M4 Max", gpu_cores=40, memory_bytes=64 * GIB, budget_bytes=48 * GIB)
    devices = describe_host(status)
    assert (devices.vendor, devices.device_class) == ("metal", "apple-m4-max-40c-64gb")
    assert (devices.memory_bytes, devices.bandwidth_bytes_per_second) == (48 * GIB, 546 * 10**9)
    assert describe_host(MetalHostStatus(chip="Apple M9")).bandwidth_bytes_per_second is None
