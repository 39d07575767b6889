"""Weights of a real S3 service: inspected, fetched, resumed, verified, and refused with bucket, key and way out."""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from yarl import URL

from artifacts import partial_download
from artifacts.errors import ArtifactError
from artifacts.fetch import FetchedArtifact, fetch
from artifacts.inspect import Inspection, inspect
from artifacts.repositories.repository import SourceAccess
from artifacts.repositories.s3_access import S3Access
from artifacts.repositories.schemes import open_repository
from artifacts.retry import Patience
from artifacts.source import parse
from tests.controlplane.process import CHECKOUT
from tests.support.file_server import ALLOWED_NETWORKS
from tests.support.servers.s3 import OWNER, REGION, STRANGER, S3Server, run_s3_server
from tests.support.source_access import take_access, take_expected
from tests.support.tiny_models import tiny_gguf, tiny_mlx

BUCKET = "models"
MIB = 1 << 20
PATIENCE = Patience(first_pause_seconds=0.01, longest_pause_seconds=0.05)


class Bucket(NamedTuple):
    """A bucket of a real service, with weights in it."""

    server: S3Server
    folder: Path
    """The files as they were stored, by key."""

    def sha256(self, key: str) -> str:
        return hashlib.sha256((self.folder / key).read_bytes()).hexdigest()

    async def inspect(self, source: str, s3: S3Access | None = None, **options: Any) -> Inspection:
        access = take_access(options, patience=PATIENCE, s3=s3 or self.server.access())
        return await inspect(parse(source), access, **options)

    async def fetch(self, source: str, to: Path, s3: S3Access | None = None, **options: Any) -> FetchedArtifact:
        access = take_access(options, patience=PATIENCE, s3=s3 or self.server.access())
        options.setdefault("on_progress", lambda _done, _total: None)
        return await fetch(parse(source), to, access, take_expected(options), **options)

    async def refuse(self, source: str, s3: S3Access) -> ArtifactError:
        with pytest.raises(ArtifactError) as caught:
            await self.inspect(source, s3)
        assert not caught.value.retryable
        assert source in caught.value.message
        assert "secret" not in caught.value.message.replace("secret key", "")
        return caught.value


@pytest.fixture
async def bucket(tmp_path: Path) -> AsyncIterator[Bucket]:
    folder = tmp_path / "stored"
    (folder / "gguf").mkdir(parents=True)
    tiny_gguf.write(folder / "gguf/tiny model.gguf")
    (folder / "gguf/large.gguf").write_bytes(random.Random(0).randbytes(6 * MIB))  # noqa: S311  weights, not a secret
    tiny_mlx.write(folder / "mlx")
    async with run_s3_server(tmp_path / "s3") as server:
        await server.make_bucket(BUCKET)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                await server.put(BUCKET, str(path.relative_to(folder)), path.read_bytes(), with_digest=True)
        yield Bucket(server, folder)


async def test_file_is_inspected_and_fetched_with_digest_that_the_service_keeps(bucket: Bucket, tmp_path: Path) -> None:
    source = "s3://models/gguf/tiny%20model.gguf"
    inspection = await bucket.inspect(source)
    assert (inspection.file, inspection.gguf.architecture) == ("tiny model.gguf", "llama")
    assert inspection.sha256 == bucket.sha256("gguf/tiny model.gguf")
    fetched = await bucket.fetch(
        source, tmp_path / "to", revision=inspection.revision, size_bytes=inspection.size_bytes
    )
    assert fetched.sha256 == inspection.sha256
    assert hashlib.sha256(fetched.path.read_bytes()).hexdigest() == inspection.sha256


async def test_folder_is_listed_and_inspected(bucket: Bucket) -> None:
    inspection = await bucket.inspect("s3://models/mlx/")
    assert inspection.gguf.architecture == "llama"
    assert inspection.size_bytes == sum(path.stat().st_size for path in (bucket.folder / "mlx").iterdir())
    access = SourceAccess(allowed_networks=ALLOWED_NETWORKS, s3=bucket.server.access())
    repository = open_repository(parse("s3://models/mlx/"), access)
    assert (await repository.list_files(inspection.revision)).revision == inspection.revision

    await bucket.server.put(BUCKET, "mlx/config.json", b"{}")
    with pytest.raises(ArtifactError) as caught:
        await repository.list_files(inspection.revision)
    assert caught.value.reason == "SourceChanged"


async def test_more_objects_than_a_page_are_listed(bucket: Bucket) -> None:
    wanted = [f"many/{number:04}.json" for number in range(1001)]
    for key in wanted:
        await bucket.server.put(BUCKET, key, b"{}")
    access = SourceAccess(allowed_networks=ALLOWED_NETWORKS, s3=bucket.server.access())
    listing = await open_repository(parse("s3://models/many/"), access).list_files(None)
    assert [f"many/{file.path}" for file in listing.files] == wanted


