"""Small files that are whole or absent, whenever the power fails.

What a download or an agent must remember over its own death is a few hundred bytes each: a file per thing, replaced
atomically. A file that makes no sense is set aside and reported, never a reason not to start; one that cannot be read
just now says nothing, least of all that there is none.
"""

import os
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

log = structlog.get_logger()

T = TypeVar("T")


def write(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON, readable by the owner only. Raises OSError, and then the old file stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def read(path: Path, type_: type[T]) -> T | None:
    """Read what `write` wrote; None when there is none, or when it is damaged, which is logged and set aside.

    Raises OSError when it cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        aside = path.with_name(f".{path.name}.damaged")
        log.warning("ignoring a damaged state file", path=str(path), kept_as=str(aside), error=str(error))
        path.replace(aside)
        return None


def sync_folder(path: Path) -> None:
    """Have what was renamed in the folder `path` on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
