"""The status of a NodeFitness states facts only, and is written once a minute or when the devices change."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from crds import validation
from crds.meta import API_VERSION
from crds.nodefitness import NodeDevice, NodeFitnessStatus
from devices.node_hardware import HardwareReading
from kube.apply import merge_conditions
from node_agent.last_devices import ReportedHardware, keep_last_devices
from node_agent.node_fitness import (
    ReportProblems,
    build_condition,
    build_object,
    encode_status,
    is_due,
)
from node_agent.node_labels import LabelConflict

GIB = 2**30
NOW = datetime(2026, 11, 26, 22, 0, tzinfo=UTC)
DEVICE = NodeDevice(id="GPU-1", product="NVIDIA L4", memory_bytes=24 * GIB, free_bytes=20 * GIB, temperature_celsius=50)
HARDWARE = NodeFitnessStatus(
    observed_at="2026-11-26T22:00:00Z",
    vendor="nvidia",
    source="nvidia-smi",
    device_class="nvidia-l4x1",
    driver="580.1",
    devices=[DEVICE],
    memory_bytes=64 * GIB,
    available_bytes=32 * GIB,
)
CPU = NodeFitnessStatus(vendor="cpu", source="proc", device_class="c")
CONFLICT = LabelConflict("inference.pomona.dev/gpu.count", "2", "8", "kubectl-label")


def report(*problems: str) -> ReportedHardware:
    return keep_last_devices(None, HardwareReading(HARDWARE, problems), 0.0)


def encode(hardware: NodeFitnessStatus = HARDWARE, written: dict[str, Any] | None = None) -> dict[str, Any]:
    return encode_status(hardware, written or {})


def test_status_is_valid_by_its_schema_and_has_no_unknown_value() -> None:
    body = encode()
    body["conditions"] = merge_conditions([], [build_condition(report(), ReportProblems())], NOW)
    node = {"metadata": {"name": "gpu-1", "uid": "5e3c0e1c-6d0e-4ab5-9a2e-0c5d0a2a0f10"}}
    manifest = {"apiVersion": API_VERSION, "kind": "NodeFitness", **build_object(node), "status": body}
    assert validation.problems(manifest) == []
    assert "diskBytes" not in body
    assert "memoryBandwidthBytesPerSecond" not in body


def test_nodefitness_is_deleted_with_its_node() -> None:
    node = {"metadata": {"name": "gpu-1", "uid": "u", "labels": {"secret": "no"}}}
    metadata = build_object(node)["metadata"]
    assert metadata["ownerReferences"] == [{"apiVersion": "v1", "kind": "Node", "name": "gpu-1", "uid": "u"}]


def test_message_of_a_liar_is_bounded() -> None:
    assert len(build_condition(report("x" * 5000), ReportProblems())["message"]) == 1000


@pytest.mark.parametrize(
    ("changes", "written"),
    [
        ({"available_bytes": 31 * GIB + 1}, False),
        ({"available_bytes": 31 * GIB}, True),
        ({"devices": [structs.replace(DEVICE, free_bytes=20 * GIB - 1)]}, False),
        ({"devices": [structs.replace(DEVICE, free_bytes=19 * GIB)]}, True),
        ({"devices": [structs.replace(DEVICE, temperature_celsius=54)]}, False),
        ({"devices": [structs.replace(DEVICE, temperature_celsius=55)]}, True),
    ],
)
def test_value_is_written_once_it_has_changed_by_its_step(changes: dict[str, Any], written: bool) -> None:
    before = encode()
    assert (encode(structs.replace(HARDWARE, **changes), before) != before) is written


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": []},
        {"devices": [DEVICE, structs.replace(DEVICE, id="GPU-2")]},
        {"devices": [structs.replace(DEVICE, partition="1g.10gb")]},
        {"driver": "580.2"},
        {"vendor": "amd"},
    ],
)
def test_change_of_devices_is_written_at_once(changes: dict[str, Any]) -> None:
    assert is_due(encode(structs.replace(HARDWARE, **changes)), encode(), 0.0, 30.0)


@given(available=st.integers(0, 64 * GIB), temperature=st.integers(0, 120), silent=st.floats(0, 44.9))
def test_nothing_else_is_written_beside_the_heartbeat(available: int, temperature: int, silent: float) -> None:
    device = structs.replace(DEVICE, temperature_celsius=temperature, free_bytes=available)
    body = encode(structs.replace(HARDWARE, available_bytes=available, devices=[device]), encode())
    assert not is_due(body, encode(), silent, 30.0)
    assert is_due(body, encode(), 60.0, 30.0)


def test_turn_of_the_condition_is_written_at_once_and_another_reason_is_not() -> None:
    def at(status: str, reason: str) -> dict[str, Any]:
        return {**encode(), "conditions": [{"type": "Ready", "status": status, "reason": reason}]}

    assert is_due(at("False", "ToolFailed"), at("True", "HardwareRead"), 0.0, 30.0)
    assert not is_due(at("False", "ToolFailed"), at("False", "LabelConflict"), 0.0, 30.0)


def test_condition_is_true_only_without_problems() -> None:
    assert build_condition(report(), ReportProblems())["reason"] == "HardwareRead"


def test_condition_names_every_problem_and_the_worst_first() -> None:
    condition = build_condition(
        report("nvidia-smi hung"), ReportProblems((CONFLICT,), labels_refused="apply nodes: 403")
    )
    assert (condition["status"], condition["reason"]) == ("False", "ToolFailed")
    for words in ("nvidia-smi hung", "label inference.pomona.dev/gpu.count is '8' by kubectl-label", "nodes: 403"):
        assert words in condition["message"]
    assert build_condition(report(), ReportProblems((CONFLICT,)))["reason"] == "LabelConflict"
    assert build_condition(None, ReportProblems((), "", "the probe hangs"))["reason"] == "ProbeFailed"


def test_condition_says_since_when_devices_are_kept_or_unknown() -> None:
    failed = HardwareReading(CPU, ("nvidia-smi hung",))
    kept = keep_last_devices(report(), failed, 30.0)
    assert "devices are those of 2026-11-26T22:00:00Z" in build_condition(kept, ReportProblems())["message"]
    unknown = keep_last_devices(kept, failed, 3600.0)
    assert "devices are unknown" in build_condition(unknown, ReportProblems())["message"]
    status = msgspec.to_builtins(unknown.hardware)
    assert not {"vendor", "devices", "deviceClass", "source"} & status.keys()
