"""Discovery labels: what they say, and who owns them."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.models.discovery import LabelFacts, label_service, label_value, list_labels
from controller.reconcile.labels import LABEL_MANAGER, desired_labels
from controller.reconcile.partial_objects import declare_partial_objects
from crds.meta import GROUP
from crds.model import ModelSpec
from kube.client import Obj
from kube.resources import MODELS
from kube.store import Store
from tests.support.api_objects import GIB, as_model, as_service, model, service
from tests.support.service_decisions import decide_chat
from tests.support.simulated_model import INSPECTED, SimulatedModel, make_inspected


def names(labels: Mapping[str, str], prefix: str) -> list[str]:
    return [name.partition("/")[2] for name in labels if name.startswith(f"{GROUP}/{prefix}")]


def facts(**fields: Any) -> LabelFacts:
    return LabelFacts(**({"spec": ModelSpec(source="hf://a/b/c.gguf")} | fields))


@pytest.mark.parametrize(
    ("tokens", "longest"),
    [
        (None, None),
        (8192, None),
        (32_000, "32k"),
        (32_768, "32k"),
        (65_535, "64k"),
        (131_072, "128k"),
        (10_485_760, "10m"),
    ],
)
def test_context_labels_are_cumulative(tokens: int | None, longest: str | None) -> None:
    found = names(list_labels(facts(context_length=tokens)), "context-")
    every = [f"context-{name}" for name in ("32k", "64k", "128k", "256k", "512k", "1m", "2m", "4m", "10m")]
    assert found == (every[: every.index(f"context-{longest}") + 1] if longest else [])


@given(st.integers(1, 600 * GIB))
def test_query_for_a_tier_loses_no_model_that_fits(memory_bytes: int) -> None:
    found = names(list_labels(facts(memory_bytes=memory_bytes)), "vram-tier-")
    for tier in (8, 20, 24, 80, 512):
        assert (f"vram-tier-{tier}g" in found) == (memory_bytes <= tier * GIB)


def test_model_of_18_gib_is_found_by_a_query_for_20() -> None:
    labels = list_labels(facts(memory_bytes=18 * GIB))
    assert labels[f"{GROUP}/vram-tier-20g"] == "true"
    assert f"{GROUP}/vram-tier-16g" not in labels


@pytest.mark.parametrize(
    ("stated", "has_experts", "expected"),
    [
        ({}, None, None),
        ({}, False, "Dense"),
        ({"thinking": True}, True, "MoEThinking"),
        ({"thinking": False}, True, "MoE"),
        ({"model_type": "DenseThinking"}, True, "DenseThinking"),
    ],
)
def test_model_type_is_stated_or_computed(stated: Obj, has_experts: bool | None, expected: str | None) -> None:
    spec = ModelSpec(source="hf://a/b/c.gguf", **stated)
    labels = list_labels(facts(spec=spec, has_experts=has_experts))
    assert labels.get(f"{GROUP}/model-type") == expected


@given(st.text())
def test_value_of_a_label_is_valid_whatever_an_artifact_says(text: str) -> None:
    assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", label_value(text))


def test_labels_of_a_model_follow_its_spec_and_its_header() -> None:
    simulated = make_inspected(domains=["code", "math"], languages=["en"], capabilities=["tools"])
    labels = simulated.step().labels
    assert labels == {
        **{f"{GROUP}/{name}": "true" for name in ("domain-code", "domain-math", "language-en", "capability-tools")},
        f"{GROUP}/quantization": "F32",
        f"{GROUP}/format": "gguf",
        f"{GROUP}/accelerator-vendor": "cpu",
    }
    simulated.edit(domains=["code"])
    labels = simulated.step().labels
    assert labels is not None
    assert f"{GROUP}/domain-math" not in labels


def test_labels_of_a_model_whose_header_is_known_say_how_much_it_takes() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    layout = model()["status"]["layout"] | {"expertOutputs": 8}
    gguf = {"architecture": "llama", "contextLength": 65_536}
    simulated.end("inspect", 0, INSPECTED | {"layout": layout, "gguf": gguf})
    labels = simulated.settle().labels
    assert labels is not None
    assert names(labels, "context-") == ["context-32k", "context-64k"]
    assert "vram-tier-8g" in names(labels, "vram-tier-")
    assert labels[f"{GROUP}/model-type"] == "MoE"


def test_labels_of_a_service_state_its_own_context_memory_place_and_engine() -> None:
    chat = as_service(service(contextLength=32_768))
    labels = label_service(chat, as_model(model(domains=["code"])), "nvidia", "sglang", 18 * GIB)
    assert names(labels, "context-") == ["context-32k"]
    assert "vram-tier-20g" in names(labels, "vram-tier-")
    assert labels[f"{GROUP}/accelerator-vendor"] == "nvidia"
    assert labels[f"{GROUP}/engine"] == "sglang"
    assert labels[f"{GROUP}/domain-code"] == "true"


def test_service_that_does_not_serve_keeps_its_labels() -> None:
    assert decide_chat((MODELS, model())).labels is None


def test_numbers_of_parameters_are_shown_in_readable_form() -> None:
    simulated = make_inspected(total_parameters=30_532_122_624, active_parameters=3_300_000_000)
    assert simulated.model.status.parameters == "30.5B of which 3.3B are active"


def labelled(*, owned: tuple[str, ...] = (), **labels: str) -> Obj:
    """Return a Model as the store has it; we own the labels `owned`."""
    metadata: Obj = {"name": "tiny", "namespace": "team", "uid": "u", "resourceVersion": "1", "labels": labels}
    fields: Obj = {"f:metadata": {"f:labels": {f"f:{name}": {} for name in owned}}}
    managers: list[Obj] = [{"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:metadata": {"f:labels": {}}}}]
    if owned:
        managers.append({"manager": LABEL_MANAGER, "operation": "Apply", "fieldsV1": fields})
    store = Store()
    declare_partial_objects(store)
    store.put(MODELS, {"metadata": metadata | {"managedFields": managers}, "spec": {}})
    found = store.get(MODELS, "tiny", "team")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("wanted", "observed", "applied"),
    [
        ({"a": "1"}, labelled(), {"a": "1"}),
        ({"a": "1"}, labelled(owned=("a",), a="1"), None),
        ({"a": "2"}, labelled(owned=("a",), a="1"), {"a": "2"}),
        ({"a": "1"}, labelled(owned=("a", "b"), a="1", b="1"), {"a": "1"}),
        ({}, labelled(owned=("a",), a="1"), {}),
        ({}, labelled(), None),
        ({}, labelled(team="red"), None),
        ({"a": "1"}, labelled(a="of a user"), None),
        ({"a": "1", "b": "1"}, labelled(a="of a user"), {"b": "1"}),
    ],
    ids=[
        *("new", "unchanged", "changed", "one is stale", "all are stale", "none", "none of ours"),
        *("a user's", "a user's and ours"),
    ],
)
def test_only_labels_that_differ_and_are_ours_are_written(wanted: Obj, observed: Obj, applied: Obj | None) -> None:
    desired = desired_labels(MODELS, wanted, observed)
    assert (desired and desired["metadata"].get("labels", {})) == applied
    assert desired is None or desired["metadata"]["uid"] == "u", "a deleted object is not created again"
