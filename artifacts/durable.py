"""State files: small JSON files that are complete or absent, even after a power failure.

Downloads and agents keep a few hundred bytes each across restarts: one file per object, replaced atomically. A damaged
file is set aside and logged, so that it never prevents a start. A file that cannot be read raises an error, because it
must not be treated as absent.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

_MOST_BYTES: Final = 256 * 1024 * 1024
"""The longest file that is read, far longer than any that is written."""

T = TypeVar("T")


def write(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON, readable by the owner only. Raises OSError; then the old file is kept."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.new")
    # A leftover temporary file, of an interrupted write or of another user, must not lend its mode to a secret value.
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, each for the owner only, unless they exist. Raises OSError."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def read(path: Path, type_: type[T]) -> T | None:
    """Return the value that `write` stored, or None if the file is absent or damaged; log and set aside a damaged file.

    Raises OSError when the file cannot be read.
    """
    try:
        return msgspec.json.decode(_read_bytes(path), type=type_)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        aside = path.with_name(f".{path.name}.damaged")
        # Imported only here, since structlog imports rich: a third of the start of a Job that fetches weights.
        import structlog  # noqa: PLC0415

        log = structlog.get_logger()
        log.warning("damaged_state_file_ignored", path=str(path), kept_as=str(aside), error=str(error))
        path.replace(aside)
        return None


def open_regular(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a file to read it, without waiting. Raises OSError, also if it is a pipe, a device or a folder.

    Root reads the files of other users, who may put anything in their place: the open of a pipe waits for a writer, and
    a device has no end. Without `follow_links`, a symbolic link is an error, too.
    """
    extra = os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | extra))  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def _read_bytes(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError, also if it is too long."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"it is longer than {_MOST_BYTES} bytes", str(path))
        return file.read(_MOST_BYTES)


def sync_folder(path: Path) -> None:
    """Flush the names in the folder `path` to disk, as after a rename. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
