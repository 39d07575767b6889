"""Discovery labels: what they say, and who owns them."""

import itertools
import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.models.discovery import label_service, label_value, list_labels
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

SPEC = ModelSpec(source="hf://a/b/c.gguf")


def names(labels: Mapping[str, str], prefix: str) -> list[str]:
    return [name.partition("/")[2] for name in labels if name.startswith(f"{GROUP}/{prefix}")]


@pytest.mark.parametrize(
    ("tokens", "longest"),
    [
        (None, None),
        (8192, None),
        (32_000, "32-k"),
        (32_768, "32-k"),
        (65_535, "64-k"),
        (131_072, "128-k"),
        (10_485_760, "10-m"),
    ],
)
def test_context_labels_are_cumulative(tokens: int | None, longest: str | None) -> None:
    labels = names(list_labels(SPEC, context_length=tokens), "context-")
    every = [f"context-{name}" for name in ("32-k", "64-k", "128-k", "256-k", "512-k", "1-m", "2-m", "4-m", "10-m")]
    assert labels == (every[: every.index(f"context-{longest}") + 1] if longest else [])


@given(st.integers(1, 600 * GIB))
def test_query_for_a_tier_loses_no_model_that_fits(memory_bytes: int) -> None:
    labels = names(list_labels(SPEC, memory_bytes=memory_bytes), "vram-tier-")
    for tier in (8, 20, 24, 80, 512):
        assert (f"vram-tier-{tier}-g" in labels) == (memory_bytes <= tier * GIB)


def test_model_of_18_gib_is_found_by_a_query_for_20() -> None:
    labels = list_labels(SPEC, memory_bytes=18 * GIB)
    assert labels[f"{GROUP}/vram-tier-20-g"] == "true"
    assert f"{GROUP}/vram-tier-16-g" not in labels


def comes_first(one: str, other: str) -> bool:
    """Return whether kubectl prints one key of a map before another: numbers by their value, letters after all else."""
    start = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if start is None:
        return len(one) < len(other)
    a, b = one[start], other[start]
    if a.isalpha() or b.isalpha():
        return a < b if a.isalpha() and b.isalpha() else b.isalpha()
    before = re.search(r"[1-9]\d*$", one[:start])
    # A zero counts as the end of the number that it stands in.
    lead = "1" if "0" in {a, b} and before is not None else ""
    digits = [re.match(r"\d*", text[start:]) for text in (one, other)]
    numbers = [(int(lead + digit[0] or "0"), len(digit[0])) for digit in digits if digit is not None]
    return numbers[0] < numbers[1] or (numbers[0] == numbers[1] and a < b)


def test_kubectl_prints_all_labels_in_one_order() -> None:
    """`kubectl diff` reports as changed what its comparison puts in no order."""
    circle = ("8g", "12g", "80g", "8g")
    assert all(itertools.starmap(comes_first, itertools.pairwise(circle))), "a letter after a number has no place"
    spec = ModelSpec(source="hf://a/b/c.gguf", domains=["code"], languages=["en", "de"], thinking=True)
    least = list_labels(spec, context_length=1 << 40, memory_bytes=1, quantization="Q4_K_M", engine="vllm")
    assert len(least) > 24
    for one, other, third in itertools.permutations(least, 3):
        if comes_first(one, other) and comes_first(other, third):
            assert comes_first(one, third), (one, other, third)


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
    labels = list_labels(spec, has_experts=has_experts)
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
    assert names(labels, "context-") == ["context-32-k", "context-64-k"]
    assert "vram-tier-8-g" in names(labels, "vram-tier-")
    assert labels[f"{GROUP}/model-type"] == "MoE"


def test_labels_of_a_service_state_its_own_context_memory_place_and_engine() -> None:
    chat = as_service(service(contextLength=32_768))
    labels = label_service(chat, as_model(model(domains=["code"])), "nvidia", "sglang", 18 * GIB)
    assert names(labels, "context-") == ["context-32-k"]
    assert "vram-tier-20-g" in names(labels, "vram-tier-")
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
    model = store.get(MODELS, "tiny", "team")
    assert model is not None
    return model


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
