"""Keeps logs small while they are written, for months: those of engines and proxy, and the agent's own.

Whoever writes a log has its file open and outlives the agent, so that no pipe and no new name can come between: the
last part is copied and the file cut to nothing in place, which writers that append do not notice. What is written in
the moment between the two is lost, and while no agent runs a log grows.
"""

import fcntl
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final

import structlog

LOOK_SECONDS: Final = 10.0
"""Between two looks at the sizes: a log is larger by what is written meanwhile."""
MOST_BYTES: Final = 16 << 20
KEPT_BYTES: Final = 4 << 20
"""Of the end of a log that is cut."""
KEPT_LOGS: Final = 32
"""Of engines that are gone."""

log = structlog.get_logger()


def previous(path: Path) -> Path:
    """Name the file with what a log had before it was cut, or before its engine was started again."""
    return path.with_suffix(".previous.log")


def tend(folder: Path, written: Collection[Path]) -> None:
    """Cut what grew too large in `folder`, and delete the oldest of what nobody writes any more. Blocks.

    Args:
        folder: where logs are.
        written: those that a live process has open.
    """
    for path in written:
        try:
            if path.stat().st_size > MOST_BYTES:
                _cut(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("cannot cut a log", path=str(path), error=str(error))
    needed = {*written, *map(previous, written)}
    try:
        old = [path for path in folder.glob("*.log") if path not in needed]
        for path in sorted(old, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT_LOGS:]:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot clear up old logs", folder=str(folder), error=str(error))


def tend_own(descriptor: int) -> None:
    """Cut the agent's own log, where `descriptor` is a file to which is appended, as launchd opens it."""
    status = os.fstat(descriptor)
    appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
    if stat.S_ISREG(status.st_mode) and appends and status.st_size > MOST_BYTES:
        os.ftruncate(descriptor, 0)
        log.info("log cut: what was before is gone", bytes=status.st_size)


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-min(KEPT_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
        end = file.read()
        # First, as it also makes room on a disk that is full.
        file.truncate(0)
    previous(path).write_bytes(end)
    log.info("log cut", path=str(path), kept_bytes=len(end))
