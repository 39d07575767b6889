"""Decisions about Models that only hosts serve: files of hosts, and where the controller has no image for Jobs."""

import pytest

from crds.meta import SecretReference
from crds.model import ModelHardware
from kube.client import Obj
from tests.support.simulated_model import SHA, SimulatedModel, make_inspected

METAL = {"hardware": ModelHardware(accelerator="metal")}
STATED = METAL | {"sha256": SHA, "memory_bytes": 5}


def make_without_image(**spec: object) -> SimulatedModel:
    simulated = SimulatedModel(**spec)
    simulated.image = ""
    simulated.settle()
    return simulated


@pytest.mark.parametrize(
    "spec", [{}, {"source": f"hf://org/repo@{'a' * 40}/tiny.gguf", "sha256": None}], ids=["digest", "commit"]
)
def test_pinned_file_with_stated_memory_needs_no_job(spec: Obj) -> None:
    simulated = make_without_image(**STATED | spec)
    assert simulated.made == []
    assert (simulated.model.status.phase, simulated.condition("Ready").reason) == ("Ready", "HostInspects")


@pytest.mark.parametrize(
    "spec",
    [
        {"hardware": ModelHardware()},
        {"sha256": None},
        {"memory_bytes": None},
        {"source": "hf://org/repo"},
        {"source_secret_ref": SecretReference(name="hub")},
    ],
    ids=["pods", "may change", "unknown memory", "folder", "Secret"],
)
def test_any_other_model_needs_an_image_for_its_job(spec: Obj) -> None:
    simulated = make_without_image(**STATED | spec)
    condition = simulated.condition("Ready")
    assert (condition.reason, simulated.model.status.phase, simulated.made) == ("NoImage", "Failed", [])
    is_for_hosts = simulated.model.spec.hardware.accelerator == "metal"
    way_out = (
        "spec.memoryBytes and spec.sha256 are stated" if is_for_hosts else "start `pomona controller` with --image"
    )
    assert condition.message.endswith(way_out)


def test_service_in_pods_needs_an_image_too() -> None:
    simulated = make_without_image(**STATED)
    simulated.add_consumer()
    simulated.settle()
    assert simulated.condition("Ready").reason == "NoImage"


def test_model_of_hosts_is_inspected_by_a_job_where_there_is_an_image() -> None:
    simulated = SimulatedModel(**STATED)
    simulated.settle()
    assert simulated.job("inspect")


def test_inspected_model_of_hosts_keeps_its_facts_after_an_edit() -> None:
    simulated = make_inspected()
    simulated.edit(**METAL)
    simulated.settle()
    assert simulated.made[1:] == []
    assert simulated.model.status.revision == '"etag-1"'


def test_local_file_of_unknown_memory_is_not_ready() -> None:
    simulated = SimulatedModel(source="file:///models/big.gguf")
    simulated.add_consumer()
    simulated.settle()
    assert simulated.made == []
    ready = simulated.condition("Ready")
    assert (simulated.model.status.phase, ready.status, ready.reason) == ("Failed", "False", "MemoryUnknown")
    assert "set spec.memoryBytes" in ready.message
    simulated.edit(memory_bytes="64Mi")
    simulated.settle()
    assert (simulated.model.status.phase, simulated.condition("Ready").reason) == ("Ready", "HostInspects")
