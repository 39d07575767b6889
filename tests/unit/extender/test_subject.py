"""The model of a pod is found by its labels, within its own namespace."""

from typing import Any

import msgspec
import pytest

from crds.inferenceservice import InferenceService
from crds.meta import LABEL_ACCELERATOR
from crds.model import Model
from devices.vendors import VENDORS
from extender.subject import (
    DeviceDemand,
    ScoringSubject,
    ServedModel,
    describe_subject,
    find_stated_hash,
    read_demand,
)
from extender.wire import PodFacts
from fitness.performance_store import LABEL_MODEL_HASH
from tests.support import api_objects
from tests.unit.extender.extender_objects import GIB, HASH, pod


def served(status: Any = None, **spec: Any) -> ServedModel:
    """Return a service of the tiny model."""
    fields = {"runtime": "vllm", "accelerator": "nvidia", "deviceMemoryBytes": 30 * GIB, **(status or {})}
    service = msgspec.convert(api_objects.service(status=fields, **spec), InferenceService)
    return ServedModel(msgspec.convert(api_objects.model(), Model), service, service.status.runtime)


def describe(pod_facts: PodFacts, found: ServedModel | None) -> ScoringSubject:
    return describe_subject(HASH, pod_facts, read_demand(pod_facts, VENDORS), found)


@pytest.mark.parametrize("stated", ["", "x", HASH.upper(), HASH + "/..", "0" * 65, "0" * 7, "../secret", HASH + "\n"])
def test_label_that_is_no_hash_names_no_model(stated: str) -> None:
    assert find_stated_hash(pod({LABEL_MODEL_HASH: stated})) == ""
    assert find_stated_hash(pod({LABEL_MODEL_HASH: HASH})) == HASH
    assert find_stated_hash(pod()) == ""


@pytest.mark.parametrize(
    ("devices", "demand"),
    [
        ({"nvidia.com/gpu": 2}, DeviceDemand("nvidia", 2)),
        ({"nvidia.com/mig-1g.10gb": 1}, DeviceDemand("nvidia", 1, "1g.10gb")),
        ({"nvidia.com/gpu.shared": 1}, DeviceDemand("nvidia", 1)),
        ({"example.com/fpga": 1, "habana.ai/gaudi": 8}, DeviceDemand("intel-gaudi", 8)),
        ({"example.com/fpga": 1}, DeviceDemand()),
        ({}, DeviceDemand()),
    ],
)
def test_devices_are_those_of_a_vendor(devices: dict[str, int], demand: DeviceDemand) -> None:
    assert read_demand(PodFacts("team", {}, devices), VENDORS) == demand


def test_replica_of_a_service_has_the_devices_and_the_need_of_the_service() -> None:
    expected = ScoringSubject(HASH, "team", "nvidia", 2, "", 30 * GIB, is_served=True)
    assert describe(pod(nvidia=2), served()) == expected
    assert describe(pod(), served(hardware={"count": 2})) == expected  # claimed, not requested


@pytest.mark.parametrize(
    ("pod_facts", "found", "accelerator"),
    [
        (pod(amd=1), served(), "amd"),
        (pod({LABEL_ACCELERATOR: "amd"}), served({"accelerator": "nvidia,amd"}), "amd"),
        (pod(), served({"accelerator": ""}, hardware={"accelerator": "intel"}), "intel"),
        (pod(), served({"accelerator": "cpu"}), "cpu"),
        (PodFacts("team", {}, {"nvidia.com/mig-1g.10gb": 1}), served(), "nvidia"),
        (pod(nvidia=1), served({"accelerator": "nvidia,amd"}), "nvidia"),
    ],
)
def test_need_that_is_of_other_devices_is_unknown(pod_facts: PodFacts, found: ServedModel, accelerator: str) -> None:
    asked = describe(pod_facts, found)
    if found.service.status.accelerator:
        assert asked.need_bytes is None
    assert (asked.accelerator, asked.is_served) == (accelerator, True)


def test_replica_without_devices_counts_none() -> None:
    assert describe(pod(), served({"accelerator": "cpu"})).device_count == 0


def test_pod_of_others_has_no_need() -> None:
    assert describe(pod(nvidia=1), None) == ScoringSubject(HASH, "team", "nvidia", 1)
