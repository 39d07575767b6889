"""`status.speeds`: what a service is expected to do on each device class, and which classes it refuses."""

from typing import Any

import msgspec
import pytest

from controller.models.served import Served
from controller.placement.device_classes import DeviceClasses
from controller.placement.queued_service import read_speeds
from controller.services.class_speeds import SpeedAssessor, assess_classes, cut_speeds
from crds.inferenceservice import InferenceService
from crds.meta import without_defaults
from crds.metalhost import MetalHostStatus
from crds.model import Model
from crds.placement import MOST_CLASSES, ClassSpeed, PlacementDemands
from devices.vendors import VENDORS
from fitness.correction_table import CorrectionGroup
from fitness.performance import MeasuredPerformance, hash_model
from fitness.performance_store import PerformanceTable, RecordKey, build_config_map, encode_record
from fitness.serving_devices import ServingDevices, describe_devices
from fitness.stated_hardware import describe_host
from tests.support.api_objects import GIB, as_service, model, service
from tests.support.service_decisions import KEY

L4 = describe_devices("nvidia", "NVIDIA-L4", memory_bytes=23034 * 2**20)
H100 = describe_devices("nvidia", "NVIDIA-H100-80GB-HBM3", memory_bytes=81559 * 2**20)
UNKNOWN = ServingDevices("nvidia", "nvidia-newx1", "New", memory_bytes=8 * GIB)
MAC = describe_host(MetalHostStatus(chip="Apple M4 Max", gpu_cores=40, memory_bytes=128 * GIB, budget_bytes=96 * GIB))
SERVED = Served(msgspec.convert(model(), Model), "llama.cpp")


def chat(**spec: Any) -> InferenceService:
    return as_service(service(**spec))


def assess(
    *classes: ServingDevices, number: int = 1, record: MeasuredPerformance | None = None, **spec: Any
) -> dict[str, ClassSpeed]:
    measured = {"nvidia-l4x1": record} if record is not None else {}
    speeds = assess_classes(chat(**spec), SERVED, number, classes, measured)
    return {speed.device_class: speed for speed in speeds}


def test_fastest_class_is_listed_first_and_unknown_ones_last() -> None:
    assert list(assess(UNKNOWN, L4, H100)) == ["nvidia-h100-80gb-hbm3x1", "nvidia-l4x1", "nvidia-newx1"]


def test_estimate_has_a_range_and_its_source() -> None:
    speed = assess(L4)["nvidia-l4x1"]
    assert (speed.source, speed.fit, speed.refusal) == ("Estimated", "perfect", None)
    assert speed.low is not None
    assert speed.high is not None
    assert speed.tokens_per_second is not None
    assert float(speed.low) < float(speed.tokens_per_second) < float(speed.high) < 3.1 * float(speed.low)


@pytest.mark.parametrize("amount", [-(1 << 63), -1, 0, 1, (1 << 50) + 1, (1 << 63) - 1])
def test_amounts_that_no_host_has_spoil_no_status(amount: int) -> None:
    forged = MetalHostStatus(
        chip="Forged", memory_bytes=amount, budget_bytes=amount, memory_bandwidth_bytes_per_second=amount
    )
    for status in (forged, msgspec.structs.replace(forged, memory_bytes=128 * GIB, budget_bytes=96 * GIB)):
        speeds = assess_classes(chat(), SERVED, 0, [describe_host(status)], {})
        # The API server refuses the whole status of a service if one of its values is invalid.
        assert msgspec.convert([without_defaults(speed) for speed in speeds], tuple[ClassSpeed, ...]) == speeds


def test_bandwidth_that_no_host_has_is_unknown() -> None:
    for bandwidth in (-1, 0, (1 << 50) + 1):
        assert (
            describe_host(
                MetalHostStatus(chip="Forged", memory_bandwidth_bytes_per_second=bandwidth)
            ).bandwidth_bytes_per_second
            is None
        )


def test_measurement_is_preferred_to_an_estimate_and_has_no_range() -> None:
    speed = assess(L4, record=MeasuredPerformance(tokens_per_second=12.34))["nvidia-l4x1"]
    assert (speed.tokens_per_second, speed.low, speed.high, speed.source) == ("12.3", None, None, "Measured")


def test_class_is_that_of_all_devices_of_a_replica() -> None:
    assert list(assess(L4, number=2)) == ["nvidia-l4x2"]
    assert list(assess(MAC, number=0)) == ["apple-m4-max-40c-128gb"]


