"""Ownership of a state folder by one agent or one `pomona up`, hand-over to an agent, and the identity of its agent.

Ownership is a lock of the operating system, which releases it however the owner ends. The lock file only names the
process to signal: a `pomona up` that gets the signal leaves its engines running, so that a host that joins a cluster
does not load its models again.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Final

import msgspec
import structlog

from artifacts import durable
from artifacts.folder_lock import try_lock
from devices import host
from kube.errors import ApiError, Unreachable
from metal_agent.native.engine_handle import ProcessIdentity
from metal_agent.native.process import identify_process, is_running
from metal_agent.options import OptionsError, StartError

HAND_OVER: Final = signal.SIGUSR1
"""Signal to a `pomona up`: leave everything running, and end."""
HAND_OVER_SECONDS: Final = 20.0
_PAUSE_SECONDS: Final = 0.05
_OTHERS: Final = 0o077
"""Rights of group and others: the folder has tokens, keys and the records that processes are adopted by."""

log = structlog.get_logger()


class Owner(msgspec.Struct, frozen=True):
    """The content of the lock file: the process that owns the state folder."""

    identity: ProcessIdentity
    standalone: bool = False
    """The owner is a `pomona up`, which can hand over."""


@contextlib.contextmanager
def own_folder(folder: Path, *, standalone: bool = False) -> Iterator[None]:
    """Own the state folder while the context lasts; the system releases the lock however its owner ends.

    The lock file then names this process.

    Raises:
        StartError: another process owns it, or it cannot be made.
    """
    with _open_lock(folder) as lock:
        if not _try_lock(lock, folder):
            owner = _read_owner(lock)
            kind = "`pomona up`" if owner and owner.standalone else "agent"
            pid = f" (process {owner.identity.pid})" if owner else ""
            raise StartError(f"another {kind}{pid} uses --state-dir {folder}: stop it, or give another folder")

        # The file only names the owner: a full disk, or a system that hides processes, must not prevent the start.
        with contextlib.suppress(OSError):
            os.ftruncate(lock.fileno(), 0)
            if identity := identify_process(os.getpid()):
                os.write(lock.fileno(), msgspec.json.encode(Owner(identity, standalone)))
        yield


async def take_over(folder: Path, check_can_serve: Callable[[], Awaitable[None]]) -> None:
    """Make a `pomona up` that owns the folder end and leave its engines to this agent.

    Nothing is done if no process has the lock of the folder. Another owner than `pomona up` keeps it, and `own_folder`
    raises later. `check_can_serve` is called first, and raises the error of the API server if this agent could not
    serve in its place.

    Raises:
        StartError: the folder cannot be used, the API server refuses this host, or the `pomona up` does not
            release the folder.
    """
    with _open_lock(folder) as lock:
        if _try_lock(lock, folder):
            return  # nobody owns the folder; closing the file gives the lock back
        owner = _read_owner(lock)
        if owner is None or not owner.standalone or not _is_alive(owner):  # no `pomona up` that could end
            return

        # Can this agent serve in its place?
        try:
            await check_can_serve()
        except (ApiError, Unreachable) as error:
            raise StartError(
                f"the API server refuses this host: {error}; `pomona up` (process {owner.identity.pid}) goes on "
                "serving: correct that, then start the agent again"
            ) from error

        log.info("hand_over_requested", pid=owner.identity.pid)
        try:
            os.kill(owner.identity.pid, HAND_OVER)
        except ProcessLookupError:
            pass  # it has just ended
        except PermissionError as error:
            raise StartError(
                f"`pomona up` (process {owner.identity.pid}) of another user uses --state-dir {folder}: end it with "
                "Ctrl-C, or give another folder"
            ) from error

        # Wait until it has released the folder.
        try:
            async with asyncio.timeout(HAND_OVER_SECONDS):
                while not _try_lock(lock, folder):  # noqa: ASYNC110 - the system has no event for a lock that is free
                    await asyncio.sleep(_PAUSE_SECONDS)
        except TimeoutError as error:
            raise StartError(
                f"`pomona up` (process {owner.identity.pid}) did not hand over --state-dir {folder} within "
                f"{HAND_OVER_SECONDS:.0f} s: end it with Ctrl-C"
            ) from error


def load_identity(folder: Path) -> str:
    """Return the random identity of the agent with this state folder; it is made and kept there at the first start.

    Raises OSError if it cannot be read or written.
    """
    path = folder / "identity.json"
    identity = durable.read(path, str)
    if identity is None:
        identity = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        durable.write(path, identity)
    return identity


def identify_agent(folder: Path) -> str:
    """Return the name under which this agent on this machine holds the Lease of its host.

    A copy of the folder or of the machine has another one. Raises OSError if the folder cannot be read or written.
    """
    identity = load_identity(folder)
    machine_and_folder = f"{host.machine_id() or ''} {folder.stat().st_ino}"
    return f"{identity}-{hashlib.sha256(machine_and_folder.encode()).hexdigest()[:8]}"


def _open_lock(folder: Path) -> IO[bytes]:
    """Open the lock file of the folder, which is made if it is missing. Raises StartError."""
    try:
        durable.make_folder(folder)
        _ensure_private(folder)
        descriptor = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        return os.fdopen(descriptor, "a+b")
    except OSError as error:
        raise StartError(f"cannot use --state-dir {folder}: {error}") from error


def _ensure_private(folder: Path) -> None:
    """Refuse a folder of another user, who could plant files that this one acts on; remove the rights of all others.

    Raises StartError and OSError.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise OptionsError(
            f"--state-dir {folder} belongs to another user (uid {status.st_uid}, this one is {os.geteuid()}): start as "
            "that user, or give another folder"
        )
    if status.st_mode & _OTHERS:
        folder.chmod(status.st_mode & 0o7700)
        log.warning("state_folder_closed_for_others", path=str(folder), mode_before=oct(status.st_mode & 0o777))


def _try_lock(lock: IO[bytes], folder: Path) -> bool:
    """Try to take the lock; closing the file releases it. Raises StartError if the file system has no locks."""
    try:
        return try_lock(lock.fileno())
    except OSError as error:
        raise OptionsError(f"cannot lock --state-dir {folder}: {error}: use a local disk") from error


def _is_alive(owner: Owner) -> bool:
    """Return True if `owner` is certainly still alive: the file may name an earlier owner for a moment."""
    try:
        return is_running(owner.identity)
    except OSError:
        return False


def _read_owner(lock: IO[bytes]) -> Owner | None:
    """Return the owner that the lock file names; None if it names none."""
    lock.seek(0)
    try:
        return msgspec.json.decode(lock.read(), type=Owner)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
