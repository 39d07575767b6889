"""Weights that a mirror sent are those of their digest: no other namespace gets them under the name of the source."""

import hashlib
from typing import Any

import pytest

from artifacts.errors import ArtifactError
from artifacts.source import parse, weights_identity
from artifacts.weights_store import WeightsStore
from tests.support.file_server import FileServer
from tests.unit.artifacts.stored_weights import obtain, publish, refused

FILE = "wanted.gguf"


@pytest.fixture
def source(server: FileServer) -> str:
    """A source that everybody may name, of a file that its server sends to everybody."""
    return publish(server, FILE)


@pytest.fixture
def attacker(server: FileServer) -> dict[str, Any]:
    """The arguments of a namespace with other bytes, on a mirror of its own."""
    mirror = publish(server, "forged.gguf")
    sha256 = hashlib.sha256((server.root / "forged.gguf").read_bytes()).hexdigest()
    return {"tenant": "attacker", "sha256": sha256, "mirrors": [mirror]}


@pytest.mark.parametrize("status", [404, 503])
async def test_mirror_sends_nothing_under_the_name_of_its_source(
    store: WeightsStore, server: FileServer, source: str, attacker: dict[str, Any], status: int
) -> None:
    server.statuses.extend([status] if status == 404 else [status] * 2)
    forged = await obtain(store, source, revision="", **attacker)
    forged.release()
    assert forged.digest == attacker["sha256"], "the mirror has sent its bytes"
    assert store.lock_stored(parse(source), "", None) is None
    assert weights_identity(source, "v1", (), "") not in store.identities()

    held = await obtain(store, source, tenant="victim", revision="")

    assert held.path.read_bytes() == (server.root / FILE).read_bytes()
    held.release()


async def test_mirror_of_a_private_source_serves_no_owner_of_its_token(
    store: WeightsStore, server: FileServer, source: str, attacker: dict[str, Any]
) -> None:
    """Without an outage: the source answers 404 to a namespace without its token."""
    server.statuses.append(404)
    (await obtain(store, source, **attacker)).release()
    server.token = "secret"
    held = await obtain(store, source, tenant="owner", token="secret")
    assert held.path.read_bytes() == (server.root / FILE).read_bytes()
    held.release()


async def test_download_of_a_mirror_that_is_finished_later_is_not_of_its_source(
    store: WeightsStore, server: FileServer, source: str, attacker: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call finds the file complete before it asks the source."""

    def die(*_: Any) -> None:
        raise ArtifactError("StorageFailed", "the agent died")

    server.statuses.append(404)
    with monkeypatch.context() as patched:
        patched.setattr(store, "_add_object", die)
        await refused(store, source, **attacker)
    (await obtain(store, source, **attacker)).release()
    held = await obtain(store, source, tenant="victim")
    assert held.path.read_bytes() == (server.root / FILE).read_bytes()
    held.release()


async def test_bytes_of_another_revision_get_no_name(store: WeightsStore, server: FileServer, source: str) -> None:
    """A digest decides that they are right for one namespace, and says nothing of that revision to another one."""
    sha256 = hashlib.sha256((server.root / FILE).read_bytes()).hexdigest()
    (await obtain(store, source, sha256=sha256, revision="next")).release()
    assert (await refused(store, source, tenant="victim", revision="next")).reason == "SourceChanged"


async def test_manifest_names_the_server_that_sent_the_bytes(
    store: WeightsStore, server: FileServer, source: str, attacker: dict[str, Any]
) -> None:
    server.statuses.append(404)
    (await obtain(store, source, **attacker)).release()
    assert [stored.manifest.source for stored in store.stored()] == attacker["mirrors"]


async def test_namespace_with_the_digest_uses_what_a_mirror_sent_while_all_servers_are_away(
    store: WeightsStore, server: FileServer, source: str, attacker: dict[str, Any]
) -> None:
    server.statuses.append(404)
    (await obtain(store, source, **attacker)).release()
    server.statuses.extend([503] * 9)
    requests = len(server.requests)
    held = await obtain(store, source, **attacker)
    assert held.digest == attacker["sha256"]
    assert len(server.requests) == requests
    held.release()
