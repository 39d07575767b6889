"""The archives of compiled code: which one a node gets, what is kept, what damage costs, and what makes room."""

import os
import shutil
import tarfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from artifacts.compiled_code import FOLDER, find_archive, keep, restore
from artifacts.durable import open_regular
from tests.unit.artifacts.pomona_call import run_pomona

NOW = time.time()


class Usage(NamedTuple):
    """A result of `shutil.disk_usage`."""

    total: int
    free: int


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home that an engine has compiled into a while ago."""
    home = tmp_path / "compiled" / "home"
    (home / ".cache/vllm").mkdir(parents=True)
    (home / ".cache/vllm/graph.so").write_bytes(os.urandom(1 << 20))
    (home / "lock").touch()
    make_quiet(home)
    return home


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """The archive of a pod on a volume with weights."""
    (tmp_path / "volume").mkdir()
    return tmp_path / "volume" / FOLDER / "0123-4567.tar.gz"


def make_quiet(home: Path) -> None:
    for path in home.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (NOW - 600, NOW - 600))


def read_files(home: Path) -> dict[str, bytes]:
    return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


def test_what_was_kept_is_there_at_the_next_start(home: Path, archive: Path) -> None:
    assert keep(home, archive) == "kept"
    before = read_files(home)
    assert restore(archive, home) == "restored"
    assert read_files(home) == before
    assert (home / ".cache/vllm/graph.so").stat().st_mtime == NOW - 600, "ninja compares the times of files"
    assert keep(home, archive) == "kept already"


def test_engine_that_still_compiles_is_waited_for(home: Path, archive: Path) -> None:
    (home / "new.so").write_bytes(b"half")
    assert keep(home, archive) is None
    assert not archive.parent.exists()


def test_first_start_finds_an_empty_home(home: Path, archive: Path) -> None:
    assert "No such file" in restore(archive, home)
    assert (home.is_dir(), read_files(home)) == (True, {})


@pytest.mark.parametrize("length", [0, 1, 9, 40, 1000, -9, -4, -1])
def test_truncated_archive_is_as_none(home: Path, archive: Path, length: int) -> None:
    keep(home, archive)
    whole = archive.read_bytes()
    archive.write_bytes(whole[:length])
    assert restore(archive, home).startswith("not restored")
    assert (home.is_dir(), read_files(home), archive.exists()) == (True, {}, False)


@pytest.mark.parametrize("place", range(0, 100, 7))
def test_changed_archive_is_as_none(home: Path, archive: Path, place: int) -> None:
    """Whichever byte is another one, at `place` percent of its length, nothing of it is left in the home."""
    keep(home, archive)
    changed = bytearray(archive.read_bytes())
    changed[max(64, len(changed) * place // 100)] ^= 0xFF  # before that are a time and a name
    archive.write_bytes(changed)
    restore(archive, home)
    assert (home.is_dir(), read_files(home)) == (True, {})


def test_damaged_archive_is_replaced(home: Path, archive: Path) -> None:
    archive.parent.mkdir()
    archive.write_bytes(b"garbage")
    restore(archive, home)
    (home / "graph.so").write_bytes(b"compiled again")
    make_quiet(home)
    assert keep(home, archive) == "kept"
    assert restore(archive, home) == "restored"


def test_no_archive_writes_outside_of_the_home(home: Path, archive: Path) -> None:
    archive.parent.mkdir()
    outside = home.parent / "outside"
    with tarfile.open(archive, "w:gz") as files:
        info = tarfile.TarInfo("../outside")
        files.addfile(info)
    assert restore(archive, home).startswith("not restored")
    assert not outside.exists()


def test_engine_gets_nothing_else_of_the_pod_by_links(home: Path, archive: Path, tmp_path: Path) -> None:
    """The proxy packs the home, and may read more than the engine: the token of the service."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "token").write_text("sekret")
    (home / "linked").symlink_to(secrets / "token")
    (home / "folder").symlink_to(secrets)
    make_quiet(home)
    assert keep(home, archive) == "kept"
    restore(archive, home)
    assert set(read_files(home)) == {".cache/vllm/graph.so", "lock"}


def test_folder_that_becomes_a_link_meanwhile_is_left_out(
    home: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "graph.so").write_text("sekret")

    def replace_folder(path: Path, *, follow_links: bool) -> object:
        folder = home / ".cache/vllm"
        if not folder.is_symlink():
            shutil.rmtree(folder)
            folder.symlink_to(secrets)
        return open_regular(path, follow_links=follow_links)

    monkeypatch.setattr("artifacts.compiled_code.open_regular", replace_folder)
    assert keep(home, archive) == "kept"
    restore(archive, home)
    assert set(read_files(home)) == {"lock"}


