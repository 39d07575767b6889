"""The lines of logs on this machine: the last ones, and those that are added."""

import codecs
import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from artifacts.durable import open_regular
from cli.output import show_raw
from metal_agent.native.log_files import previous_log_path

_PAUSE_SECONDS: Final = 0.5


def read_last_lines(path: Path, count: int | None) -> list[str]:
    """Return the last `count` lines, or all, of a log together with its earlier part beside it. Raises OSError."""
    last_lines: deque[str] = deque(maxlen=count)
    for part in (previous_log_path(path), path):
        if part == path or part.exists():
            with open_regular(part, follow_links=False) as file:
                last_lines.extend(line.decode(errors="replace") for line in file)
    return list(last_lines)


def follow_logs(prefixes: Mapping[Path, str]) -> None:
    """Print the lines that are added to logs for ever, each after the prefix of its log.

    A log may be missing at first, and be truncated or replaced. With an empty prefix, parts of lines are printed, too.
    """
    logs = [_FollowedLog(path, prefix) for path, prefix in prefixes.items()]
    while True:
        for log in logs:
            click.echo(log.read_new(), nl=False)
        time.sleep(_PAUSE_SECONDS)


class _FollowedLog:
    """A log of which new lines are read: what is there at first was read before."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._path, self._prefix = path, prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = ""
        """The beginning of a line whose end has not come yet."""
        self._file = None
        with contextlib.suppress(FileNotFoundError):
            self._file = open_regular(path, follow_links=False)
            self._file.seek(0, os.SEEK_END)

    def read_new(self) -> str:
        """Return the text that was added, for the output. Raises OSError."""
        added = ""
        if self._file:
            added = self._decoder.decode(self._file.read())
        with contextlib.suppress(FileNotFoundError):
            # Shorter than what was read: it was truncated. Another inode: it was replaced. Either way, or if it was
            # missing, read it from its beginning.
            now = self._path.stat()
            file = self._file
            if file is None or now.st_size < file.tell() or now.st_ino != os.fstat(file.fileno()).st_ino:
                if file:
                    file.close()
                self._file = open_regular(self._path, follow_links=False)
        return self._add_prefix(show_raw(added)) if self._prefix else show_raw(added)

    def _add_prefix(self, added: str) -> str:
        """Return the whole lines of the text with the prefix; the rest is kept until its end comes."""
        *lines, self._unfinished = (self._unfinished + added).split("\n")
        return "".join(f"{self._prefix}{line}\n" for line in lines)
