"""Sources are parsed to safe file names, or refused with a message that shows a valid source."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.errors import ArtifactError
from artifacts.source import SourceError, cache_key, parse, refuse_ollama_source, scheme_of


def test_hub_source_without_revision_means_main() -> None:
    source = parse("hf://acme/Tiny.GGUF/sub/tiny-q8.gguf")
    assert (source.repo, source.revision, source.path, source.file) == (
        "acme/Tiny.GGUF",
        "main",
        "sub/tiny-q8.gguf",
        "tiny-q8.gguf",
    )
    assert source.url("https://hub/") == "https://hub/acme/Tiny.GGUF/resolve/main/sub/tiny-q8.gguf"
    assert source.url("https://hub", "abc") == "https://hub/acme/Tiny.GGUF/resolve/abc/sub/tiny-q8.gguf"


@pytest.mark.parametrize("scheme", ["hf://acme/names/", "s3://models/", "pvc://weights/", "file:///srv/"])
@pytest.mark.parametrize("name", ["My Model (v2).Q4_K_M.gguf", "a@b,c+d.gguf", "ünï.GGUF", "q?#1.gguf", "p%20.gguf"])
def test_every_scheme_has_the_same_escapes(scheme: str, name: str) -> None:
    source = parse(f"{scheme}sub%20dir/{quote(name)}")
    assert (source.file, source.path.removeprefix("/srv/")) == (name, f"sub dir/{name}")
    assert source.text.endswith(f"/sub%20dir/{quote(name)}")
    assert parse(source.text) == source
    if scheme != "file:///srv/":
        with pytest.raises(SourceError, match="a blank is written %20, @ %40, # %23"):
            parse(f"{scheme}a b.gguf")


def test_hub_is_asked_for_the_name_that_the_file_has() -> None:
    source = parse("hf://acme/names/My%20Model(v2).gguf")
    assert source.url("https://hub").endswith("/resolve/main/My%20Model%28v2%29.gguf")
    assert parse("hf://acme/names/My%20Model%28v2%29.gguf") == source


def test_two_spellings_of_one_source_share_a_cache_folder() -> None:
    assert cache_key("hf://a/b/c.gguf", "1") == cache_key("hf://a/b@main/c.gguf", "1")
    assert cache_key("hf://a/b/c.gguf", "1") != cache_key("hf://a/b/c.gguf", "2")
    assert len(cache_key("hf://a/b/c.gguf", "1")) == 16


def test_web_source_takes_its_name_from_the_path() -> None:
    source = parse("https://files.example:8443/a%20b.gguf?sig=SECRET")
    assert (source.scheme, source.file) == ("https", "a b.gguf")
    assert source.url("unused").endswith("?sig=SECRET")
    assert "SECRET" not in source.display


def test_file_source_is_an_absolute_path() -> None:
    assert parse("file:///srv/a%20b.gguf").path == "/srv/a b.gguf"


@pytest.mark.parametrize("text", ["hf://a/b@main", "file:///srv/mlx/"])
def test_source_of_a_folder_has_no_file(text: str) -> None:
    source = parse(text)
    assert source.is_folder
    assert source.text == text
    assert parse("hf://a/b/") == parse("hf://a/b") == parse("hf://a/b@main")


@pytest.mark.parametrize(
    ("text", "holder", "path", "file"),
    [
        ("s3://models/llama/x%20y+z.gguf", "models", "llama/x y+z.gguf", "x y+z.gguf"),
        ("s3://models/llama/", "models", "llama/", ""),
        ("s3://models/", "models", "", ""),
        ("pvc://weights/a/x.gguf", "weights", "a/x.gguf", "x.gguf"),
        ("pvc://weights/a/", "weights", "a/", ""),
        ("pvc://weights/", "weights", "", ""),
    ],
)
def test_bucket_and_claim_hold_a_file_or_a_folder(text: str, holder: str, path: str, file: str) -> None:
    source = parse(text)
    assert (source.repo, source.path, source.file, source.is_folder) == (holder, path, file, not file)
    assert parse(source.text) == source


@pytest.mark.parametrize(
    ("text", "name"),
    [("ollama://qwen3:8b", "qwen3:8b"), ("ollama://hf.co/org/model:Q4_K_M", "hf.co/org/model:Q4_K_M")],
)
def test_a_model_of_ollamas_library_is_only_a_name(text: str, name: str) -> None:
    source = parse(text)
    assert (source.scheme, source.is_folder, source.path) == ("ollama", False, name)
    with pytest.raises(ArtifactError, match="runtime ollama"):
        refuse_ollama_source(source)
    refuse_ollama_source(parse("hf://a/b"))


DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("oci://ghcr.io/acme/tiny:v1", "ghcr.io/acme/tiny", "v1"),
        (f"oci://ghcr.io/acme/tiny@{DIGEST}", "ghcr.io/acme/tiny", DIGEST),
        ("oci://localhost:5000/a:latest", "localhost:5000/a", "latest"),
        ("oci://[::1]:5000/a/b__c/d-e.f:v1.0_x", "[::1]:5000/a/b__c/d-e.f", "v1.0_x"),
        ("oci://docker.io/ai/smollm2:360M-Q4_K_M", "docker.io/ai/smollm2", "360M-Q4_K_M"),
    ],
)
def test_artifact_of_a_registry_has_a_tag_or_a_digest(text: str, repo: str, revision: str) -> None:
    source = parse(text)
    assert (source.scheme, source.repo, source.revision, source.file) == ("oci", repo, revision, "")
    assert (source.is_folder, source.display) == (True, text)


@pytest.mark.parametrize(
    "text",
    [
        "oci://ghcr.io/acme/tiny",
        f"oci://ghcr.io/acme/tiny:v1@{DIGEST}",
        "oci://acme/tiny:v1",
        "oci://tiny:v1",
        "oci://ghcr.io/Acme/tiny:v1",
        "oci://ghcr.io/../tiny:v1",
        "oci://ghcr.io//tiny:v1",
        "oci://user:hunter2@ghcr.io/tiny:v1",
        "oci://ghcr.io/tiny:v1?x=1",
        "oci://ghcr.io/tiny@sha256:abc",
        "oci://ghcr.io/tiny:-v1",
        "oci://ghcr.io:port/tiny:v1",
        "oci://ghcr.io:99999/tiny:v1",
        "oci://[::::]/tiny:v1",
        "oci://[1.2]/tiny:v1",
        "oci://ghcr.io/tiny:v1\n",
        f"oci://ghcr.io/{'a' * 256}:v1",
    ],
)
def test_invalid_artifact_of_a_registry_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(SourceError, match="oci://REGISTRY/REPOSITORY:TAG or oci://") as caught:
        parse(text)
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("ollama://qwen3", "NAME:TAG"),
        ("ollama://../x:y", "NAME:TAG"),
        ("ollama://registry.example/a/b/c:d", "NAME:TAG"),
        ("", "hf://"),
        ("model.gguf", "hf://"),
        ("gs://bucket/x.gguf", "hf://"),
        ("s3://bucket", "s3://BUCKET/KEY.gguf"),
        ("s3://Bucket/x.gguf", "s3://BUCKET/KEY.gguf"),
        ("s3://key:secret@bucket/x.gguf", "s3://BUCKET/KEY.gguf"),
        ("s3://bucket/x.gguf?versionId=1", "s3://BUCKET/KEY.gguf"),
        ("s3://bucket/a/../x.gguf", ".."),
        ("s3://bucket/%2e%2e/x.gguf", ".."),
        ("s3://bucket//", "empty"),
        ("s3://bucket/a%0ab.gguf", "s3://BUCKET/KEY.gguf"),
        ("pvc://claim", "pvc://CLAIM/PATH"),
        ("pvc://Claim_1/x.gguf", "pvc://CLAIM/PATH"),
        ("pvc:///x.gguf", "pvc://CLAIM/PATH"),
        ("pvc://claim/../x.gguf", ".."),
        ("pvc://claim/a/%2e%2e/%2e%2e/x.gguf", ".."),
        ("pvc://claim/a/..", ".."),
        ("hf://repo/x.gguf", "ORG/REPO"),
        ("hf://a/b/../../c.gguf", ".."),
        ("hf://../b/c.gguf", ".."),
        ("hf://a/b@../c.gguf", ".."),
        ("hf://a/b@..", ".."),
        ("hf://a/b/c.gguf?download=1", "ORG/REPO"),
        ("hf://a/b//c.gguf", "empty"),
        ("hf://a/b/%2e%2e/c.gguf", ".."),
        ("hf://a/b/c%2f..", ".."),
        ("hf://a/b/%0a/c.gguf", "printed"),
        ("hf://a/b/c@v1.gguf", "@ %40"),
        ("http:///x.gguf", "host"),
        ("https://host/", "name"),
        ("https://host/a/..", "name"),
        ("https://host/a%2f..", "name"),
        ("https://host/.hidden", "name"),
        ("https://host/" + "x" * 237, "236"),
        ("https://host/a\nb.gguf", "blanks"),
        ("http://[::1/x.gguf", "no URL"),
        ("http://h:port/x.gguf", "no URL"),
        ("https://user:hunter2@host/x.gguf", "token"),
        ("file://server/x.gguf", "three slashes"),
        ("file://x.gguf", "three slashes"),
        ("file:///srv/../etc/shadow", ".."),
        ("file:///srv/%2e%2e/etc/shadow", ".."),
        ("file:///srv/a%00b/x.gguf", "three slashes"),
    ],
)
def test_an_invalid_source_is_refused_with_the_way_out(text: str, hint: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse(text)
    assert caught.value.reason == "SourceInvalid"
    assert not caught.value.retryable
    assert hint in caught.value.message
    assert "hunter2" not in caught.value.message
    assert "\n" not in caught.value.message


@given(
    st.sampled_from(["hf://", "http://", "https://", "file://", "oci://a.b/", "s3://b-1/", "pvc://c/", ""]), st.text()
)
def test_any_text_is_a_safe_file_name_or_refused(scheme: str, rest: str) -> None:
    try:
        source = parse(scheme + rest)
    except ArtifactError:
        return
    assert source.is_folder or source.file not in ("", ".", "..")
    assert "/" not in source.file
    assert "\0" not in source.file
    assert parse(source.text) == source
    assert scheme_of(scheme + rest) == source.scheme


@pytest.mark.parametrize("text", ["hf", "/srv/hf", "file:/srv/m.gguf", "HF://a/b", "ftp://a/b.gguf", ""])
def test_text_without_a_known_scheme_has_none(text: str) -> None:
    assert scheme_of(text) is None
