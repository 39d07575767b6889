"""Models whose weights are on a claim already: inspected there, never fetched, and served from it."""

import pytest

from controller.models.served import cache_path, claim_name
from tests.support.simulated_model import SimulatedModel, make_inspected


def test_weights_on_a_claim_are_read_where_they_are() -> None:
    simulated = make_inspected(source="pvc://weights/my%20llama/tiny.gguf")
    spec = simulated.job("inspect")["spec"]["template"]["spec"]
    assert spec["containers"][0]["args"][:2] == ["inspect", "pvc://weights/my%20llama/tiny.gguf"]
    assert spec["containers"][0]["args"][2:4] == ["--file-root", "/models"]
    assert spec["containers"][0]["volumeMounts"] == [{"name": "models", "mountPath": "/models", "readOnly": True}]
    assert [volume["persistentVolumeClaim"] for volume in spec["volumes"]] == [
        {"claimName": "weights", "readOnly": True}
    ]

    simulated.add_consumer()
    simulated.settle()
    assert len(simulated.made) == 1, "no claim and no fetch"
    assert (simulated.condition("Ready").reason, simulated.condition("Cached").reason) == ("Inspected", "OnVolume")
    assert simulated.condition("Cached").status == "True"
    assert (claim_name(simulated.model), cache_path(simulated.model)) == ("weights", "my llama/tiny.gguf")


def test_folder_on_a_claim_has_no_slash_at_its_end() -> None:
    for source, path in (("pvc://weights/a/b/", "a/b"), ("pvc://weights/", "")):
        assert cache_path(SimulatedModel(source=source).model) == path


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('persistentvolumeclaim "weights" not found. not found', "ClaimNotReady"),
        ("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims", "ClaimNotReady"),
        ("0/3 nodes are available: 3 Insufficient cpu", "Unschedulable"),
    ],
)
def test_claim_that_cannot_be_mounted_is_named(message: str, reason: str) -> None:
    simulated = SimulatedModel(source="pvc://weights/tiny.gguf")
    simulated.settle()
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    uid = simulated.job("inspect")["metadata"]["uid"]
    simulated.pods[uid] = [{"metadata": {"creationTimestamp": ""}, "status": {"conditions": [unscheduled]}}]
    simulated.settle()
    ready = simulated.condition("Ready")
    assert (ready.reason, simulated.model.status.phase) == (reason, "Pending")
    assert message.rstrip(".") in ready.message
    assert ("kubectl -n team describe pvc weights" in ready.message) == (reason == "ClaimNotReady")
