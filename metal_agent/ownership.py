"""Who runs what is in a state folder: one agent or one `pomona up`, and how the latter makes way for the former.

The lock is the system's, which gives it back however its owner ends. What is written beside it only says whom to ask: a
`pomona up` that is asked leaves its engines running, so that an owner who joins a cluster waits for nothing twice.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Final

import msgspec
import structlog

from kube.errors import ApiError, Unreachable
from metal_agent.handle import Identity
from metal_agent.spawn import identify
from metal_agent.start import StartError

HAND_OVER: Final = signal.SIGUSR1
"""Asks a `pomona up` to leave everything running and to end."""
HAND_OVER_SECONDS: Final = 20.0
_PAUSE_SECONDS: Final = 0.05

log = structlog.get_logger()


class Owner(msgspec.Struct, frozen=True):
    """What the owner of a state folder writes into the lock file."""

    identity: Identity
    standalone: bool = False
    """It is a `pomona up`, which can be asked to hand over."""


@contextlib.contextmanager
def own(folder: Path, *, standalone: bool = False) -> Iterator[None]:
    """Own the state folder while the context lasts; the system gives it back however its owner ends.

    Raises:
        StartError: another has it, or it cannot be made.
    """
    with _open(folder) as lock:
        if not _is_taken(lock, folder):
            owner = _owner(lock)
            who = "`pomona up`" if owner and owner.standalone else "agent"
            pid = f" (process {owner.identity.pid})" if owner else ""
            raise StartError(f"another {who}{pid} uses --state-dir {folder}: stop it, or give another folder")
        # Only whom to ask: a full disk, or a system that does not tell, is no reason to leave engines alone.
        with contextlib.suppress(OSError):
            os.ftruncate(lock.fileno(), 0)
            if identity := identify(os.getpid()):
                os.write(lock.fileno(), msgspec.json.encode(Owner(identity, standalone)))
        yield


async def take_over(folder: Path, prove: Callable[[], Awaitable[None]]) -> None:
    """Where a `pomona up` has the folder, have it hand over; anybody else is left to `own`, which refuses.

    `prove` shows first that whoever asks can serve in its place, and raises what the API server says if not.

    Raises:
        StartError: the folder cannot be used, the API server does not take this host, or the `pomona up` does not let
            go of the folder.
    """
    with _open(folder) as lock:
        if _is_taken(lock, folder):
            return
        owner = _owner(lock)
        if owner is None or not owner.standalone or not _lives(owner):
            return
        try:
            await prove()
        except (ApiError, Unreachable) as error:
            raise StartError(
                f"the API server does not take this host: {error}; `pomona up` (process {owner.identity.pid}) goes on "
                "serving: mend that, then start the agent again"
            ) from error
        log.info("asking `pomona up` to hand over", pid=owner.identity.pid)
        try:
            os.kill(owner.identity.pid, HAND_OVER)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise StartError(
                f"`pomona up` (process {owner.identity.pid}) of another user uses --state-dir {folder}: end it with "
                "Ctrl-C, or give another folder"
            ) from error
        try:
            async with asyncio.timeout(HAND_OVER_SECONDS):
                while not _is_taken(lock, folder):  # noqa: ASYNC110 - the system tells nobody that a lock is free
                    await asyncio.sleep(_PAUSE_SECONDS)
        except TimeoutError as error:
            raise StartError(
                f"`pomona up` (process {owner.identity.pid}) did not hand over --state-dir {folder} within "
                f"{HAND_OVER_SECONDS:.0f} s: end it with Ctrl-C"
            ) from error


def _open(folder: Path) -> IO[bytes]:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return (folder / "agent.lock").open("a+b")
    except OSError as error:
        raise StartError(f"cannot use --state-dir {folder}: {error}") from error


def _is_taken(lock: IO[bytes], folder: Path) -> bool:
    """Try to take the lock; it is given back when the file is closed. Raises StartError where there are no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StartError(f"cannot lock --state-dir {folder}: {error}: use a local disk") from error
    return True


def _lives(owner: Owner) -> bool:
    """Whether its pid is still its own, for certain: what an earlier owner wrote may stand there for a moment."""
    try:
        return identify(owner.identity.pid) == owner.identity
    except OSError:
        return False


def _owner(lock: IO[bytes]) -> Owner | None:
    lock.seek(0)
    try:
        return msgspec.json.decode(lock.read(), type=Owner)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
