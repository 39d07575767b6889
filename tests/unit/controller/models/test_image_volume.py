"""Weights that nodes mount as an image: inspected as any others, with no volume and no download."""

from controller.models.served import cache_path
from controller.pod_settings import TenantLimits
from crds.cache import CacheOptions
from kube.resources import JOBS
from tests.support.simulated_model import INSPECTED, SimulatedModel

DIGEST = "sha256:" + "cd" * 32
IMAGE = f"ghcr.io/acme/tiny@{DIGEST}"


def test_inspected_image_is_cached_without_a_claim() -> None:
    simulated = SimulatedModel(source="oci://ghcr.io/acme/tiny:v1", cache=CacheOptions(medium="Image"))
    simulated.add_consumer()
    simulated.settle()
    assert simulated.condition("Ready").status == "False"
    simulated.end("inspect", 0, INSPECTED | {"revision": DIGEST})
    simulated.settle()

    cached = simulated.condition("Cached")
    assert (cached.status, cached.reason, cached.message) == ("True", "ImageVolume", f"nodes pull and mount {IMAGE}")
    status = simulated.model.status
    assert status.cached is not None
    assert (status.phase, status.cached.image, status.cached.claim) == ("Ready", IMAGE, "")
    assert cache_path(simulated.model) == status.cached.path == "tiny.gguf"
    assert [kind for kind in simulated.made if kind["kind"] != JOBS.kind] == []
    assert [job["metadata"]["name"].split("-")[1] for job in simulated.made] == ["inspect"]


def test_image_outside_of_the_allowed_prefixes_is_not_mounted() -> None:
    simulated = SimulatedModel(source="oci://ghcr.io/acme/tiny:v1", cache=CacheOptions(medium="Image"))
    simulated.limits = TenantLimits(("registry.example/llm/",))
    simulated.settle()
    simulated.end("inspect", 0, INSPECTED | {"revision": DIGEST})
    simulated.settle()
    cached = simulated.condition("Cached")
    assert (cached.status, cached.reason, simulated.model.status.cached) == ("False", "ImageNotAllowed", None)
    assert "registry.example/llm/" in cached.message

    simulated.limits = TenantLimits(("ghcr.io/acme/",))
    simulated.settle()
    assert simulated.condition("Cached").reason == "ImageVolume"
