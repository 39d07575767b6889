"""`pomona weights` lists weights, deletes the unused ones, and refuses the others with a way out."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from artifacts.weights_store import HeldWeights, WeightsStore
from cli.main import main
from tests.support.file_server import ALLOWED_NETWORKS, FileServer


def run(state: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["weights", *words, "--state-dir", str(state)])


@pytest.fixture
def www(tmp_path: Path) -> Path:
    folder = tmp_path / "www"
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(b"x" * 4096)
    return folder


async def stored(state: Path, www: Path, name: str = "tiny.gguf?signature=secret") -> HeldWeights:
    async with FileServer(www) as server:
        access = SourceAccess(endpoint=server.url, allowed_networks=ALLOWED_NETWORKS)
        store = WeightsStore(state / "weights", access)
        source = parse(f"{server.url}/{name}")
        return await store.obtain(source, sha256=None, revision=None, token=None, on_progress=lambda _a, _b: None)


async def test_weights_are_listed_and_deleted_unless_in_use(tmp_path: Path, www: Path) -> None:
    state = tmp_path / "state"
    held = await stored(state, www)
    short = held.digest[:12]

    listed = run(state, "list").output
    assert listed.splitlines()[1].split()[:2] == [short, "4.0"]
    assert "yes" in listed
    assert "secret" not in listed
    [facts] = json.loads(run(state, "list", "--output=json").output)
    assert (facts["digest"], facts["sizeBytes"], facts["inUse"]) == (held.digest, 4096, True)
    assert "secret" not in facts["source"]

    refused = run(state, "delete", short)
    assert refused.exit_code == 1
    assert "is in use" in refused.output
    assert "InferenceService" in refused.output

    held.release()
    assert "no" in run(state, "list").output
    assert "secret" not in (held.path.parent / ".manifest.json").read_text()
    assert run(state, "delete", short).output == f"deleted {short}, 4.0 KiB\n"
    assert run(state, "list").output.startswith("no weights in")


def test_unknown_digest_is_refused_with_way_out(tmp_path: Path) -> None:
    result = run(tmp_path, "delete", "beef")
    assert result.exit_code == 1
    assert "`pomona weights list`" in result.output


def test_empty_digest_is_refused(tmp_path: Path) -> None:
    """An empty variable in a script must not delete the only weights of a host."""
    assert run(tmp_path, "delete", "").exit_code == 2


async def test_source_is_printed_whole(tmp_path: Path, www: Path) -> None:
    (www / "tiny-[bold]-[q4].gguf").write_bytes(b"x")
    await stored(tmp_path, www, "tiny-[bold]-[q4].gguf")
    assert "/tiny-[bold]-[q4].gguf" in run(tmp_path, "list").output


def test_unreadable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "objects").write_text("no folder")
    result = run(tmp_path, "list")
    assert result.exit_code == 1
    assert str(tmp_path / "weights" / "objects") in result.output
