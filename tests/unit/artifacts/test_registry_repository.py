"""Pulls from a registry, with its logins and with answers that no honest registry gives."""

import base64
import hashlib
import random
from pathlib import Path

import pytest

from artifacts import partial_download
from artifacts.errors import ArtifactError
from artifacts.fetch import ExpectedFile, FetchedArtifact, ReportProgress, fetch_file
from artifacts.repositories.address_policy import parse_network
from artifacts.repositories.registry_repository import RegistryRepository, is_plain_http
from artifacts.repositories.repository import SourceAccess
from artifacts.retry import Connections
from artifacts.source import parse
from tests.support.registry_artifacts import build_artifact, describe, encode_index, encode_manifest
from tests.unit.artifacts.stored_weights import HURRIED
from tests.unit.artifacts.stub_registry import StubRegistry, serve_registry

WEIGHTS = b"weights" * 1000
ARTIFACT = build_artifact({"model.gguf": WEIGHTS, "notes.md": b"no engine reads it"})
BASIC = f"Basic {base64.b64encode(b'user:pass').decode()}"


async def _fetch(
    repository: RegistryRepository,
    to: Path,
    revision: str | None = None,
    on_progress: ReportProgress = lambda _done, _total: None,
) -> FetchedArtifact:
    listing = await repository.list_files(revision)
    file = listing.files[0]
    return await fetch_file(
        repository,
        file.path,
        to / file.name,
        ExpectedFile(sha256=file.sha256, revision=listing.revision),
        on_progress=on_progress,
        connections=Connections(HURRIED, "test"),
    )


async def _refuse(repository: RegistryRepository, to: Path) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await _fetch(repository, to)
    assert not (to / "model.gguf").exists()
    assert "\n" not in caught.value.message
    return caught.value


def _sent(registry: StubRegistry) -> set[str]:
    return {authorization for _, _, authorization in registry.requests}


async def test_tag_is_resolved_once_and_then_the_digest_is_the_revision(tmp_path: Path) -> None:
    async with serve_registry() as registry:
        registry.hold(ARTIFACT)
        repository = registry.repository()
        listing = await repository.list_files(None)
        registry.hold(build_artifact({"model.gguf": b"moved"}))

        done = await _fetch(repository, tmp_path, listing.revision)

    assert listing.revision == ARTIFACT.digest
    assert [(file.path, file.size_bytes) for file in listing.files] == [("model.gguf", len(WEIGHTS))]
    assert done.path.read_bytes() == WEIGHTS
    assert (done.revision, done.sha256) == (ARTIFACT.digest, hashlib.sha256(WEIGHTS).hexdigest())
    assert [path for path, _, _ in registry.requests if "/manifests/" in path] == ["/v2/acme/tiny/manifests/v1"]


async def test_source_by_digest_never_asks_for_a_tag(tmp_path: Path) -> None:
    async with serve_registry() as registry:
        registry.hold(ARTIFACT)
        done = await _fetch(registry.repository(f"@{ARTIFACT.digest}"), tmp_path)
    assert done.revision == ARTIFACT.digest
    assert all("/v1" not in path.removeprefix("/v2") for path, _, _ in registry.requests)


async def test_index_is_the_revision_and_its_manifest_has_the_files(tmp_path: Path) -> None:
    index = encode_index(describe(ARTIFACT.manifest, media_type="application/vnd.oci.image.manifest.v1+json"))
    async with serve_registry() as registry:
        registry.hold(ARTIFACT)
        registry.manifests["v1"] = index
        done = await _fetch(registry.repository(), tmp_path)
    assert done.revision == f"sha256:{hashlib.sha256(index).hexdigest()}"
    assert done.path.read_bytes() == WEIGHTS


async def test_index_of_an_index_is_refused(tmp_path: Path) -> None:
    inner = encode_index()
    async with serve_registry() as registry:
        outer = encode_index(describe(inner, media_type="application/vnd.oci.image.manifest.v1+json"))
        two = encode_index(describe(outer, media_type="application/vnd.oci.image.manifest.v1+json"))
        registry.manifests = {"v1": two, describe(outer)["digest"]: outer}
        error = await _refuse(registry.repository(), tmp_path)
    assert "names another index" in error.message


async def test_range_of_a_file_is_read() -> None:
    async with serve_registry() as registry:
        registry.hold(ARTIFACT)
        opening = registry.repository().open_file("model.gguf", None)
        async with opening as opened, opened.read(7, 13) as response:
            text = b"".join([block async for block in response.blocks])
    assert (text, response.first, response.size_bytes) == (b"weights", 7, len(WEIGHTS))


