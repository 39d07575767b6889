"""Locks on files and folders: the kernel keeps one for each process with its descriptor, and frees it at the end."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def try_lock(descriptor: int) -> bool:
    """Lock an open file; return False if another process has locked it. Raises OSError: it cannot be locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock_folder(folder: Path, operation: int) -> int | None:
    """Lock a folder and return the descriptor of the lock; None when the folder is gone or the lock is refused.

    `operation` has the flags of flock(2): LOCK_SH to use the folder, LOCK_EX to rename or delete it, and LOCK_NB.
    Without LOCK_NB the call waits, but not long: an exclusive lock is held only while its owner renames the folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None

    try:
        fcntl.flock(descriptor, operation)
        # The folder may have been renamed before the lock was taken.
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def is_in_use(folder: Path) -> bool:
    """Return whether any process holds a lock on the folder; also True for a folder that is gone."""
    descriptor = try_lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


@contextlib.contextmanager
def protect_from_eviction(folder: Path) -> Iterator[None]:
    """Make `folder` and lock it, so that an unfinished download is not evicted to make room for another."""
    descriptor = None
    # None: another process renamed or deleted the folder before it was locked, so make it again.
    while descriptor is None:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = try_lock_folder(folder, fcntl.LOCK_SH)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.utime(descriptor)  # the folder's time records its last use
        os.close(descriptor)
