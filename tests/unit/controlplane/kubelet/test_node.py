"""A node's report of itself, and the addresses that it gives to pods."""

from datetime import UTC, datetime

import pytest

from tests.controlplane.kubelet.node import NodeSpec, manifest, status
from tests.controlplane.kubelet.podnet import FIRST, LAST, PodNetwork
from tests.controlplane.network import NetworkError

NOW = datetime(2026, 11, 21, 13, 0, tzinfo=UTC)
NODE = NodeSpec("gpu-1", "10.77.0.11", {"cpu": "8", "nvidia.com/gpu": "2"}, {"pool": "a"})


def test_a_node_has_its_labels_beside_the_well_known_ones() -> None:
    labels = manifest(NODE, status(NODE, NOW, NOW))["metadata"]["labels"]
    assert labels["pool"] == "a"
    assert labels["kubernetes.io/hostname"] == "gpu-1"


def test_node_reports_capacity_address_and_health() -> None:
    report = status(NODE, NOW, NOW)
    assert report["capacity"] == report["allocatable"] == {"cpu": "8", "nvidia.com/gpu": "2"}
    assert report["addresses"][0] == {"type": "InternalIP", "address": "10.77.0.11"}
    assert {item["type"]: item["status"] for item in report["conditions"]}["Ready"] == "True"


def test_pods_never_share_an_address_and_a_freed_one_is_not_reused_at_once() -> None:
    network = PodNetwork("10.77.1")
    first, second = network.allocate("a"), network.allocate("b")
    assert (first, second) == (f"10.77.1.{FIRST}", f"10.77.1.{FIRST + 1}")
    assert network.allocate("a") == first
    network.release("a")
    assert network.allocate("c") == f"10.77.1.{FIRST + 2}"


def test_a_full_subnet_is_an_error_and_freed_addresses_come_back() -> None:
    network = PodNetwork("10.77.1")
    taken = [network.allocate(str(number)) for number in range(FIRST, LAST + 1)]
    assert len(set(taken)) == LAST - FIRST + 1
    with pytest.raises(NetworkError, match="no address is free"):
        network.allocate("one more")
    network.release(str(FIRST))
    assert network.allocate("one more") == f"10.77.1.{FIRST}"