@pytest.mark.parametrize(
    ("demands", "expected"),
    [
        ({}, {"nvidia-l4x1": None, "nvidia-newx1": None}),
        ({"minTokensPerSecond": 1}, {"nvidia-l4x1": None, "nvidia-newx1": "SpeedUnknown"}),
        ({"minTokensPerSecond": 100_000}, {"nvidia-l4x1": "TooSlow", "nvidia-newx1": "SpeedUnknown"}),
        ({"minFit": "perfect"}, {"nvidia-l4x1": None, "nvidia-newx1": None}),
    ],
)
def test_class_that_does_not_meet_the_demands_is_refused(
    demands: dict[str, Any], expected: dict[str, str | None]
) -> None:
    speeds = assess(L4, UNKNOWN, placement=demands)
    assert {name: speed.refusal for name, speed in speeds.items()} == expected


def test_class_that_fits_less_well_than_stated_is_refused() -> None:
    small = L4._replace(device_class="nvidia-smallx1", memory_bytes=2 * GIB)
    fits = {name: speed.fit for name, speed in assess(small, L4).items()}
    assert fits == {"nvidia-l4x1": "perfect", "nvidia-smallx1": "too_tight"}
    refused = {name: speed.refusal for name, speed in assess(small, L4, placement={"minFit": "good"}).items()}
    assert refused == {"nvidia-l4x1": None, "nvidia-smallx1": "TooTight"}
    assert {speed.refusal for speed in assess(small, L4).values()} == {None}, (
        "what is free decides whether it fits at all"
    )


def test_planner_reads_the_class_of_one_device() -> None:
    demands = PlacementDemands(min_tokens_per_second=1)
    profile = read_speeds(assess(L4, UNKNOWN, number=2, placement={"minTokensPerSecond": 1}).values(), demands)
    assert list(profile.tokens_per_second) == ["nvidia-l4x1"]
    assert profile.refusals == {"nvidia-newx1": "SpeedUnknown"}


def test_slowest_classes_are_left_out_of_a_long_list() -> None:
    many = [ClassSpeed(device_class=f"c{number}", tokens_per_second=f"{number}") for number in range(100)]
    kept = cut_speeds(many)
    assert (len(kept), kept[0].device_class, kept[-1].device_class) == (MOST_CLASSES, "c99", "c68")


def test_classes_that_are_accepted_outlast_others_in_a_long_list() -> None:
    slow = [
        ClassSpeed(device_class=f"slow{number}", tokens_per_second=f"{number + 1}") for number in range(MOST_CLASSES)
    ]
    fast = [
        ClassSpeed(device_class=f"tight{number}", tokens_per_second=f"{number + 100}", refusal="TooTight")
        for number in range(MOST_CLASSES)
    ]
    assert set(cut_speeds([*fast, *slow])) == set(slow)
    assert [speed.device_class for speed in cut_speeds([*fast, *slow[:30]])][:3] == ["tight31", "tight30", "slow29"]


def assessor(*classes: ServingDevices) -> tuple[SpeedAssessor, DeviceClasses, PerformanceTable]:
    device_classes, table = DeviceClasses(), PerformanceTable()
    for number, devices in enumerate(classes):
        device_classes.put(f"node/{number}", devices.vendor, devices)
    return SpeedAssessor(device_classes.list_classes, table, VENDORS), device_classes, table


def test_speeds_are_computed_again_only_when_something_changes() -> None:
    speed_assessor, classes, table = assessor(L4)
    stated = chat(hardware={"accelerator": "nvidia"})
    first = speed_assessor.assess(KEY, stated, "nvidia", SERVED)
    assert speed_assessor.assess(KEY, chat(hardware={"accelerator": "nvidia"}), "nvidia", SERVED) is first
    classes.put("node/2", "nvidia", H100)
    second = speed_assessor.assess(KEY, stated, "nvidia", SERVED)
    assert [speed.device_class for speed in second] == ["nvidia-h100-80gb-hbm3x1", "nvidia-l4x1"]
    model_hash = hash_model(SERVED.model, SERVED.runtime, stated.spec)
    record = encode_record(MeasuredPerformance(tokens_per_second=90_000.0))
    table.update(build_config_map(model_hash, {"nvidia-l4x1": record}))
    third = speed_assessor.assess(KEY, stated, "nvidia", SERVED)
    assert [(speed.device_class, speed.source) for speed in third] == [
        ("nvidia-l4x1", "Measured"),
        ("nvidia-h100-80gb-hbm3x1", "Estimated"),
    ]
    speed_assessor.forget(KEY)
    assert speed_assessor.assess(KEY, stated, "nvidia", SERVED) == third


