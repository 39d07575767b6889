"""A real registry: weights are inspected and fetched as `pomona` does it, with each kind of login."""

import asyncio
import base64
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from artifacts import partial_download
from artifacts.fetch_source import fetch_source
from artifacts.repositories.http_source import Origin
from artifacts.source import parse
from tests.support.registry_artifacts import Artifact, build_artifact, describe, encode_index, push
from tests.support.servers.registry import (
    BASIC,
    issue_token,
    serve_private_registry,
    serve_registry,
    serve_token_registry,
)
from tests.support.source_access import take_access, take_expected
from tests.support.tiny_models import tiny_gguf, tiny_split

REPOSITORY = "acme/tiny"


class Command(NamedTuple):
    """The end of a command: exit code, result and standard error."""

    code: int
    facts: dict[str, Any]
    error: str


async def _run(verb: str, source: str, *options: str, files: str = "*.gguf", **environment: str) -> Command:
    inherited = {name: value for name, value in os.environ.items() if name != "POMONA_SOURCE_TOKEN"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", verb, source, "--files", files, "--output=json"),
        *("--allow-private-sources", "127.0.0.0/8", *options),
        env={**inherited, "no_proxy": "*", **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await process.communicate()
    return Command(await process.wait(), json.loads(out or b"{}"), error.decode())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny_gguf.write(path)
    return path.read_bytes()


@pytest.fixture
def artifact(weights: bytes) -> Artifact:
    return build_artifact({"tiny.gguf": weights, "README.md": b"# tiny"})


def _source(url: str, reference: str = ":v1") -> str:
    return f"oci://{url.removeprefix('http://')}/{REPOSITORY}{reference}"


async def test_artifact_of_open_registry_is_fetched(artifact: Artifact, weights: bytes, tmp_path: Path) -> None:
    async with serve_registry(tmp_path / "registry") as url:
        assert await push(url, REPOSITORY, "v1", artifact) == artifact.digest
        inspected = await _run("inspect", _source(url))
        await push(url, REPOSITORY, "v1", build_artifact({"tiny.gguf": b"moved"}))
        to = tmp_path / "to"
        fetched = await _run("fetch", _source(url), "--to", str(to), "--revision", artifact.digest)

    assert (inspected.code, inspected.error) == (0, "")
    assert inspected.facts["revision"] == artifact.digest
    assert (inspected.facts["file"], inspected.facts["sizeBytes"]) == ("tiny.gguf", len(weights))
    assert inspected.facts["gguf"]["architecture"] == "llama"
    assert (fetched.code, fetched.facts["revision"]) == (0, artifact.digest), fetched.error
    assert (to / "tiny.gguf").read_bytes() == weights
    assert not (to / "README.md").exists()


async def test_index_with_one_artifact_is_fetched_by_digest(artifact: Artifact, weights: bytes, tmp_path: Path) -> None:
    index = encode_index(describe(artifact.manifest, media_type="application/vnd.oci.image.manifest.v1+json"))
    async with serve_registry(tmp_path / "registry") as url:
        await push(url, REPOSITORY, artifact.digest, artifact)
        digest = await push(url, REPOSITORY, "v1", Artifact(index, {}))
        fetched = await _run("fetch", _source(url, f"@{digest}"), "--to", str(tmp_path / "to"))
    assert (fetched.code, fetched.facts["revision"]) == (0, digest), fetched.error
    assert (tmp_path / "to/tiny.gguf").read_bytes() == weights


async def test_mirror_serves_all_files_of_the_artifact_that_the_source_lost(weights: bytes, tmp_path: Path) -> None:
    """A split model, with no digest but that of its manifest; the mirror gets no login."""
    parts = {path.name: path.read_bytes() for path in tiny_split.write(tmp_path / "parts")}
    artifact, other = build_artifact(parts), build_artifact({"tiny.gguf": weights})
    async with serve_registry(tmp_path / "lost") as lost, serve_registry(tmp_path / "mirror") as mirror:
        await push(mirror, REPOSITORY, "copy", artifact)
        await push(mirror, REPOSITORY, "other", other)
        at = f"@{artifact.digest}"
        mirrored = ("--mirror", _source(mirror, at))
        inspected = await _run("inspect", _source(lost, at), *mirrored)
        to = tmp_path / "to"
        fetched = await _run("fetch", _source(lost, at), "--to", str(to), "--revision", artifact.digest, *mirrored)
        refused = await _run("inspect", _source(lost, at), "--mirror", _source(mirror, f"@{other.digest}"))

    assert (inspected.code, inspected.facts["revision"]) == (0, artifact.digest), inspected.error
    assert fetched.code == 0, fetched.error
    assert {path.name: path.read_bytes() for path in to.glob("*.gguf")} == parts
    assert (refused.code, at in refused.error) == (2, True)


def _mount(folder: Path, **keys: str) -> dict[str, str]:
    """Write the keys of a Secret as a Job has them, and return its environment."""
    folder.mkdir()
    for key, value in keys.items():
        (folder / key).write_text(value)
    return {"POMONA_SOURCE_SECRET": str(folder)}


def _docker_config(host: str) -> str:
    return json.dumps({"auths": {host: {"auth": base64.b64encode(b"user:pass").decode()}}})


@pytest.fixture
async def private(artifact: Artifact, tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a registry that has the artifact and wants a login."""
    async with serve_private_registry(tmp_path / "registry") as url:
        await push(url, REPOSITORY, "v1", artifact, authorization=BASIC)
        yield url


async def test_private_registry_takes_each_kind_of_login(private: str, tmp_path: Path) -> None:
    config = _docker_config(private.removeprefix("http://"))
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").write_text(config)
    for environment in (
        _mount(tmp_path / "secret", **{".dockerconfigjson": config}),
        _mount(tmp_path / "other-secret", username="user", password="pass"),
        {"POMONA_SOURCE_TOKEN": "user:pass"},
        {"DOCKER_CONFIG": str(tmp_path / "docker")},
    ):
        inspected = await _run("inspect", _source(private), **environment)
        assert (inspected.code, inspected.error) == (0, "")


async def test_wrong_login_is_refused_without_being_quoted(private: str, tmp_path: Path) -> None:
    elsewhere = _mount(tmp_path / "secret", **{".dockerconfigjson": _docker_config("ghcr.io")})
    for environment, way_out in (
        ({}, "HTTP 401: no access: give a login"),
        ({"POMONA_SOURCE_TOKEN": "user:wrong"}, "HTTP 401: no access: give a login"),
        (elsewhere, "--docker-server=127.0.0.1:"),
    ):
        refused = await _run("inspect", _source(private), **environment)
        assert (refused.code, way_out in refused.error) == (2, True), refused.error
        assert "wrong" not in refused.error


async def test_registry_with_a_server_of_tokens_is_asked_to_pull_only(
    artifact: Artifact, weights: bytes, tmp_path: Path
) -> None:
    issued: list[str] = []
    async with serve_token_registry(tmp_path / "registry", issued) as url:
        pushing = issue_token(f"repository:{REPOSITORY}:pull,push")
        await push(url, REPOSITORY, "v1", artifact, authorization=f"Bearer {pushing}")
        fetched = await _run("fetch", _source(url), "--to", str(tmp_path / "to"), POMONA_SOURCE_TOKEN="user:pass")
        with_token = await _run("inspect", _source(url), POMONA_SOURCE_TOKEN=pushing)
        refused = await _run("inspect", _source(url))

    assert (fetched.code, with_token.code, refused.code) == (0, 0, 2), fetched.error + with_token.error
    assert (tmp_path / "to/tiny.gguf").read_bytes() == weights
    assert issued == [f"repository:{REPOSITORY}:pull"]


async def test_container_image_is_inspected_for_nodes_that_mount_it(tmp_path: Path) -> None:
    image = build_artifact({"": b"archive"}, "application/vnd.oci.image.layer.v1.tar+gzip")
    async with serve_registry(tmp_path / "registry") as url:
        await push(url, REPOSITORY, "v1", image)
        refused = await _run("inspect", _source(url), "--image-volume")
        inspected = await _run("inspect", _source(url), "--image-volume", files="models/tiny.gguf")
    assert "spec.files, for example files: ['models/tiny.gguf']" in refused.error
    assert (inspected.code, inspected.facts["revision"]) == (0, image.digest), inspected.error
    assert (inspected.facts["file"], inspected.facts["format"]) == ("models/tiny.gguf", "gguf")


async def test_artifact_of_files_is_inspected_for_nodes_that_mount_it(weights: bytes, tmp_path: Path) -> None:
    async with serve_registry(tmp_path / "registry") as url:
        await push(url, REPOSITORY, "v1", build_artifact({"models/tiny.gguf": weights}))
        inspected = await _run("inspect", _source(url), "--image-volume")
    assert (inspected.code, inspected.facts["file"]) == (0, "models/tiny.gguf"), inspected.error
    assert inspected.facts["gguf"]["architecture"] == "llama"


async def test_archive_is_refused_with_the_way_to_push_files(tmp_path: Path) -> None:
    layer = "application/vnd.oci.image.layer.v1.tar+gzip"
    packed = build_artifact({"": b"archive"}, layer)
    async with serve_registry(tmp_path / "registry") as url:
        await push(url, REPOSITORY, "v1", packed)
        refused = await _run("inspect", _source(url))
    assert refused.code == 2
    assert f"oras push {url.removeprefix('http://')}/{REPOSITORY}:TAG FILE..." in refused.error


async def test_large_blob_is_fetched_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_download, "SEGMENT_BYTES", 1 << 16)
    content = random.Random(0).randbytes(1 << 20)  # noqa: S311  weights, not a secret
    async with serve_registry(tmp_path / "registry") as url:
        await push(url, REPOSITORY, "v1", build_artifact({"large.gguf": content}))
        ranges: list[tuple[int, int | None]] = []
        read = Origin.read

        def note(origin: Origin, first: int = 0, last: int | None = None, validator: str = "") -> Any:
            ranges.append((first, last))
            return read(origin, first, last, validator)

        monkeypatch.setattr(Origin, "read", note)
        access = take_access({})
        source = parse(f"{_source(url)}", ("*.gguf",))
        await fetch_source(source, tmp_path / "to", access, take_expected({}), lambda _done, _total: None)
    assert (tmp_path / "to/large.gguf").read_bytes() == content
    assert len(set(ranges)) == len(ranges) > 8
