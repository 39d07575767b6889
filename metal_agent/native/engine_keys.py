"""The keys of engines: a random one for each process, in a file that only the owner can read.

An engine listens on loopback, where every program and every web page of the owner's browser can reach it. Only the
proxy and the agent know its key. The file outlives the agent, so that the next one can ask the engine that it adopts.
"""

import contextlib
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

import structlog

_BYTES: Final = 32

log = structlog.get_logger()


class EngineKey(NamedTuple):
    """The key of one engine."""

    path: Path
    token: str

    def __repr__(self) -> str:
        return f"EngineKey({str(self.path)!r}, ...)"


class EngineKeys:
    """The keys in `folder`, each in a file whose name begins with the uid of its MetalProcess."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self, uid: str, earlier: EngineKey | None = None) -> EngineKey:
        """Create a key for the next engine of `uid`, in place of the `earlier` one, whose engine has ended.

        On a disk without room the earlier one serves again. Raises OSError if there is none.
        """
        key = EngineKey(self._folder / f"{uid}.{secrets.token_hex(4)}", secrets.token_urlsafe(_BYTES))
        try:
            self._write(key)
        except OSError as error:
            if earlier is None:
                raise
            log.warning("engine_key_reused", path=str(earlier.path), error=str(error))
            return earlier
        if earlier:
            self.remove(earlier.path)
        return key

    def read(self, path: str) -> EngineKey | None:
        """Return the key in the file `path`; None if it has none, or cannot be read."""
        try:
            token = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            log.warning("engine_key_not_read", path=path, error=str(error))
            return None
        return EngineKey(Path(path), token) if token else None

    def delete_others(self, paths: Collection[str]) -> None:
        """Delete all keys except those in the files `paths`: the engines of the others are gone."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                if str(path) not in paths:
                    self.remove(path)

    def remove(self, path: Path) -> None:
        """Delete the key in `path`; a failure is harmless, since its engine is gone."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("engine_key_not_deleted", path=str(path), error=str(error))

    def _write(self, key: EngineKey) -> None:
        """Write a key for its owner only. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(key.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{key.token}\n")
        except OSError:
            self.remove(key.path)
            raise
