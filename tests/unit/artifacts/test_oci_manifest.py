"""Manifests of artifacts: the files that their layers are, and documents that a hostile registry sends."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.errors import ArtifactError
from artifacts.repositories.oci_manifest import ArtifactManifest, parse_manifest, require_files
from artifacts.repositories.repository import RepositoryFile
from tests.support.registry_artifacts import MANIFEST, TITLE, describe, digest_of, encode_index, encode_manifest

NAME = "oci://r.example/acme/tiny:v1"
CONTENT = b"weights"
TAR = "application/vnd.oci.image.layer.v1.tar"
FILEPATH = "org.cncf.model.filepath"


def _parse(*layers: dict[str, Any], **changes: Any) -> ArtifactManifest:
    parsed = parse_manifest(NAME, encode_manifest(layers, **changes))
    assert isinstance(parsed, ArtifactManifest)
    return parsed


def _refuse(text: bytes) -> str:
    with pytest.raises(ArtifactError) as caught:
        parse_manifest(NAME, text)
    assert caught.value.reason == "SourceRefused"
    assert not caught.value.retryable
    assert caught.value.message.startswith(f"{NAME}: ")
    return caught.value.message


def _refuse_layer(**changes: Any) -> str:
    return _refuse(encode_manifest([describe(CONTENT, "model.gguf"), describe(CONTENT, "other.json", **changes)]))


@pytest.mark.parametrize(
    "layer",
    [
        describe(CONTENT, "model.gguf"),
        describe(CONTENT, "model.gguf", TAR),  # the type that `oras push` gives to plain files
        describe(CONTENT, media_type="application/vnd.cncf.model.weight.v1.raw", annotations={FILEPATH: "model.gguf"}),
        describe(CONTENT, media_type="application/vnd.cncf.model.weight.v1.gguf", annotations={FILEPATH: "model.gguf"}),
        describe(CONTENT, media_type="application/vnd.docker.ai.gguf.v3"),
        describe(CONTENT, media_type="application/vnd.ollama.image.model"),
    ],
)
def test_layer_is_a_file(layer: dict[str, Any]) -> None:
    expected = RepositoryFile("model.gguf", len(CONTENT), digest_of(CONTENT).removeprefix("sha256:"))
    assert require_files(NAME, _parse(layer)) == [expected]


@pytest.mark.parametrize(
    "layer",
    [
        describe(CONTENT, media_type=TAR),
        describe(CONTENT, media_type=f"{TAR}+gzip"),
        describe(CONTENT, media_type="application/vnd.docker.image.rootfs.diff.tar.gzip"),
        describe(CONTENT, media_type=f"{TAR}+gzip", annotations={TITLE: "dir", "io.deis.oras.content.unpack": "true"}),
        describe(CONTENT, media_type="application/vnd.cncf.model.weight.v1.tar", annotations={FILEPATH: "model.gguf"}),
        describe(CONTENT, media_type="application/vnd.kitops.modelkit.model.v1.tar+gzip"),
    ],
)
def test_archive_is_no_file_and_the_message_says_how_to_push(layer: dict[str, Any]) -> None:
    manifest = _parse(layer)
    with pytest.raises(ArtifactError) as caught:
        require_files(NAME, manifest)
    assert (manifest.files, len(manifest.archive_types)) == ([], 1)
    assert "oras push r.example/acme/tiny:TAG FILE..." in caught.value.message
    assert "spec.cache.medium Image" in caught.value.message


def test_layers_that_are_neither_are_left_out() -> None:
    layers = [describe(CONTENT, media_type="application/vnd.ollama.image.license"), describe(CONTENT, "a.json")]
    assert [file.path for file in _parse(*layers).files] == ["a.json"]
    with pytest.raises(ArtifactError, match="none of its layers is a file with a name"):
        require_files(NAME, _parse(layers[0]))


def test_files_are_sorted_and_may_have_folders() -> None:
    parsed = _parse(describe(b"1", "b.json"), describe(b"22", "a/b.json"))
    assert [file.path for file in parsed.files] == ["a/b.json", "b.json"]
    assert parsed.size_bytes == 3


@pytest.mark.parametrize(
    "title",
    ["../x", "/etc/passwd", "a/../b", "a//b", "a/", ".", "", "a\\b", "a\0b", "a\nb", "\u202egguf", "n" * 300, "a/./b"],
)
def test_hostile_name_of_a_file_is_refused(title: str) -> None:
    message = _refuse_layer(annotations={TITLE: title})
    assert f"layers[1].annotations[{TITLE}]" in message
    assert "\n" not in message


@pytest.mark.parametrize("title", ["model.gguf", "Model.GGUF"])
def test_two_layers_of_one_name_are_refused(title: str) -> None:
    assert "layers[1] has the name of another layer" in _refuse_layer(annotations={TITLE: title})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"digest": "md5:d41d8cd98f00b204e9800998ecf8427e"}, "layers[1].digest"),
        ({"digest": "sha256:" + "A" * 64}, "layers[1].digest"),
        ({"digest": "sha256:../../../etc/passwd"}, "layers[1].digest"),
        ({"size": -1}, "layers[1].size is -1"),
        ({"size": (1 << 63) - 1}, "more than any disk has"),
        ({"size": 1 << 63}, "layers[1].size"),
        ({"size": "7"}, "is not valid"),
        ({"digest": None}, "is not valid"),
        ({"annotations": {TITLE: 5}}, "is not valid"),
    ],
)
def test_hostile_layer_is_refused(changes: dict[str, Any], problem: str) -> None:
    assert problem in _refuse_layer(**changes)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "is not valid"),
        (b"\xff", "is not valid"),
        (b"[" * 100_000, "is not valid"),
        (b"{}", "is not valid"),
        (encode_manifest([], schemaVersion=1), "schemaVersion is 1, not 2"),
        (encode_manifest([], mediaType="application/vnd.docker.distribution.manifest.v1+prettyjws"), "mediaType is"),
        (encode_manifest([], manifests=[]), "either `layers` or `manifests`"),
        (encode_index(mediaType=MANIFEST), "mediaType is"),
        (json.dumps({"schemaVersion": 2}).encode(), "either `layers` or `manifests`"),
        (encode_manifest([describe(b"", str(number)) for number in range(1001)]), "1001 entries, more than 1000"),
        (encode_index(), "0 entries"),
    ],
)
def test_document_that_is_no_manifest_is_refused(text: bytes, problem: str) -> None:
    message = _refuse(text)
    assert problem in message
    assert len(message) < 500


def _entry(content: bytes, system: str = "", architecture: str = "", **changes: Any) -> dict[str, Any]:
    platform: dict[str, Any] = {"platform": {"os": system, "architecture": architecture}} if system else {}
    return describe(content, media_type=MANIFEST, **platform, **changes)


@pytest.mark.parametrize(
    "entries",
    [
        [_entry(b"wanted")],
        [_entry(b"wanted", "linux", "arm64")],
        [_entry(b"arm", "linux", "arm64"), _entry(b"wanted", "linux", "amd64")],
        [_entry(b"wanted"), _entry(b"attestation", "unknown", "unknown")],
        [_entry(b"wanted"), describe(b"other", media_type="application/vnd.example")],
    ],
)
def test_index_names_one_manifest(entries: list[dict[str, Any]]) -> None:
    assert parse_manifest(NAME, encode_index(*entries)) == digest_of(b"wanted")


@pytest.mark.parametrize(
    "entries",
    [
        [_entry(b"1"), _entry(b"2")],
        [_entry(b"1", "linux", "arm64"), _entry(b"2", "linux", "s390x")],
        [_entry(b"1", "linux", "amd64"), _entry(b"2", "linux", "amd64")],
        [describe(b"other", media_type="application/vnd.example")],
    ],
)
def test_index_without_one_usable_manifest_is_refused(entries: list[dict[str, Any]]) -> None:
    message = _refuse(encode_index(*entries))
    assert "give the digest of one" in message


def test_index_with_a_hostile_digest_is_refused() -> None:
    assert "manifests.digest" in _refuse(encode_index(_entry(b"x", digest="sha256:../../x")))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["schemaVersion", "mediaType", "layers", "manifests", "digest", "size", "annotations"]),
                inner,
            )
        ),
    )
)
def test_any_document_is_parsed_or_refused(document: object) -> None:
    with contextlib.suppress(ArtifactError):
        parse_manifest(NAME, json.dumps(document).encode())
