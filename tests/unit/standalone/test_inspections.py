"""`pomona up` serves stored weights while their source is away or answers that it is busy."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from artifacts.errors import ArtifactError
from artifacts.foreign_stores import ForeignStores
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from artifacts.weights_store import WeightsStore
from crds.model import Model
from kube.resources import MODELS
from standalone.inspections import ModelInspector
from standalone.manifests import accept_manifest
from tests.support.file_server import ALLOWED_NETWORKS, COMMIT, FileServer
from tests.support.hub_cache import add_to_hub_cache
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_gguf


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FileServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    root = tmp_path / "www"
    (root / "acme/tiny").mkdir(parents=True)
    tiny_gguf.write(root / "acme/tiny/tiny.gguf")
    tiny_gguf.write(root / "tiny.gguf")
    async with FileServer(root) as running:
        yield running


class Machine:
    """The parts of `pomona up` that know weights, as each start makes them anew."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        access = SourceAccess(endpoint=endpoint, allowed_networks=ALLOWED_NETWORKS)
        self.store = WeightsStore(folder / "weights", access, ForeignStores(folder / "hub"))
        self.inspector = ModelInspector(folder / "inspections", self.store, access)

    async def serve(self, model: Model) -> str:
        """Inspect a Model and fetch its weights, as `pomona up` does; return why its source was not asked."""
        inspection, problem = await self.inspector.inspect(model)
        held = await self.store.obtain(
            parse(model.spec.source, model.spec.files),
            sha256=inspection.sha256,
            revision=inspection.revision or None,
            token=None,
            on_progress=lambda _done, _total: None,
        )
        assert inspection.layout is not None
        assert inspection.gguf.architecture == "llama"
        held.release()
        return problem


def model(source: str, **spec: Any) -> Model:
    return accept_manifest(make_manifest(MODELS, name="tiny", source=source, **spec), Model)


@pytest.mark.parametrize("source", ["hf://acme/tiny/tiny.gguf", "hf://acme/tiny", "URL/tiny.gguf"])
@pytest.mark.parametrize("status", [429, 503])
async def test_stored_weights_serve_while_their_source_is_busy(
    server: FileServer, tmp_path: Path, source: str, status: int
) -> None:
    wanted = model(source.replace("URL", server.url), **({"files": ["*.gguf"]} if source == "hf://acme/tiny" else {}))
    assert await Machine(tmp_path, server.url).serve(wanted) == ""
    server.statuses.extend([status] * 50)
    server.requests.clear()
    problem = await Machine(tmp_path, server.url).serve(wanted)
    assert f"HTTP {status}" in problem
    assert len(server.requests) == 1, "a source whose weights are stored is asked once"


async def test_facts_are_the_same_with_and_without_the_source(server: FileServer, tmp_path: Path) -> None:
    wanted = model(f"{server.url}/tiny.gguf")
    await Machine(tmp_path, server.url).serve(wanted)
    asked, _problem = await Machine(tmp_path, server.url).inspector.inspect(wanted)
    server.statuses.append(503)
    stored, problem = await Machine(tmp_path, server.url).inspector.inspect(wanted)
    assert problem
    assert stored == asked


async def test_pinned_weights_are_served_without_a_request(server: FileServer, tmp_path: Path) -> None:
    wanted = model(f"hf://acme/tiny@{COMMIT}/tiny.gguf")
    await Machine(tmp_path, server.url).serve(wanted)
    server.requests.clear()
    assert await Machine(tmp_path, server.url).serve(wanted) == ""
    assert server.requests == []


async def test_message_says_that_this_machine_may_be_offline(tmp_path: Path, server: FileServer) -> None:
    wanted = model("hf://acme/tiny/tiny.gguf")
    await Machine(tmp_path, server.url).serve(wanted)
    await server.__aexit__(None, None, None)
    assert "offline" in await Machine(tmp_path, server.url).serve(wanted)


@pytest.mark.parametrize("status", [401, 404])
async def test_source_that_refuses_is_no_source_that_is_away(server: FileServer, tmp_path: Path, status: int) -> None:
    wanted = model(f"{server.url}/tiny.gguf")
    await Machine(tmp_path, server.url).serve(wanted)
    server.statuses.append(status)
    with pytest.raises(ArtifactError) as caught:
        await Machine(tmp_path, server.url).inspector.inspect(wanted)
    assert not caught.value.retryable


async def test_weights_that_were_deleted_are_not_promised(server: FileServer, tmp_path: Path) -> None:
    wanted = model(f"{server.url}/tiny.gguf")
    machine = Machine(tmp_path, server.url)
    await machine.serve(wanted)
    machine.store.remove(machine.store.stored()[0].manifest.digest)
    server.statuses.append(429)
    server.retry_after = "120"
    with pytest.raises(ArtifactError) as caught:
        await machine.inspector.inspect(wanted)
    assert (caught.value.reason, caught.value.retry_after_seconds) == ("SourceUnreachable", 120)
    assert "asks for a pause of 120 s" in caught.value.message


async def test_record_of_an_earlier_version_without_a_digest_is_read(server: FileServer, tmp_path: Path) -> None:
    wanted = model(f"{server.url}/tiny.gguf")
    await Machine(tmp_path, server.url).serve(wanted)
    (record,) = (tmp_path / "inspections").glob("*.json")
    record.write_text(record.read_text().replace('"sha256":""', '"sha256":null'))
    server.statuses.extend([503] * 50)
    assert "HTTP 503" in await Machine(tmp_path, server.url).serve(wanted)


@pytest.mark.parametrize("source", ["hf://acme/tiny/tiny.gguf", "hf://acme/tiny"])
async def test_weights_of_the_hubs_client_serve_while_the_hub_is_away(
    server: FileServer, tmp_path: Path, source: str
) -> None:
    wanted = model(source, **({"files": ["*.gguf"]} if source == "hf://acme/tiny" else {}))
    add_to_hub_cache(tmp_path / "hub", "acme/tiny", {"tiny.gguf": (server.root / "acme/tiny/tiny.gguf").read_bytes()})
    asked, problem = await Machine(tmp_path / "other", server.url).inspector.inspect(wanted)
    assert problem == ""
    server.statuses.extend([503] * 50)
    server.requests.clear()
    assert "HTTP 503" in await Machine(tmp_path, server.url).serve(wanted)
    assert len(server.requests) == 1, "a source whose weights are on this machine is asked once"
    cached, _ = await Machine(tmp_path, server.url).inspector.inspect(wanted)
    assert cached == asked


async def test_pinned_weights_of_the_hubs_client_need_no_request(server: FileServer, tmp_path: Path) -> None:
    wanted = model(f"hf://acme/tiny@{COMMIT}/tiny.gguf")
    add_to_hub_cache(tmp_path / "hub", "acme/tiny", {"tiny.gguf": (server.root / "acme/tiny/tiny.gguf").read_bytes()})
    assert await Machine(tmp_path, server.url).serve(wanted) == ""
    assert server.requests == []


async def test_hub_that_has_other_weights_now_is_believed(server: FileServer, tmp_path: Path) -> None:
    add_to_hub_cache(tmp_path / "hub", "acme/tiny", {"tiny.gguf": b"GGUF, of an earlier commit"})
    assert await Machine(tmp_path, server.url).serve(model("hf://acme/tiny/tiny.gguf")) == ""
