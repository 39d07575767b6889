"""Decisions about Models that only hosts serve: which of them need no inspection in the cluster."""

import pytest

from crds.meta import SecretReference
from crds.model import ModelHardware
from kube.client import Obj
from tests.support.simulated_model import INSPECTED, SHA, SimulatedModel, make_inspected

METAL = {"hardware": ModelHardware(accelerator="metal"), "memory_bytes": 5}
PINNED = METAL | {"sha256": SHA}


@pytest.mark.parametrize(
    "spec",
    [
        PINNED,
        PINNED | {"mirrors": ["http://mirror.example/tiny.gguf"]},
        METAL | {"source": f"hf://org/repo@{'a' * 40}/tiny.gguf"},
        METAL | {"source": f"oci://ghcr.io/acme/tiny@sha256:{SHA}", "files": ["*.gguf"]},
    ],
    ids=["digest of the file", "mirrors", "commit", "digest of the artifact"],
)
def test_pinned_public_model_of_hosts_needs_no_job(spec: Obj) -> None:
    simulated = SimulatedModel(**spec)
    simulated.settle()
    assert (simulated.made, simulated.condition("Ready").reason) == ([], "HostInspects")
    simulated.add_consumer()
    simulated.settle()
    assert simulated.job("inspect"), "a service that runs in pods needs the volume"


def test_inspected_model_of_hosts_keeps_its_facts_after_an_edit() -> None:
    simulated = make_inspected()
    simulated.edit(**PINNED)
    simulated.settle()
    simulated.end("inspect", 0, INSPECTED)
    simulated.settle()
    assert simulated.model.status.revision == '"etag-1"'


@pytest.mark.parametrize(
    "changed",
    [
        {"sha256": None},
        {"memory_bytes": None},
        {"hardware": ModelHardware()},
        {"source_secret_ref": SecretReference(name="hub")},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_model_of_hosts_is_inspected_if_they_could_find_different_things(changed: Obj) -> None:
    simulated = SimulatedModel(**PINNED | changed)
    simulated.settle()
    assert simulated.job("inspect")
