"""The configuration of the proxy of a host."""

from crds.metalprocess import Artifact, FurtherArtifact
from gateway.proxy.config import BackendAdapter
from metal_agent.traffic.exposure import list_adapters

WEIGHTS = Artifact(source="hf://a/b/c.gguf")


def test_adapters_are_listed_only_if_requests_choose_some() -> None:
    always = FurtherArtifact(role="adapter", artifact=WEIGHTS, scale="0.5")
    chosen = FurtherArtifact(role="adapter", artifact=WEIGHTS, request_name="tone")
    draft = FurtherArtifact(role="draft", artifact=WEIGHTS)
    assert list_adapters([draft, always, chosen]) == (BackendAdapter(0.5), BackendAdapter(1, "tone"))
    assert list_adapters([draft, always]) == ()