class CuttingRelay:
    """A connection to the service that breaks after some bytes of each of the first answers."""

    def __init__(self, server: S3Server, cuts: list[int]) -> None:
        self._target = server.url.removeprefix("http://").rpartition(":")
        self.cuts = cuts
        self.requests: list[str] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            request = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(request.decode())
            left = self.cuts.pop(0) if self.cuts else 1 << 30
            upstream, sender = await asyncio.open_connection(host, int(port))
            with contextlib.closing(sender):
                sender.write(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                while left > 0 and (block := await upstream.read(min(left, 65536))):
                    left -= len(block)
                    writer.write(block)
                    await writer.drain()


async def test_cut_download_is_resumed_and_verified_by_a_later_process(bucket: Bucket, tmp_path: Path) -> None:
    relay = CuttingRelay(bucket.server, [3 * MIB])
    async with await asyncio.start_server(relay, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        key_id, secret_key = OWNER
        s3 = S3Access(key_id=key_id, secret_key=secret_key, region=REGION, endpoint=f"http://127.0.0.1:{port}")
        source = "s3://models/gguf/large.gguf"
        with pytest.raises(ArtifactError, match="failed"):
            await bucket.fetch(source, tmp_path, s3, patience=Patience(attempts=1))
        fetched = await bucket.fetch(source, tmp_path, s3)
    assert fetched.path.read_bytes() == (bucket.folder / "gguf/large.gguf").read_bytes()
    ranges = [line for request in relay.requests for line in request.splitlines() if line.lower().startswith("range:")]
    assert len(ranges) == 1
    assert int(ranges[0].partition("=")[2].rstrip("-")) >= 2 * MIB


async def test_other_bytes_than_the_digest_are_refused(bucket: Bucket, tmp_path: Path) -> None:
    stored = bucket.server.buckets / BUCKET / "gguf/large.gguf"
    content = bytearray(stored.read_bytes())
    content[MIB] ^= 1
    stored.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        await bucket.fetch("s3://models/gguf/large.gguf", tmp_path / "to")
    assert caught.value.reason == "ChecksumMismatch"


async def test_object_that_changed_after_the_inspection_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    source = "s3://models/gguf/tiny%20model.gguf"
    inspection = await bucket.inspect(source)
    await bucket.server.put(BUCKET, "gguf/tiny model.gguf", b"GGUF of another model")
    with pytest.raises(ArtifactError) as caught:
        await bucket.fetch(source, tmp_path / "to", revision=inspection.revision)
    assert caught.value.reason == "SourceChanged"


async def test_refusal_names_bucket_key_and_way_out(bucket: Bucket) -> None:
    at = bucket.server.access
    file, folder = "s3://models/gguf/large.gguf", "s3://models/mlx/"
    for source in (file, folder):
        assert "allow them s3:GetObject" in (await bucket.refuse(source, at(STRANGER))).message
        assert "not public: give AWS_ACCESS_KEY_ID" in (await bucket.refuse(source, at(None))).message
        assert "AWS_SECRET_ACCESS_KEY" in (await bucket.refuse(source, at((OWNER[0], "wrong")))).message
        assert "does not know the access key" in (await bucket.refuse(source, at(("nobody", "wrong")))).message
        wrong_region = await bucket.refuse(source, at(region="us-east-1"))
        assert f"is in region {REGION}: set AWS_REGION" in wrong_region.message
    assert (await bucket.refuse("s3://models/none.gguf", at())).reason == "SourceNotFound"
    for source in ("s3://no-such-bucket/x.gguf", "s3://no-such-bucket/"):
        error = await bucket.refuse(source, at())
        assert (error.reason, "no such bucket" in error.message) == ("SourceNotFound", True)


async def test_public_bucket_needs_no_keys(bucket: Bucket) -> None:
    statement = {"Effect": "Allow", "Principal": "*", "Action": ["s3:GetObject", "s3:ListBucket"]}
    resources = ["arn:aws:s3:::models", "arn:aws:s3:::models/*"]
    await bucket.server.set_policy(BUCKET, json.dumps({"Statement": [{**statement, "Resource": resources}]}))
    assert (await bucket.inspect("s3://models/mlx/", bucket.server.access(None))).gguf.architecture == "llama"
    assert (await bucket.inspect("s3://models/gguf/tiny%20model.gguf", bucket.server.access(STRANGER))).sha256


async def test_command_takes_the_keys_from_the_environment(bucket: Bucket, tmp_path: Path) -> None:
    source = "s3://models/gguf/tiny%20model.gguf"
    command = [
        "fetch",
        source,
        "--to",
        str(tmp_path / "to"),
        "--allow-private-sources",
        "127.0.0.1/32",
        "--output=json",
    ]
    environment = {**os.environ, **bucket.server.environment()}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", *command), env=environment, stdout=asyncio.subprocess.PIPE, cwd=CHECKOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(output)["sha256"] == bucket.sha256("gguf/tiny model.gguf")


async def test_large_object_is_fetched_by_ranges_of_one_version(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_download, "SEGMENT_BYTES", MIB)
    requested: list[tuple[int, str]] = []
    authorize = S3Access.authorize_headers

    def note(access: S3Access, url: URL, headers: Mapping[str, str]) -> Mapping[str, str]:
        requested.append((len(requested), headers.get("Range", "")))
        assert ("Range" in headers) == ("If-Range" in headers)
        return authorize(access, url, headers)

    monkeypatch.setattr(S3Access, "authorize_headers", note)
    fetched = await bucket.fetch("s3://models/gguf/large.gguf", tmp_path / "to")
    assert fetched.sha256 == bucket.sha256("gguf/large.gguf")
    assert fetched.path.read_bytes() == (bucket.folder / "gguf/large.gguf").read_bytes()
    assert requested[0] == (0, "")
    assert len({text for _, text in requested}) == len(requested) > 6