def test_oldest_archives_go_beyond_eight(home: Path, archive: Path) -> None:
    archive.parent.mkdir()
    for number in range(9):
        path = archive.parent / f"{number}.tar.gz"
        path.touch()
        os.utime(path, (NOW - 100 + number, NOW - 100 + number))
    assert keep(home, archive) == "kept"
    assert {path.name for path in archive.parent.iterdir()} == {
        archive.name,
        *(f"{number}.tar.gz" for number in range(2, 9)),
    }


@pytest.mark.parametrize(("free", "result"), [(0, ("no room", 2)), (1 << 20, ("kept", 1)), (2 << 20, ("kept", 2))])
def test_weights_keep_their_room(
    home: Path, archive: Path, monkeypatch: pytest.MonkeyPatch, free: int, result: tuple[str, int]
) -> None:
    """A fiftieth of the volume stays free, and other archives go only if that is enough."""
    archive.parent.mkdir()
    for name in ("a", "b"):
        (archive.parent / name).write_bytes(bytes(300_000))
        os.utime(archive.parent / name, (NOW - 9, NOW - 9))

    def measure(_folder: Path) -> Usage:
        taken = sum(path.stat().st_size for path in archive.parent.iterdir())
        return Usage(10 << 20, free + 600_000 - taken)

    monkeypatch.setattr(shutil, "disk_usage", measure)
    outcome = keep(home, archive)
    assert (outcome, sum(path.name in {"a", "b"} for path in archive.parent.iterdir())) == result


def test_failed_write_leaves_nothing(home: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_tar: tarfile.TarFile, *_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", fail)
    with pytest.raises(OSError, match="No space left"):
        keep(home, archive)
    assert list(archive.parent.iterdir()) == []


def describe_node(system: Path, processor: str, *devices: tuple[str, str]) -> Path:
    """Write what a container of a node sees of it; a device is a PCI class and an id."""
    (system / "proc").mkdir(parents=True)
    cores = (f"processor\t: {core}\nmodel name\t: {processor}\ncpu MHz\t\t: {2000 + core}\n" for core in range(2))
    (system / "proc/cpuinfo").write_text("\n".join(cores))
    for number, (pci_class, device) in enumerate(devices):
        folder = system / f"sys/bus/pci/devices/0000:{number:02}:00.0"
        folder.mkdir(parents=True)
        for name, text in (("class", pci_class), ("vendor", "0x10de"), ("device", device)):
            (folder / name).write_text(f"{text}\n")
    return system


def test_archive_is_of_the_processor_and_the_devices_of_the_node(tmp_path: Path) -> None:
    """Code for AVX-512 ends an engine on a processor without it, and that of one GPU one on another."""
    h100, nic = ("0x030200", "0x2330"), ("0x020000", "0x1021")
    nodes = {
        "one": describe_node(tmp_path / "one", "Xeon 8480", h100, nic),
        "same": describe_node(tmp_path / "same", "Xeon 8480", nic, h100, h100),
        "processor": describe_node(tmp_path / "processor", "EPYC 9654", h100),
        "device": describe_node(tmp_path / "device", "Xeon 8480", ("0x030200", "0x26b9")),
        "other class": describe_node(tmp_path / "class", "Xeon 8480", ("0x120000", "0x74a1")),
        "none": describe_node(tmp_path / "none", "Xeon 8480", nic),
    }
    kept = tmp_path / FOLDER / "3f6b92"
    archives = {name: find_archive(kept, system) for name, system in nodes.items()}
    assert archives["one"] == archives["same"]
    assert len(set(archives.values())) == 5
    assert all(path.parent == kept.parent and path.name.startswith("3f6b92-") for path in archives.values())
    assert find_archive(kept) == find_archive(kept), "this machine's"


async def test_restoring_ends_well_whatever_it_finds(home: Path, tmp_path: Path) -> None:
    proxy = ("pod-proxy", "--service", "a/b", "--token-file", "t", "--engine-port", "1", "--health-path", "/")
    kept = tmp_path / "volume" / FOLDER / "0123"
    for folder in (home, tmp_path / "missing" / "home"):
        ran = await run_pomona(*proxy, "--home", str(folder), "--kept", str(kept), "--restore")
        assert ran.code == 0
    assert read_files(home) == {}
