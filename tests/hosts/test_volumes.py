"""`pomona fetch` on real volumes that refuse: one that is full, one that is read-only, one that it may not write.

Mounts are made in namespaces of the command's own, which end with it.
"""

import asyncio
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.support.file_server import FileServer
from tests.support.tiny_models import tiny_gguf

POMONA = f"{shlex.quote(sys.executable)} -m cli.main"
MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")
NO_RIGHTS = ("unshare", "--user")
"""A user without any rights, also if the tests run as root, whom no mode stops."""


class RefusedFetch(NamedTuple):
    """Result that the Job of a Model reports, by which the controller decides."""

    exit_code: int
    reason: str
    message: str


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FileServer]:
    (tmp_path / "www").mkdir()
    tiny_gguf.write(tmp_path / "www" / "tiny.gguf")
    async with FileServer(tmp_path / "www") as server:
        yield server


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """The folder at which a volume is mounted."""
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


@pytest.fixture
def protected(volume: Path) -> Path:
    """A folder that nobody may write."""
    volume.chmod(0o555)
    return volume


async def fetch(server: FileServer, to: Path, *, within: tuple[str, ...], before: str = "true") -> RefusedFetch:
    """Return how a fetch to a folder ends, in other namespaces and after the command `before`."""
    arguments = f"fetch {server.url}/tiny.gguf --to {to}/key --allow-private-sources 127.0.0.0/8"
    return await run(arguments, to.parent, within=within, before=before)


async def run(arguments: str, folder: Path, *, within: tuple[str, ...], before: str = "true") -> RefusedFetch:
    """Return how a command ends, in other namespaces and after the command `before`."""
    # Its folder is not on a volume that the command may not write.
    result = folder / "result.json"
    result.touch()
    result.chmod(0o666)
    command = f"{before} && exec {POMONA} {arguments} --result {result}"
    process = await asyncio.create_subprocess_exec(*within, "sh", "-c", command)
    code = await asyncio.wait_for(process.wait(), 60)
    said = msgspec.json.decode(result.read_bytes())
    return RefusedFetch(code, said["reason"], said["message"])


async def test_full_volume_is_named_with_what_is_free(server: FileServer, volume: Path) -> None:
    small = f"mount -t tmpfs -o size=64k tmpfs {volume}"
    refused = await fetch(server, volume, within=MOUNTS, before=small)
    assert refused.reason == "NoSpace", refused
    assert "are free" in refused.message
    assert "or use a larger volume" in refused.message


async def test_read_only_volume_is_named(server: FileServer, volume: Path) -> None:
    read_only = f"mount -t tmpfs tmpfs {volume} && mount -o remount,ro {volume}"
    refused = await fetch(server, volume, within=MOUNTS, before=read_only)
    assert refused.reason == "StorageFailed", refused
    assert f"{volume} is on a read-only volume" in refused.message


async def test_file_that_cannot_be_read_is_named_without_advice_for_volumes_of_jobs(tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    tiny_gguf.write(path)
    path.chmod(0)
    refused = await run(f"fetch file://{path} --file-root {tmp_path} --sha256 {'0' * 64}", tmp_path, within=NO_RIGHTS)
    assert f"{path} has owner " in refused.message
    assert refused.message.endswith("make it readable for that user or group")


async def test_volume_that_ignores_the_group_is_named_with_its_owner(server: FileServer, protected: Path) -> None:
    """Volumes that do not honour fsGroup are like this one: nobody may write their root."""
    refused = await fetch(server, protected, within=NO_RIGHTS)
    assert refused.reason == "StorageFailed", refused
    assert f"{protected} has owner " in refused.message
    assert "and mode 555" in refused.message
    assert "make its root writable for group" in refused.message
