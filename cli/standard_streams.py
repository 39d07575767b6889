"""Standard streams of a command: closed streams are replaced, and a failed write ends without a traceback."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MODES: Final = {"stdin": "r", "stdout": "w", "stderr": "w"}


@contextlib.contextmanager
def usable_streams() -> Iterator[None]:
    """Run a command with three streams, and end it with exit code 1 if its output cannot be written.

    Python has None for a stream that is closed, to which `print(file=sys.stderr)` prefers standard output. It writes
    what it has buffered after everything else, where a failure is an `Exception ignored` and exit code 120.
    """
    for name, mode in _MODES.items():
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - open until the end
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            # Python would try again at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno != errno.EPIPE:  # a reader that has read enough, such as `head`, is no failure
                print(f"Error: standard output: {error.strerror}", file=sys.stderr)
            sys.exit(1)
