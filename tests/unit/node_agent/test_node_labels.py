"""Labels state the hardware by FlexInfer's names and values, and each label has one owner."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from crds.nodefitness import NodeDevice, NodeFitnessStatus
from node_agent.node_labels import FIELD_MANAGER, LabelConflict, build_labels, plan_labels

MIB = 2**20
L4 = NodeDevice(id="GPU-1", product="NVIDIA L4", architecture="sm_89", memory_bytes=24576 * MIB)
HARDWARE = NodeFitnessStatus(vendor="nvidia", devices=[L4], int4=True, cpu_features=["avx2"])
PREFIX = "flexinfer.ai"
NAMES = st.sampled_from(["a/x", "a/y", "a/z"])
LABELS = st.dictionaries(NAMES, st.sampled_from(["1", "2"]))


def node(labels: dict[str, str], **owners: list[str]) -> dict[str, Any]:
    """Return a Node with labels, and the labels that each manager has; `pomona` applies, others update."""
    fields: list[Any] = [
        {
            "manager": FIELD_MANAGER if manager == "pomona" else manager,
            "operation": "Apply" if manager == "pomona" else "Update",
            "fieldsV1": {"f:metadata": {"f:labels": {".": {}, **{f"f:{name}": {} for name in names}}}},
        }
        for manager, names in owners.items()
    ]
    return {"metadata": {"name": "n", "uid": "u", "labels": labels, "managedFields": fields}}


def test_labels_are_those_that_flexinfer_documents() -> None:
    assert build_labels(HARDWARE, PREFIX) == {
        "flexinfer.ai/gpu.vendor": "NVIDIA",
        "flexinfer.ai/gpu.vram": "24Gi",
        "flexinfer.ai/gpu.arch": "sm_89",
        "flexinfer.ai/gpu.int4": "true",
        "flexinfer.ai/gpu.count": "1",
        "flexinfer.ai/cpu.avx512": "false",
    }


def test_node_without_devices_has_the_label_of_its_processor_only() -> None:
    hardware = NodeFitnessStatus(vendor="cpu", cpu_features=["avx2", "avx512f"])
    assert build_labels(hardware, PREFIX) == {"flexinfer.ai/cpu.avx512": "true"}
    assert build_labels(replace(hardware, cpu_features=[]), PREFIX) == {}


def test_memory_is_that_of_the_least_device_in_whole_gib() -> None:
    less = NodeDevice(id="GPU-2", architecture="sm_89", memory_bytes=24564 * MIB)
    labels = build_labels(replace(HARDWARE, devices=[L4, less]), "p")
    assert (labels["p/gpu.vram"], labels["p/gpu.count"]) == ("23Gi", "2")


def test_unknown_fact_has_no_label() -> None:
    unknown = NodeDevice(id="GPU-2")
    for devices in ([unknown], [L4, unknown]):
        labels = build_labels(replace(HARDWARE, devices=devices, int4=None), "p")
        assert set(labels) == {"p/gpu.vendor", "p/gpu.count", "p/cpu.avx512"}


@pytest.mark.parametrize("lie", ["sm_89 evil", "x" * 33, "-a", "a/b", "a\nb", "ä"])
def test_architecture_that_is_no_value_of_a_label_is_left_out(lie: str) -> None:
    device = NodeDevice(id="GPU-1", architecture=lie)
    assert "p/gpu.arch" not in build_labels(replace(HARDWARE, devices=[device]), "p")


def test_missing_label_is_applied_and_present_one_is_not_written_again() -> None:
    assert plan_labels({"a/x": "1"}, node({})).is_due
    plan = plan_labels({"a/x": "1"}, node({"a/x": "1"}, pomona=["a/x"]))
    assert (plan.applied, plan.conflicts, plan.is_due) == ({"a/x": "1"}, (), False)


def test_label_of_another_owner_is_left_and_named() -> None:
    labeled = node({"a/x": "9"}, **{"kubectl-label": ["a/x"]})
    plan = plan_labels({"a/x": "1", "a/y": "2"}, labeled)
    assert plan.applied == {"a/y": "2"}
    assert plan.conflicts == (LabelConflict("a/x", "1", "9", "kubectl-label"),)
    assert "label a/x is '9' by kubectl-label, not '1'" in plan.conflicts[0].sentence


def test_label_that_another_owner_has_with_the_same_value_is_no_conflict() -> None:
    plan = plan_labels({"a/x": "1"}, node({"a/x": "1"}, nfd=["a/x"]))
    assert (plan.applied, plan.conflicts, plan.is_due) == ({}, (), False)


def test_shared_label_is_given_up_when_its_fact_changes() -> None:
    """Applying another value would be refused as a conflict, each time."""
    plan = plan_labels({"a/x": "2"}, node({"a/x": "1"}, pomona=["a/x"], nfd=["a/x"]))
    assert (plan.applied, plan.is_due) == ({}, True)
    assert plan.conflicts == (LabelConflict("a/x", "2", "1", "nfd"),)


def test_label_is_removed_when_its_fact_goes() -> None:
    plan = plan_labels({}, node({"a/x": "1"}, pomona=["a/x"]))
    assert (plan.applied, plan.is_due) == ({}, True)


def test_label_of_unknown_owner_is_left() -> None:
    plan = plan_labels({"a/x": "1"}, node({"a/x": "9"}))
    assert (plan.applied, plan.is_due) == ({}, False)
    assert plan.conflicts == (LabelConflict("a/x", "1", "9", ""),)


@given(wanted=LABELS, present=LABELS, mine=st.sets(NAMES), theirs=st.sets(NAMES))
def test_no_label_of_others_changes_and_every_wanted_one_is_applied_there_or_named(
    wanted: dict[str, str], present: dict[str, str], mine: set[str], theirs: set[str]
) -> None:
    plan = plan_labels(wanted, node(present, pomona=sorted(mine & present.keys()), nfd=sorted(theirs & present.keys())))
    for name, value in plan.applied.items():
        assert wanted[name] == value
        foreign = name in present and (name in theirs or name not in mine)
        assert not foreign or present[name] == value
    named = {conflict.name for conflict in plan.conflicts}
    for name, value in wanted.items():
        assert [name in plan.applied, name in named, name not in plan.applied and present.get(name) == value].count(
            True
        ) == 1
    after = {name: value for name, value in present.items() if name not in mine or name in theirs}
    after |= plan.applied
    owned = [name for name in (mine & present.keys()) | plan.applied.keys() if name in plan.applied]
    again = plan_labels(wanted, node(after, pomona=owned, nfd=sorted(theirs & present.keys())))
    assert not again.is_due
