"""Repositories of many files in the store of weights: one folder of the files for an engine, complete or absent."""

from pathlib import Path

import pytest

from artifacts.weights_store import WeightsStore
from tests.support.file_server import COMMIT, FileServer, TransferFault
from tests.unit.artifacts.stored_weights import HURRIED, SMALL, disk, obtain, refused


class TestFolders:
    @pytest.fixture
    def repository(self, server: FileServer) -> Path:
        folder = server.root / "acme" / "mlx"
        (folder / "extra").mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "tokenizer.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"w" * SMALL)
        (folder / "modeling.py").write_text("print('code that came with the weights')")
        (folder / "extra" / "config.json").write_text("{}")
        return folder

    async def test_a_repository_becomes_one_folder_of_the_files_for_an_engine(
        self, store: WeightsStore, server: FileServer, repository: Path
    ) -> None:
        told: list[tuple[int, int | None]] = []
        held = await obtain(store, "hf://acme/mlx", on_progress=lambda here, total: told.append((here, total)))

        assert {path.name for path in held.path.iterdir() if not path.name.startswith(".")} == {
            "config.json",
            "tokenizer.json",
            "model.safetensors",
        }
        assert (held.path / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
        total = sum(stored.manifest.size_bytes for stored in store.stored())
        assert told[-1] == (total, total)
        assert all(
            f"/resolve/{COMMIT}/" in request.path for request in server.seen(".json") if "/resolve/" in request.path
        )
        server.requests.clear()
        assert (await obtain(store, "hf://acme/mlx")).path == held.path
        assert not server.requests

    async def test_a_cut_fetch_of_a_repository_is_resumed(
        self, store: WeightsStore, server: FileServer, repository: Path
    ) -> None:
        del repository
        server.faults.extend([TransferFault(1)] * 4 * HURRIED.attempts)  # several files are fetched at once
        assert (await refused(store, "hf://acme/mlx")).reason == "SourceUnreachable"
        server.faults.clear()
        assert (await obtain(store, "hf://acme/mlx")).path.is_dir()

    @pytest.mark.parametrize("lacking", ["config.json", "model.safetensors"])
    async def test_a_repository_without_weights_is_refused(
        self, store: WeightsStore, repository: Path, lacking: str
    ) -> None:
        (repository / lacking).unlink()
        error = await refused(store, "hf://acme/mlx")
        assert error.reason == "SourceNotFound"
        assert "FILE.gguf" in error.message

    async def test_room_is_made_for_all_files_before_the_first(
        self,
        store: WeightsStore,
        server: FileServer,
        repository: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        (repository / "another.safetensors").write_bytes(b"a" * SMALL)
        disk(monkeypatch, tmp_path / "weights", SMALL + SMALL // 2)
        assert (await refused(store, "hf://acme/mlx")).reason == "NoSpace"
        assert not server.seen(".safetensors")

    async def test_names_with_blanks_are_fetched(self, store: WeightsStore, repository: Path) -> None:
        (repository / "NOTICE of acme@home #1 50%.txt").write_text("free")
        held = await obtain(store, "hf://acme/mlx")
        assert (held.path / "NOTICE of acme@home #1 50%.txt").read_text() == "free"

    async def test_a_wrong_size_in_the_listing_is_refused(
        self, store: WeightsStore, server: FileServer, repository: Path
    ) -> None:
        del repository
        server.sizes["model.safetensors"] = 7
        error = await refused(store, "hf://acme/mlx")
        assert error.reason == "SourceChanged"
        assert "model.safetensors: has" in error.message
        assert "not the 7 that were inspected or listed" in error.message
        assert store.stored() == []

    @pytest.mark.parametrize("commit", ["", "../..", "\x1b[31m", "c" * 500])
    async def test_a_hub_that_names_no_commit_is_refused(
        self, store: WeightsStore, server: FileServer, repository: Path, commit: str
    ) -> None:
        del repository
        server.commit = commit
        error = await refused(store, "hf://acme/mlx")
        assert error.reason == "SourceRefused"
        assert error.message.isprintable()

    async def test_a_hub_that_answers_a_listing_with_416_is_refused(
        self, store: WeightsStore, server: FileServer, repository: Path
    ) -> None:
        del repository
        server.statuses.append(416)
        assert (await refused(store, "hf://acme/mlx")).reason == "SourceRefused"

    async def test_a_digest_for_a_folder_is_refused(self, store: WeightsStore, repository: Path) -> None:
        del repository
        error = await refused(store, "hf://acme/mlx", sha256="0" * 64)
        assert error.reason == "SourceInvalid"
        assert "@REVISION" in error.message
