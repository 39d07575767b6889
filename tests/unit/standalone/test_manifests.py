"""Manifests are read from files as a cluster reads them, and all their mistakes are reported with file and line."""

from pathlib import Path
from textwrap import dedent

import pytest

from artifacts.source import parse
from kube.resources import ObjectKey
from standalone.manifests import ManifestError, derive_name, load_manifests
from standalone.model_lookup import TOKEN_SECRET, ModelChoice, build_manifests
from tests.controlplane.process import CHECKOUT

MODEL = """\
apiVersion: inference.pomona.dev/v1alpha1
kind: Model
metadata:
  name: tiny
spec:
  source: https://models.example/tiny.gguf
"""
SERVICE = """\
apiVersion: inference.pomona.dev/v1alpha1
kind: InferenceService
metadata:
  name: chat
spec:
  modelRef: tiny
"""


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "chat.yaml"
    path.write_text(text)
    with pytest.raises(ManifestError) as caught:
        load_manifests([path])
    return [problem.removeprefix(f"{path}") for problem in caught.value.problems]


def test_examples_are_read_with_defaults() -> None:
    wanted = load_manifests([CHECKOUT / "examples"])
    assert set(wanted.models) == {ObjectKey("default", "tiny")}
    assert set(wanted.services) == {ObjectKey("default", "tiny-host"), ObjectKey("default", "tiny-pod")}
    spec = wanted.services[ObjectKey("default", "tiny-pod")].spec
    assert (spec.mode, spec.cache_type_k, spec.replicas) == ("chat", "f16", 1)
    assert (spec.context_length, spec.parallel, spec.prompt_cache) == (None, None, None)
    ignored = "ignored: `pomona up` serves Models and InferenceServices only"
    assert wanted.skipped == [f"{CHECKOUT}/examples/key.yaml:2: GatewayKey demo: {ignored}"]


def test_same_name_in_two_namespaces_is_two_models(tmp_path: Path) -> None:
    path = tmp_path / "team.yaml"
    path.write_text(
        "---\n".join(manifest.replace("metadata:", "metadata:\n  namespace: team") for manifest in (MODEL, SERVICE))
    )
    assert set(load_manifests([path]).services) == {ObjectKey("team", "chat")}
    path.write_text(f"{MODEL}---\n{SERVICE.replace('metadata:', 'metadata:{}'.format(chr(10) + '  namespace: team'))}")
    with pytest.raises(ManifestError, match=r"Model tiny is not in these files: add it \(they have none\)"):
        load_manifests([path])


def test_null_in_metadata_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    nulls = "metadata:\n  creationTimestamp: null\n  labels:\n  annotations:\n  namespace: {}\n"
    path.write_text(f"{MODEL}---\n{SERVICE}".replace("metadata:\n", nulls.format("null"), 1))
    assert set(load_manifests([path]).models) == {ObjectKey("default", "tiny")}
    path.write_text(f"{MODEL}---\n{SERVICE}".replace("metadata:\n", nulls.format('""')))
    wanted = load_manifests([path])
    assert {service.metadata.namespace for service in wanted.services.values()} == {"default"}