async def test_new_token_is_obtained_once_for_all_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_download, "SEGMENT_BYTES", 1 << 16)
    content = random.Random(0).randbytes(1 << 20)  # noqa: S311  weights, not a secret
    async with serve_registry(realm="own") as registry:
        registry.hold(build_artifact({"model.gguf": content}))

        def expire(done: int, _total: int | None) -> None:
            if done > 1 << 18 and len(registry.issued) == 1:
                registry.issued.append("of somebody else")

        done = await _fetch(registry.repository(), tmp_path, on_progress=expire)
    assert done.path.read_bytes() == content
    assert len([path for path, _, _ in registry.requests if path == "/token"]) <= 8
    assert sum("/blobs/" in path for path, _, _ in registry.requests) > 16


async def test_credentials_that_another_request_has_obtained_are_used() -> None:
    async with serve_registry(realm="own") as registry:
        authorizer = registry.repository()._authorizer
        challenges = [registry._challenge()]
        assert await authorizer.answer_challenges(challenges, "")
        assert await authorizer.answer_challenges(challenges, "")
        assert len(registry.issued) == 1
        assert await authorizer.answer_challenges(challenges, f"Bearer {registry.issued[0]}")
        assert len(registry.issued) == 2


async def test_manifest_of_another_digest_is_refused(tmp_path: Path) -> None:
    async with serve_registry() as registry:
        registry.hold(ARTIFACT)
        registry.manifests[ARTIFACT.digest] = build_artifact({"model.gguf": b"other"}).manifest
        error = await _refuse(registry.repository(f"@{ARTIFACT.digest}"), tmp_path)
    assert error.reason == "ChecksumMismatch"
    assert ARTIFACT.digest in error.message


async def test_blob_of_another_digest_is_not_kept(tmp_path: Path) -> None:
    async with serve_registry() as registry:
        registry.hold(ARTIFACT)
        registry.blobs = dict.fromkeys(registry.blobs, WEIGHTS[::-1])
        error = await _refuse(registry.repository(), tmp_path)
    assert error.reason == "ChecksumMismatch"


async def test_blob_of_another_size_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with serve_registry() as registry:
        registry.hold(ARTIFACT)
        registry.blobs = dict.fromkeys(registry.blobs, WEIGHTS + b"more")
        error = await _refuse(registry.repository(), tmp_path)
    assert error.reason == "SourceRefused"
    assert f"sends {len(WEIGHTS) + 4} bytes for model.gguf" in error.message


async def test_manifest_that_is_too_long_is_refused(tmp_path: Path) -> None:
    async with serve_registry() as registry:
        registry.manifests["v1"] = encode_manifest([], padding="x" * (4 << 20))
        error = await _refuse(registry.repository(), tmp_path)
    assert "longer than 4194304 bytes" in error.message


async def test_missing_tag_is_named(tmp_path: Path) -> None:
    async with serve_registry() as registry:
        error = await _refuse(registry.repository(":v9"), tmp_path)
    assert (error.reason, error.retryable) == ("SourceNotFound", False)
    assert "/acme/tiny:v9: HTTP 404: the registry has no such repository, tag" in error.message


async def test_basic_login_goes_to_the_registry_only_after_it_asks(tmp_path: Path) -> None:
    async with serve_registry() as blobs, serve_registry(password="user:pass", blob_server=f"{blobs.url}") as registry:
        registry.hold(ARTIFACT)
        registry.blob_server = f"{blobs.url}/v2/acme/tiny/blobs"
        blobs.hold(ARTIFACT)

        done = await _fetch(registry.repository(token="user:pass"), tmp_path)

    assert done.path.read_bytes() == WEIGHTS
    assert [authorization for _, _, authorization in registry.requests][:2] == ["", BASIC]
    assert _sent(blobs) == {""}


async def test_token_is_asked_for_with_our_own_scope(tmp_path: Path) -> None:
    async with serve_registry(realm="own", password="user:pass") as registry:
        registry.hold(ARTIFACT)
        done = await _fetch(registry.repository(token="user:pass"), tmp_path)

    assert done.path.read_bytes() == WEIGHTS
    asked = [(query, authorization) for path, query, authorization in registry.requests if path == "/token"]
    assert asked == [({"service": "stub", "scope": "repository:acme/tiny:pull"}, BASIC)]
    assert _sent(registry) == {"", BASIC, "Bearer token-0"}


