"""`pomona agent weights` as an owner sees it."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from artifacts.source import parse
from artifacts.store import Held, Store
from cli.weights import command
from tests.web import FileServer


def run(state: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["--state-dir", str(state), *arguments])


@pytest.fixture
def www(tmp_path: Path) -> Path:
    folder = tmp_path / "www"
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(b"x" * 4096)
    return folder


async def stored(state: Path, www: Path) -> Held:
    async with FileServer(www) as server:
        store = Store(state / "weights", endpoint=server.url, file_root=None)
        source = parse(f"{server.url}/tiny.gguf?signature=secret")
        return await store.obtain(source, sha256=None, revision=None, token=None, on_progress=lambda _a, _b: None)


async def test_weights_are_listed_kept_while_in_use_and_deleted(tmp_path: Path, www: Path) -> None:
    state = tmp_path / "state"
    held = await stored(state, www)
    short = held.digest[:12]

    listed = run(state).output
    assert listed.splitlines()[1].split()[:2] == [short, "4.0"]
    assert "yes" in listed
    assert "secret" not in listed

    refused = run(state, "--remove", short)
    assert refused.exit_code == 1
    assert "is in use" in refused.output
    assert "InferenceService" in refused.output

    held.release()
    assert "no" in run(state).output
    assert run(state, "--remove", short).output == f"deleted {short}, 4.0 KiB\n"
    assert run(state).output.startswith("no weights in")


def test_an_unknown_digest_is_refused_with_the_way_out(tmp_path: Path) -> None:
    result = run(tmp_path, "--remove", "beef")
    assert result.exit_code == 1
    assert "`pomona agent weights`" in result.output
