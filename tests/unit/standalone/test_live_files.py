"""The change that is reported, and names that two sources of manifests share."""

import pytest

from crds.inferenceservice import InferenceService
from crds.model import Model
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, MODELS, ObjectKey
from standalone.live_files import describe_change, merge_manifests
from standalone.manifests import ManifestError, Manifests, accept_manifest
from tests.support.refused_manifests import make_manifest


def manifests(**contexts: int) -> Manifests:
    """Return services of one Model each, by their names, with a context length."""
    models: list[Obj] = [make_manifest(MODELS, name=name, source="hf://o/r/m.gguf") for name in contexts]
    services = [
        make_manifest(INFERENCE_SERVICES, name=name, modelRef=name, contextLength=length)
        for name, length in contexts.items()
    ]
    return Manifests(
        {ObjectKey("default", model["metadata"]["name"]): accept_manifest(model, Model) for model in models},
        {
            ObjectKey("default", service["metadata"]["name"]): accept_manifest(service, InferenceService)
            for service in services
        },
    )


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (manifests(a=512), manifests(a=512), ""),
        (manifests(a=512), manifests(a=512, b=512, c=512), "added b, c"),
        (manifests(a=512, b=512), manifests(a=1024), "edited a, removed b"),
    ],
)
def test_change_names_the_services(before: Manifests, after: Manifests, change: str) -> None:
    assert describe_change(before, after) == change


def test_service_is_edited_with_its_model() -> None:
    before, after = manifests(a=512, b=512), manifests(a=512, b=512)
    key = ObjectKey("default", "a")
    after.models[key] = accept_manifest(make_manifest(MODELS, name="a", source="hf://o/r/other.gguf"), Model)
    assert describe_change(before, after) == "edited a"


def test_name_of_a_source_is_refused_in_a_file() -> None:
    assert list(merge_manifests(manifests(a=512), manifests(b=512)).services) == list(manifests(a=512, b=512).services)
    with pytest.raises(ManifestError, match="InferenceService a: the name is taken by a source of --model"):
        merge_manifests(manifests(a=512), manifests(a=512))
