"""The content of a stored object, as its manifest lists it: the files, their digests, and where they came from."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from artifacts.errors import ArtifactError
from artifacts.partial_download import VerifiedFile, read_download_record

MANIFEST: Final = ".manifest.json"
"""Name of the file with the manifest of an object, in its folder."""


class StoredFile(VerifiedFile, frozen=True, kw_only=True, rename="camel"):
    """One verified file of an object, or the owner's own file, with its name."""

    name: str

    @classmethod
    def of(cls, path: Path, sha256: str) -> "StoredFile":
        """Describe a file of our own, or a link to a file of another program as it was verified.

        Raises:
            ArtifactError: the file of the other program has changed since.
            OSError: the file cannot be read.
        """
        if not path.is_symlink():
            stat = path.stat()
            return cls(name=path.name, size_bytes=stat.st_size, sha256=sha256, mtime_nanoseconds=stat.st_mtime_ns)
        record = read_download_record(path)
        if record is None:
            raise ArtifactError("SourceChanged", f"{path.resolve()}: changed while it was linked", retryable=True)
        facts = {name: getattr(record, name) for name in VerifiedFile.__struct_fields__}
        return cls(name=path.name, **facts)

    @classmethod
    def observe(cls, path: Path, sha256: str) -> "StoredFile":
        """Describe a file that others may change, with its inode. Raises OSError."""
        stat = path.stat()
        size, mtime = stat.st_size, stat.st_mtime_ns
        return cls(name=path.name, size_bytes=size, sha256=sha256, mtime_nanoseconds=mtime, inode=stat.st_ino)

    def is_at(self, path: Path) -> bool:
        """Return whether the file at `path` has this name, and its digest is still valid."""
        return path.name == self.name and self.holds_for(path)


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """The content of an object. `source` and `revision` describe its download; other sources may have equal bytes."""

    source: str
    revision: str
    digest: str
    files: tuple[StoredFile, ...]
    is_folder: bool = False
    """True when engines get the folder, false when they get its first file: the only one, or the first of its parts."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def is_in(self, folder: Path) -> bool:
        """Return whether `folder` has all files, unchanged since their verification."""
        return bool(self.files) and all(file.is_at(folder / file.name) for file in self.files)


def folder_digest(files: Iterable[StoredFile]) -> str:
    """Return the digest of a folder: that of its files' digests and names, as `sha256sum *` prints them."""
    lines = sorted(f"{file.sha256}  {file.name}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
