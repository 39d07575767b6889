"""Private weights on a host serve only the namespaces whom their server has let in."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from artifacts.errors import ArtifactError
from artifacts.weights_store import WeightsStore
from tests.support.file_server import FileServer
from tests.unit.artifacts.stored_weights import obtain, publish, refused

TOKEN = "secret"
OWNER: dict[str, Any] = {"tenant": "owner", "token": TOKEN}
FILE = "private.gguf"


@pytest.fixture
async def digest(store: WeightsStore, server: FileServer) -> str:
    """Weights that the namespace `owner` has fetched with its token."""
    server.token = TOKEN
    held = await obtain(store, publish(server, FILE), **OWNER)
    held.release()
    server.requests.clear()
    return held.digest


def _source(server: FileServer) -> str:
    return f"{server.url}/{FILE}"


@pytest.mark.parametrize("token", [None, "guessed"])
async def test_private_weights_are_refused_without_their_token(
    store: WeightsStore, server: FileServer, digest: str, token: str | None
) -> None:
    for sha256 in (None, digest):
        error = await refused(store, _source(server), tenant="other", token=token, sha256=sha256)
        assert error.reason == "SourceUnauthorized"
    assert [weights.manifest.digest for weights in store.stored()] == [digest]


async def test_owner_of_the_same_token_proves_it_once_without_a_download(
    store: WeightsStore, server: FileServer, digest: str
) -> None:
    held = await obtain(store, _source(server), tenant="other", token=TOKEN)
    assert held.digest == digest
    held.release()
    assert [request.range for request in server.seen(FILE)] == ["bytes=0-0"]

    server.statuses.extend([503] * 9)
    for tenant in ("other", "owner"):
        held = await obtain(store, _source(server), tenant=tenant, token=TOKEN)
        held.release()
    assert len(server.requests) == 1, "remembered, also while the server is away"


async def test_digest_alone_gives_no_access(store: WeightsStore, server: FileServer, digest: str) -> None:
    server.token = None
    own = publish(server, "own.gguf")
    error = await refused(store, own, tenant="other", sha256=digest)
    assert error.reason == "ChecksumMismatch"
    assert server.bytes_sent("own.gguf")


async def test_source_that_delivers_the_same_bytes_gives_access(
    store: WeightsStore, server: FileServer, digest: str
) -> None:
    server.token = None
    (server.root / "copy.gguf").write_bytes((server.root / FILE).read_bytes())
    held = await obtain(store, f"{server.url}/copy.gguf", tenant="other", sha256=digest)
    assert held.digest == digest
    assert len(store.stored()) == 1
    held.release()


async def test_weights_that_came_without_a_token_are_shared(store: WeightsStore, server: FileServer) -> None:
    source = publish(server, "public.gguf")
    for tenant in ("one", "two"):
        held = await obtain(store, source, tenant=tenant)
        held.release()
        held = await obtain(store, "https://absent.invalid/x.gguf", tenant=tenant, sha256=held.digest)
        held.release()
    assert len(server.seen("public.gguf")) == 1


async def test_signed_address_is_as_private_as_a_token(store: WeightsStore, server: FileServer) -> None:
    signed = publish(server, "signed.gguf") + "?signature=hunter2"
    held = await obtain(store, signed, tenant="owner")
    held.release()
    error = await refused(store, "https://absent.invalid/x.gguf", tenant="other", sha256=held.digest)
    assert error.reason == "SourceUnreachable"


async def test_finished_download_of_another_namespace_is_not_taken_over(
    store: WeightsStore, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent dies after the last byte, before the file becomes an object."""
    server.token = TOKEN

    def die(*_: Any) -> None:
        raise ArtifactError("StorageFailed", "the agent died")

    with monkeypatch.context() as patched:
        patched.setattr(store, "_add_object", die)
        await refused(store, publish(server, FILE), **OWNER)
    error = await refused(store, _source(server), tenant="other")
    assert error.reason == "SourceUnauthorized"


async def test_without_its_record_the_server_is_asked_for_each(
    store: WeightsStore, server: FileServer, digest: str, tmp_path: Path
) -> None:
    (tmp_path / "weights" / "access" / f"{digest}.json").unlink()
    assert (await refused(store, _source(server), tenant="other")).reason == "SourceUnauthorized"
    held = await obtain(store, _source(server), **OWNER)
    held.release()
    assert [request.range for request in server.seen(FILE)] == ["bytes=0-0"] * 2


async def test_weights_of_a_signed_mirror_are_private(store: WeightsStore, server: FileServer) -> None:
    """Another namespace, which has the digest and the same source, gets them only from a server that lets it in."""
    mirror = publish(server, "copy.gguf")
    sha256 = hashlib.sha256((server.root / "copy.gguf").read_bytes()).hexdigest()
    source = f"{server.url}/absent.gguf"
    signed = await obtain(store, source, tenant="owner", sha256=sha256, mirrors=[f"{mirror}?signature=hunter2"])
    signed.release()
    (server.root / "copy.gguf").unlink()
    assert (await refused(store, source, tenant="other", sha256=sha256)).reason == "SourceNotFound"


async def test_finished_download_of_a_signed_mirror_is_not_taken_over(
    store: WeightsStore, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = publish(server, "copy.gguf")
    sha256 = hashlib.sha256((server.root / "copy.gguf").read_bytes()).hexdigest()
    source = f"{server.url}/absent.gguf"

    def die(*_: Any) -> None:
        raise ArtifactError("StorageFailed", "the agent died")

    with monkeypatch.context() as patched:
        patched.setattr(store, "_add_object", die)
        await refused(store, source, tenant="owner", sha256=sha256, mirrors=[f"{mirror}?signature=hunter2"])
    assert (await refused(store, source, tenant="other", sha256=sha256)).reason == "SourceNotFound"