def test_all_problems_are_reported_with_their_lines(tmp_path: Path) -> None:
    text = f"{MODEL}  sha256: short\n---\n{SERVICE}  parallel: 4097\n  contextlength: 9\n"
    assert problems(tmp_path, text) == [
        (
            ':7: document 1, Model tiny: spec.sha256: Invalid value: "short": spec.sha256 in body should match '
            "'^[0-9a-f]{64}$'"
        ),
        ":16: document 2, InferenceService chat: spec.contextlength: unknown field; did you mean contextLength?",
        (
            ":15: document 2, InferenceService chat: spec.parallel: Invalid value: 4097: spec.parallel in body should "
            "be less than or equal to 4096"
        ),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MODEL, ": no InferenceService found: add one, or serve a Model alone with --model NAME"),
        (
            SERVICE,
            ":6: InferenceService chat: spec.modelRef: Model tiny is not in these files: add it (they have none)",
        ),
        (
            f"{MODEL}---\n{MODEL}---\n{SERVICE}",
            ":11: document 2, Model tiny: defined in {path}:1 already: rename one of them",
        ),
        (
            MODEL.replace("kind: Model", "kind: Modell"),
            ":2: Modell tiny: kind 'Modell' does not exist: use Model or InferenceService",
        ),
        (
            MODEL.replace("kind: Model", "kind: MetalProcess"),
            ":2: MetalProcess tiny: created by Pomona itself: write an InferenceService instead",
        ),
        (
            MODEL.replace("https://models.example/tiny.gguf", "hf://tiny.gguf"),
            ":6: Model tiny: source 'hf://tiny.gguf': an hf:// source has the form hf://ORG/REPO[@REVISION]/FILE.gguf",
        ),
        (
            MODEL.replace("apiVersion: inference.pomona.dev/v1alpha1\n", ""),
            ":1: Model tiny: apiVersion: Invalid value: null: use inference.pomona.dev/v1alpha1",
        ),
        ("modelRef: tiny\n", ":1: a manifest: kind None does not exist: use Model or InferenceService"),
        ("a: [", ":1: invalid YAML: expected the node content, but found '<stream end>'"),
        ("- a\n", ":1: invalid YAML: a manifest has to be a mapping of fields"),
        (MODEL + "  source: x\n", ":7: invalid YAML: field 'source' is repeated"),
        ("a: \0", ": invalid YAML: unacceptable character"),
        ("? [a]\n: b\n", ":1: invalid YAML: the name of a field has to be a string"),
        (f"{MODEL}  memoryBytes: !!int abc\n", ":7: invalid YAML: 'abc' is not a valid int"),
        (f"{MODEL}  memoryBytes: {'9' * 5000}\n", f":7: invalid YAML: '{'9' * 40}' is not a valid int"),
        (f'{MODEL}  revision: "\\ud800"\n', ":7: invalid YAML: '\\ud800' is not a valid str"),
        (f"{MODEL}  more: &more {{again: *more}}\n", ":7: invalid YAML: an anchor contains itself"),
        (
            MODEL
            + "  a: &a [1, 1, 1, 1]\n"
            + "".join(f"  a{'a' * i}: &a{'a' * i} [{', '.join(['*a' + 'a' * (i - 1)] * 4)}]\n" for i in range(1, 20)),
            ":15: invalid YAML: more than 100000 values, or 64 levels",
        ),
        ('{"a": ' * 1000, ": not a manifest: nested too deeply"),
        ("a: " + "[" * 70 + "]" * 70, ":1: invalid YAML: more than 100000 values, or 64 levels"),
        (MODEL.replace("kind: Model", "kind: [Model]"), ":2: ['Model'] tiny: kind ['Model'] does not exist"),
        (
            MODEL.replace("  name: tiny", "  name: tiny\n  namespace: [3]"),
            ':5: Model tiny: metadata.namespace: Invalid value: "object": a lowercase RFC 1123 label',
        ),
        (
            MODEL.replace("  name: tiny", "  name: tiny\n  namespace: 3"),
            ":5: Model tiny: metadata.namespace: Invalid value: 3: a lowercase RFC 1123 label",
        ),
        (
            MODEL.replace("  name: tiny", "  name: tiny\n  labels: 5"),
            ":3: Model tiny: metadata: Expected `object`, got `int` - at `$.metadata.labels`",
        ),
    ],
    ids=[
        "no service",
        "no model",
        "twice",
        "kind",
        "ours",
        "source",
        "version",
        "fragment",
        "broken",
        "list",
        "field twice",
        "binary",
        "field without a name",
        "no number",
        "too long a number",
        "half a character",
        "anchor in itself",
        "aliases of aliases",
        "nested without end",
        "nested too deeply",
        "kind is a list",
        "namespace is a list",
        "namespace is a number",
        "labels are a number",
    ],
)
def test_mistake_is_reported_with_way_out(tmp_path: Path, text: str, says: str) -> None:
    mistakes = problems(tmp_path, text)
    assert len(mistakes) == 1
    assert mistakes[0].startswith(says.format(path=tmp_path / "chat.yaml")), mistakes


def test_weights_given_as_manifest_are_refused_with_option(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF\xff\xfe")
    with pytest.raises(ManifestError, match=f"not a text file .*: to serve weights, use --model {path}"):
        load_manifests([path])


def test_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(ManifestError, match=f"larger than 1 MiB, .*: to serve weights, use --model {path}"):
        load_manifests([path])


def test_other_kinds_are_skipped_with_note(tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    namespace = dedent(
        """\
        apiVersion: v1
        kind: Namespace
        metadata: {name: team, labels: {since: 2026-11-21}}
        """
    )
    path.write_text(f"{MODEL}---\n{namespace}---\n{SERVICE}---\n")
    wanted = load_manifests([path])
    assert wanted.skipped == [
        f"{path}:8: document 2, Namespace team: ignored: `pomona up` serves Models and InferenceServices only"
    ]
    assert set(wanted.services) == {ObjectKey("default", "chat")}


def test_two_services_of_one_name_are_refused(tmp_path: Path) -> None:
    other = SERVICE.replace("metadata:", "metadata:\n  namespace: team")
    model = MODEL.replace("metadata:", "metadata:\n  namespace: team")
    mistakes = problems(tmp_path, f"{MODEL}---\n{SERVICE}---\n{model}---\n{other}")
    assert len(mistakes) == 1
    assert "InferenceService chat: defined in" in mistakes[0]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf", "qwen3-8b-q4-k-m"),
        ("hf://mlx-community/Qwen3-0.6B-4bit", "qwen3-0-6b-4bit"),
        ("file:///m/My%20Model/", "my-model"),
        ("https://models.example/7b.gguf", "model-7b"),
        (f"https://models.example/{'x' * 60}.gguf", "x" * 40),
        (f"https://models.example/{'a' * 39}-b.gguf", "a" * 39),
        ("https://models.example/gr%C3%B6%C3%9Fe.gguf", "gr-e"),
        ("https://models.example/_.gguf", "model"),
        ("https://models.example/weights", "weights"),
    ],
)
def test_name_from_source_is_valid_in_cluster(source: str, name: str) -> None:
    assert derive_name(parse(source)) == name
    _, service = build_manifests(ModelChoice(name, source), token=False)
    assert service.metadata.name == service.spec.model_ref == name


def test_download_token_is_used_for_hub_only() -> None:
    model, _ = build_manifests(ModelChoice("m", "hf://org/repo/m.gguf"), token=True)
    assert model.spec.source_secret_ref is not None
    assert model.spec.source_secret_ref.name == TOKEN_SECRET
    model, _ = build_manifests(ModelChoice("m", "https://models.example/m.gguf"), token=True)
    assert model.spec.source_secret_ref is None
