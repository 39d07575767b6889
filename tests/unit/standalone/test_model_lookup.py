"""The weights that a name means: of the catalog, of a hub, of Ollama's store; and what was found once is remembered."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from artifacts.errors import ArtifactError
from artifacts.foreign_stores import ForeignStores
from artifacts.ollama_store import OllamaStore
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from artifacts.weights_store import WeightsStore
from crds.model import Model
from crds.size import GIB, MIB
from kube.resources import MODELS
from standalone.inspections import ModelInspector
from standalone.manifests import accept_manifest
from standalone.model_lookup import ModelChoice, ModelLookup
from standalone.model_names import ModelNameError
from tests.support.file_server import ALLOWED_NETWORKS, COMMIT, FileServer
from tests.support.hub_cache import add_to_hub_cache
from tests.support.ollama_layout import add_to_ollama
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_gguf, tiny_mlx, tiny_split

REPO = "acme/Tiny-GGUF"
ENOUGH = 4 * GIB


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model in three quantizations, one of them in parts and in a folder, its projector, and another model."""
    root = tmp_path_factory.mktemp("www")
    tiny_split.write(root / REPO / "BF16", "Tiny-BF16", n_ff=8192)
    tiny_gguf.write(root / REPO / "Tiny-Q8_0.gguf", n_ff=8192, ftype="f16")
    tiny_gguf.write(root / REPO / "Tiny-Q4_K_M.gguf", n_ff=1024)
    (root / REPO / "mmproj-F16.gguf").write_bytes(b"GGUF")
    tiny_mlx.write(root / "acme/folder")
    for name in ("one-Q4_K_M.gguf", "two-Q4_K_M.gguf"):
        (root / "acme/two").mkdir(exist_ok=True)
        (root / "acme/two" / name).write_bytes(b"GGUF")
    return root


