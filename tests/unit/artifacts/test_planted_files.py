"""Links and pipes that somebody planted, and paths outside of --file-root: neither followed nor told about."""

import os
from pathlib import Path

import pytest

from artifacts import durable
from artifacts.errors import ArtifactError
from artifacts.repositories import local_files
from artifacts.source import parse
from tests.support.file_server import FileServer
from tests.unit.artifacts.fetch_call import FetchCall


async def _refuse(to: Path, server: FileServer) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await FetchCall(to, server.url)(f"{server.url}/weights.gguf")
    return caught.value


def test_error_does_not_tell_which_paths_exist_outside_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "models", tmp_path / "outside"
    for folder in (root, outside):
        folder.mkdir()
    (outside / "there.gguf").touch()
    (outside / "there.gguf").chmod(0)
    (root / "link").symlink_to(outside)
    for shown in (outside, root / "link"):
        told = []
        for name in ("there.gguf", "absent.gguf", "there.gguf/below.gguf"):
            with pytest.raises(ArtifactError) as caught:
                local_files.locate(parse(f"file://{shown}/{name}"), root)
            told.append((caught.value.reason, caught.value.message.replace(name, "")))
        assert len(set(told)) == 1, told


@pytest.mark.parametrize("planted", ["weights.gguf.part", "weights.gguf.lock"])
async def test_link_that_was_planted_beside_a_download_is_not_followed(
    server: FileServer, weights: bytes, tmp_path: Path, planted: str
) -> None:
    del weights
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / planted).symlink_to(victim)

    error = await _refuse(tmp_path / "to", server)

    assert error.reason == "StorageFailed"
    assert victim.read_bytes() == b"precious"


def test_file_that_was_planted_for_a_write_lends_it_neither_place_nor_mode(tmp_path: Path) -> None:
    victim, kept = tmp_path / "victim", tmp_path / "kept.json"
    victim.write_bytes(b"precious")
    (tmp_path / ".kept.json.new").symlink_to(victim)
    durable.write(kept, "secret")
    assert (victim.read_bytes(), kept.stat().st_mode & 0o777) == (b"precious", 0o600)
    (tmp_path / ".kept.json.new").touch(0o666)
    durable.write(kept, "secret")
    assert kept.stat().st_mode & 0o777 == 0o600


async def test_pipe_in_place_of_a_download_is_refused(server: FileServer, weights: bytes, tmp_path: Path) -> None:
    del weights
    (tmp_path / "to").mkdir()
    os.mkfifo(tmp_path / "to" / "weights.gguf.part")
    assert "is no regular file" in (await _refuse(tmp_path / "to", server)).message