def test_stated_active_share_counts_for_placement_as_for_its_benchmark() -> None:
    layout = model()["status"]["layout"] | {"expertOutputs": 8}
    stated: dict[str, Any] = {"totalParameters": 1000, "activeParameters": 100}
    speeds = {}
    for name, spec, status in (("stated", stated, {}), ("found", {}, stated), ("unknown", {}, {})):
        experts = msgspec.convert(model(status={"layout": layout, **status}, **spec), Model)
        (speed,) = assess_classes(chat(), Served(experts, "llama.cpp"), 1, [L4], {})
        speeds[name] = speed.tokens_per_second
    assert speeds["stated"] == speeds["found"] is not None
    assert speeds["unknown"] is None


def test_replica_that_cannot_be_and_a_partition_have_no_speeds() -> None:
    speed_assessor, _, _ = assessor(L4)
    stated = chat(hardware={"accelerator": "nvidia"})
    assert speed_assessor.assess(KEY, stated, "nvidia", None) == ()
    assert speed_assessor.assess(KEY, stated, None, SERVED) == ()
    sliced = chat(hardware={"accelerator": "nvidia", "resource": "nvidia.com/mig-1g.10gb"})
    assert speed_assessor.assess(KEY, sliced, "nvidia", SERVED) == ()


def correct(table: PerformanceTable, namespace: str, factor: float = 0.5, count: int = 4) -> None:
    """Store measurements of other models on an L4, with the estimates of their time."""
    record = MeasuredPerformance(
        tokens_per_second=100 * factor,
        estimated_tokens_per_second=100,
        accelerator="nvidia",
        runtime=SERVED.runtime,
    )
    for number in range(count):
        data = {RecordKey("nvidia-l4x1", namespace).encode(): encode_record(record)}
        table.update(build_config_map(f"{number:08x}", data))


def test_measurements_of_other_models_correct_an_estimate() -> None:
    speed_assessor, _, table = assessor(L4)
    stated = chat(hardware={"accelerator": "nvidia"})
    (first,) = speed_assessor.assess(KEY, stated, "nvidia", SERVED)
    assert (first.source, first.measurements) == ("Estimated", None)
    correct(table, KEY.namespace)
    (second,) = speed_assessor.assess(KEY, stated, "nvidia", SERVED)
    assert (second.source, second.measurements) == ("Corrected", 4)
    assert 0.5 < float(second.tokens_per_second or 0) / float(first.tokens_per_second or 1) < 0.7


@pytest.mark.parametrize(("namespace", "source"), [("other", "Estimated"), ("pomona-system", "Corrected")])
def test_measurements_of_another_tenant_correct_nothing(namespace: str, source: str) -> None:
    speed_assessor, _, table = assessor(L4)
    stated = chat(hardware={"accelerator": "nvidia"})
    speed_assessor.assess(KEY, stated, "nvidia", SERVED)
    correct(table, namespace)
    assert [speed.source for speed in speed_assessor.assess(KEY, stated, "nvidia", SERVED)] == [source]


def test_services_are_found_by_the_vendor_and_engine_that_corrects_them() -> None:
    speed_assessor, _, _ = assessor(L4)
    stated, own = chat(hardware={"accelerator": "nvidia"}), CorrectionGroup(KEY.namespace, "nvidia", SERVED.runtime)
    speed_assessor.assess(KEY, stated, "nvidia", SERVED)
    assert speed_assessor.list_corrected([own, own._replace(namespace="")]) == [KEY]
    assert speed_assessor.list_corrected([own._replace(namespace="other"), own._replace(vendor="amd")]) == []

    other = own._replace(runtime="vllm")
    speed_assessor.assess(KEY, stated, "nvidia", SERVED._replace(runtime="vllm"))
    assert (speed_assessor.list_corrected([own]), speed_assessor.list_corrected([other])) == ([], [KEY])
    speed_assessor.forget(KEY)
    assert speed_assessor.list_corrected([own, other]) == []
