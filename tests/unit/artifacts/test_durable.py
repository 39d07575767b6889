"""State files are complete or absent, private, and a damaged one is set aside."""

import os
from pathlib import Path

import pytest

from artifacts import durable


def test_file_is_replaced_in_one_step_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "thing.json"
    durable.write(path, {"a": 1})
    durable.write(path, {"a": 2})
    assert durable.read(path, dict[str, int]) == {"a": 2}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["thing.json"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": "no number"}', b"\x00\xff", b'{"\xff": 1}'])
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thing.json"
    path.write_bytes(content)
    assert durable.read(path, dict[str, int]) is None
    assert not path.exists()
    assert (tmp_path / ".thing.json.damaged").read_bytes() == content


def test_a_file_that_cannot_be_read_is_neither_absent_nor_damaged(tmp_path: Path) -> None:
    path = tmp_path / "thing.json"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        durable.read(path, dict[str, int])
    assert path.exists()


def test_file_of_a_hostile_user_neither_blocks_nor_fills_the_memory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    with (tmp_path / "sparse.json").open("wb") as file:
        file.truncate(2**40)
    for name, problem in (("pipe", "no regular file"), ("zero", "no regular file"), ("sparse", "longer than")):
        with pytest.raises(OSError, match=problem):
            durable.read(tmp_path / f"{name}.json", dict[str, int])
    (tmp_path / "deep.json").write_bytes(b"[" * 1_000_000)
    assert durable.read(tmp_path / "deep.json", object) is None