async def test_public_artifact_gets_a_token_without_a_login(tmp_path: Path) -> None:
    async with serve_registry(realm="own") as registry:
        registry.hold(ARTIFACT)
        await _fetch(registry.repository(), tmp_path)
    assert _sent(registry) == {"", "Bearer token-0"}


async def test_expired_token_is_replaced(tmp_path: Path) -> None:
    async with serve_registry(realm="own") as registry:
        registry.hold(ARTIFACT)
        repository = registry.repository()
        await repository.list_files(None)
        registry.issued.append("expired")

        await _fetch(repository, tmp_path)
    assert [authorization for path, _, authorization in registry.requests if "/blobs/" in path] == [
        "Bearer token-0",
        "Bearer token-2",
    ]


async def test_password_is_not_sent_to_a_realm_elsewhere(tmp_path: Path) -> None:
    async with serve_registry(realm="own") as thief, serve_registry(realm=f"{thief.url}/token") as registry:
        registry.hold(ARTIFACT)
        error = await _refuse(registry.repository(token="user:pass"), tmp_path)

    assert error.reason == "SourceUnauthorized"
    assert thief.url in error.message
    assert "pass" not in error.message.replace("password", "")
    assert thief.requests == []


async def test_public_artifact_may_name_a_realm_elsewhere(tmp_path: Path) -> None:
    async with serve_registry() as issuer, serve_registry(realm=f"{issuer.url}/token") as registry:
        registry.issued = issuer.issued
        registry.hold(ARTIFACT)
        done = await _fetch(registry.repository(), tmp_path)
    assert done.path.read_bytes() == WEIGHTS


async def test_challenge_of_a_server_that_was_redirected_to_is_not_answered(tmp_path: Path) -> None:
    async with serve_registry(password="other:pass") as thief, serve_registry(password="user:pass") as registry:
        registry.hold(ARTIFACT)
        registry.blob_server = f"{thief.url}/v2/acme/tiny/blobs"
        error = await _refuse(registry.repository(token="user:pass"), tmp_path)
    assert error.reason == "SourceUnauthorized"
    assert _sent(thief) == {""}


@pytest.mark.parametrize("settings", [{"password": "user:pass"}, {"password": "user:pass", "realm": "own"}])
@pytest.mark.parametrize("token", [None, "user:wrong", "bearer"])
async def test_wrong_login_is_refused_after_few_requests(
    settings: dict[str, str], token: str | None, tmp_path: Path
) -> None:
    async with serve_registry(**settings) as registry:
        registry.hold(ARTIFACT)
        error = await _refuse(registry.repository(token=token), tmp_path)
    assert (error.reason, error.retryable) == ("SourceUnauthorized", False)
    assert "spec.sourceSecretRef" in error.message
    assert "wrong" not in error.message
    assert len(registry.requests) <= 3


async def test_bearer_token_of_the_user_is_sent_as_it_is(tmp_path: Path) -> None:
    async with serve_registry(realm="own", issued=["bearer"]) as registry:
        registry.hold(ARTIFACT)
        await _fetch(registry.repository(token="bearer"), tmp_path)
    assert _sent(registry) == {"Bearer bearer"}


async def test_private_address_is_not_asked(tmp_path: Path) -> None:
    async with serve_registry() as registry:
        access = SourceAccess(
            token=None, endpoint="", file_root=None, allowed_networks=(parse_network("10.9.0.0/16"),), patience=HURRIED
        )
        error = await _refuse(RegistryRepository(parse(registry.source()), access), tmp_path)
    assert error.reason == "SourceForbidden"
    assert registry.requests == []


@pytest.mark.parametrize(
    ("registry", "named", "is_plain"),
    [
        ("127.0.0.1:5000", "", True),
        ("localhost:5000", "", True),
        ("[::1]:5000", "", True),
        ("registry.example", "", False),
        ("10.0.0.1:5000", "", False),
        ("10.0.0.1:5000", "a.example 10.0.0.1:5000", True),
        ("10.0.0.1", "10.0.0.1:5000", False),
    ],
)
def test_only_loopback_and_named_registries_are_asked_without_tls(registry: str, named: str, is_plain: bool) -> None:
    assert is_plain_http(registry, {"POMONA_PLAIN_HTTP_REGISTRIES": named}) is is_plain


def test_file_has_the_digest_in_its_source() -> None:
    repository = StubRegistry(url="http://r.example").repository()
    assert repository.file_source("a/b.gguf", ARTIFACT.digest).text == (
        f"oci://r.example/acme/tiny@{ARTIFACT.digest}/a/b.gguf"
    )
