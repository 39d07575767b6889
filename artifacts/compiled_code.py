"""The compiled code of an engine, kept on the volume of its Model for later pods.

Engines such as vLLM compile for minutes at their start, into their home. That is a folder of the pod, never the volume:
some of their caches break on NFS or by a second writer, and a full volume would end the start. `restore` unpacks an
archive into it before the engine starts, and `keep` packs it once the engine is ready. An archive is complete before it
has its name, and a damaged one counts as none, so it costs a compilation and no start.
"""

import gzip
import hashlib
import os
import shutil
import tarfile
import time
import zlib
from pathlib import Path
from typing import Final

from artifacts.durable import open_regular

FOLDER: Final = ".pomona-compiled"
"""Folder of the archives at the root of a volume."""
_MOST_ARCHIVES: Final = 8
_QUIET_SECONDS: Final = 30.0
"""Time without a write after which the engine has compiled what it needs."""
_PROCESSOR: Final = ("model name", "flags", "CPU implementer", "CPU part", "Features")
_ACCELERATORS: Final = ("0x03", "0x12")  # PCI classes: graphics, and processing accelerators


def find_archive(kept: Path, system: Path = Path("/")) -> Path:
    """Return the archive for processor and devices of this node, which all containers may read; `kept` begins it."""
    facts = {line for line in (system / "proc/cpuinfo").read_text().splitlines() if line.startswith(_PROCESSOR)}
    for device in (system / "sys/bus/pci/devices").glob("*"):
        if (device / "class").read_text().startswith(_ACCELERATORS):
            facts.add((device / "vendor").read_text() + (device / "device").read_text())
    facts.add(time.strftime("%Y-%m"))  # a tag may be that of another image by then
    return kept.with_name(f"{kept.name}-{hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:16]}.tar.gz")


def restore(archive: Path, home: Path) -> str:
    """Make a home with the code in an archive, or an empty one; return the outcome. Raises OSError."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    try:
        with gzip.open(archive) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as files:
                files.extractall(home, filter="data")
            stream.read()  # the checksum at its end
    except (OSError, EOFError, ValueError, ArithmeticError, MemoryError, tarfile.TarError, zlib.error) as error:
        shutil.rmtree(home)
        home.mkdir()
        if not isinstance(error, OSError) or isinstance(
            error, gzip.BadGzipFile
        ):  # else the disk failed, not the archive
            archive.unlink(missing_ok=True)
        return f"not restored: {error}"
    return "restored"


def keep(home: Path, archive: Path) -> str | None:
    """Pack a home unless it is kept already; return the outcome, or None while the engine writes. Raises OSError."""
    paths = [path for path in home.rglob("*") if path.is_file() and not path.is_symlink()]
    statuses = [path.lstat() for path in paths]
    if any(abs(time.time() - status.st_mtime) < _QUIET_SECONDS for status in statuses):
        return None
    if archive.exists():
        return "kept already"
    # The oldest archives make room; a fiftieth of the volume stays free.
    archive.parent.mkdir(exist_ok=True)
    needed_bytes = sum(status.st_size for status in statuses) + shutil.disk_usage(archive.parent).total // 50
    others = sorted(archive.parent.iterdir(), key=lambda path: path.stat().st_mtime)
    if sum(path.stat().st_size for path in others) + shutil.disk_usage(archive.parent).free < needed_bytes:
        return "no room"
    while len(others) >= _MOST_ARCHIVES or (others and shutil.disk_usage(archive.parent).free < needed_bytes):
        others.pop(0).unlink(missing_ok=True)
    partial = archive.with_name(f"{os.urandom(8).hex()}.part")
    try:
        with gzip.open(partial, "wb", compresslevel=1) as stream, tarfile.open(fileobj=stream, mode="w|") as files:
            for path in paths:
                with open_regular(path, follow_links=False) as file:
                    # The engine may have replaced a folder by a link, such as to the token.
                    if Path(f"/proc/self/fd/{file.fileno()}").readlink().is_relative_to(home):
                        files.addfile(files.gettarinfo(arcname=str(path.relative_to(home)), fileobj=file), file)
        partial.replace(archive)
    finally:
        partial.unlink(missing_ok=True)
    return "kept"