@pytest.fixture
async def hub(published: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FileServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    async with FileServer(published) as running:
        yield running


class Lookups:
    """The lookup of one machine, made anew for each start of `pomona up`."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        self.access = SourceAccess(endpoint=endpoint, allowed_networks=ALLOWED_NETWORKS)

    def start(self) -> ModelLookup:
        foreign = ForeignStores(self.folder / "hub", OllamaStore([self.folder / "ollama"]))
        self.store = WeightsStore(self.folder / "weights", self.access, foreign)
        self.inspector = ModelInspector(self.folder / "inspections", self.store, self.access)
        return ModelLookup(self.folder / "names", self.access, self.inspector, foreign)

    async def serve(self, choice: ModelChoice) -> None:
        """Inspect and fetch the weights of a choice, as `pomona up` does."""
        model = accept_manifest(make_manifest(MODELS, name=choice.name, source=choice.source), Model)
        inspection, _ = await self.inspector.inspect(model)
        held = await self.store.obtain(
            parse(choice.source),
            sha256=inspection.sha256 or None,
            revision=inspection.revision or None,
            token=None,
            on_progress=lambda _done, _total: None,
        )
        held.release()


@pytest.fixture
def lookups(tmp_path: Path, hub: FileServer) -> Lookups:
    return Lookups(tmp_path, hub.url)


@pytest.mark.parametrize(
    ("text", "name", "file"),
    [
        (f"{REPO}:q4_k_m", "tiny-q4-k-m", "Tiny-Q4_K_M.gguf"),
        (f"hf://{REPO}:Q8_0", "tiny-q8-0", "Tiny-Q8_0.gguf"),
        (f"{REPO}:BF16", "tiny-bf16", "BF16/Tiny-BF16-00001-of-00003.gguf"),
    ],
)
async def test_stated_quantization_is_the_one(lookups: Lookups, text: str, name: str, file: str) -> None:
    assert await lookups.start().find(text, ENOUGH) == ModelChoice(name, f"hf://{REPO}/{file}")


@pytest.mark.parametrize(
    ("budget", "file", "reason"),
    [
        (ENOUGH, "Tiny-Q8_0.gguf", "Q8_0 of 3 quantizations: the best that fits 4 GiB"),
        (48 * MIB, "Tiny-Q4_K_M.gguf", "Q4_K_M of 3 quantizations: the best that fits 48 MiB"),
        (MIB, "Tiny-Q4_K_M.gguf", "Q4_K_M of 3 quantizations: the smallest, as none fits 1 MiB"),
    ],
)
async def test_best_quantization_is_chosen_and_said(lookups: Lookups, budget: int, file: str, reason: str) -> None:
    choice = await lookups.start().find(REPO, budget)
    assert choice == ModelChoice("tiny", f"hf://{REPO}/{file}", note=f"{REPO}: {reason}")


async def test_repository_of_a_folder_is_served_whole(lookups: Lookups) -> None:
    assert await lookups.start().find("acme/folder", ENOUGH) == ModelChoice("folder", "hf://acme/folder@main")


async def test_revision_is_kept(lookups: Lookups) -> None:
    choice = await lookups.start().find(f"{REPO}@{COMMIT}:Q4_K_M", ENOUGH)
    assert choice.source == f"hf://{REPO}@{COMMIT}/Tiny-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{REPO}:Q5_K_M", f"{REPO} has no Q5_K_M: it has BF16, Q4_K_M, Q8_0"),
        ("acme/folder:Q4_K_M", "acme/folder has no GGUF files to choose from"),
        ("acme/absent", "HTTP 404: there is no such file: check path and revision; else give a name of `pomona"),
    ],
)
async def test_what_the_hub_lacks_is_said(lookups: Lookups, text: str, problem: str) -> None:
    with pytest.raises(ModelNameError) as caught:
        await lookups.start().find(text, ENOUGH)
    assert str(caught.value).startswith(f"{text}: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["acme/two", "acme/two:Q4_K_M"])
async def test_repository_of_several_models_is_refused_with_their_files(lookups: Lookups, text: str) -> None:
    with pytest.raises(ModelNameError, match=r"several models: name one .* one-Q4_K_M\.gguf, two-Q4_K_M\.gguf"):
        await lookups.start().find(text, ENOUGH)


@pytest.mark.parametrize("text", [REPO, f"{REPO}:Q4_K_M", f"{REPO}:BF16", "acme/folder"])
async def test_name_that_was_served_before_needs_no_server(lookups: Lookups, hub: FileServer, text: str) -> None:
    first = await lookups.start().find(text, ENOUGH)
    await lookups.serve(first)
    hub.requests.clear()
    again = await lookups.start().find(text, ENOUGH)
    assert again._replace(note="") == first._replace(note="")
    assert ("chosen before, and stored here" in again.note) == (text == REPO)
    assert hub.requests == []


async def test_name_that_was_never_served_is_asked_for_again(lookups: Lookups, hub: FileServer) -> None:
    await lookups.start().find(REPO, ENOUGH)
    await hub.__aexit__(None, None, None)
    with pytest.raises(ArtifactError) as caught:
        await lookups.start().find(REPO, ENOUGH)
    assert caught.value.reason == "SourceUnreachable"


@pytest.mark.parametrize("text", [REPO, f"{REPO}:q4_k_m"])
async def test_name_is_looked_for_in_the_hubs_cache_while_the_hub_is_away(
    lookups: Lookups, hub: FileServer, tmp_path: Path, text: str
) -> None:
    file = "Tiny-Q4_K_M.gguf"
    add_to_hub_cache(tmp_path / "hub", REPO, {file: (hub.root / REPO / file).read_bytes()})
    hub.statuses.extend([503] * 50)
    choice = await lookups.start().find(text, ENOUGH)
    assert (choice.source, choice.note) == (f"hf://{REPO}/{file}", "")
    await lookups.serve(choice)
    hub.statuses.clear()
    assert (await lookups.start().find(REPO, ENOUGH)).source.endswith("Q8_0.gguf"), "the hub has better ones"


async def test_choice_that_no_longer_fits_is_made_anew(lookups: Lookups) -> None:
    await lookups.serve(await lookups.start().find(REPO, ENOUGH))
    assert (await lookups.start().find(REPO, 48 * MIB)).source.endswith("Q4_K_M.gguf")


async def test_choice_that_no_longer_fits_stays_while_the_hub_is_away(lookups: Lookups, hub: FileServer) -> None:
    first = await lookups.start().find(REPO, ENOUGH)
    await lookups.serve(first)
    hub.statuses.extend([503] * 50)
    again = await lookups.start().find(REPO, 48 * MIB)
    assert again.source == first.source
    assert "the hub cannot be asked for a smaller one" in again.note


async def test_record_that_cannot_be_read_is_an_error_with_its_path(lookups: Lookups, tmp_path: Path) -> None:
    (tmp_path / "names").write_text("")
    with pytest.raises(ArtifactError, match=rf"^{tmp_path}/names: "):
        await lookups.start().find(REPO, ENOUGH)


async def test_name_of_the_catalog_is_a_file_for_this_machine(lookups: Lookups) -> None:
    choice = await lookups.start().find("Qwen3-8B", ENOUGH)
    assert choice == ModelChoice("qwen3-8b", "hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf")
    assert (await lookups.start().find("qwen3-embedding-0-6b", ENOUGH)).mode == "embeddings"


async def test_entry_of_the_catalog_that_needs_a_cluster_says_so(lookups: Lookups) -> None:
    with pytest.raises(ModelNameError, match="the catalog has weights of it for nvidia only"):
        await lookups.start().find("deepseek-v4-pro", ENOUGH)


@pytest.mark.parametrize(
    ("text", "name"), [("tiny:1b", "tiny-1b"), ("ollama://tiny:1b", "tiny-1b"), ("acme/t:q", "acme-t-q")]
)
async def test_model_of_ollama_is_its_blob(lookups: Lookups, tmp_path: Path, text: str, name: str) -> None:
    blob = add_to_ollama(tmp_path / "ollama", text.removeprefix("ollama://"), b"GGUF weights")
    choice = await lookups.start().find(text, ENOUGH)
    assert choice._replace(note="") == ModelChoice(name, f"file://{blob}", hashlib.sha256(b"GGUF weights").hexdigest())
    assert "served from Ollama's store, without a copy" in choice.note


async def test_model_that_ollama_lacks_is_not_pulled(lookups: Lookups) -> None:
    with pytest.raises(ModelNameError, match="`ollama pull gemma3:4b`"):
        await lookups.start().find("ollama://gemma3:4b", ENOUGH)


async def test_file_of_the_catalog_goes_before_a_source_that_needs_a_daemon(lookups: Lookups) -> None:
    assert (await lookups.start().find("qwen3-5-9b", ENOUGH)).source.endswith(".gguf")
