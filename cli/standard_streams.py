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
    """Give a command its three standard streams, and exit with code 1 if its output cannot be written.

    * A stream that is closed is None in Python, and `print(file=None)` would write to standard output instead: it is
      opened to the null device.
    * Python writes buffered output at the very end, where a failure is only an `Exception ignored` and exit code 120:
      it is written here.
    """
    # _MODES: the modes in which the three streams are opened, by name
    for name, mode in _MODES.items():
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - open until the end

    # Run the command, then write its output.
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            # Python would try again at its end: what is left goes to the null device.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno != errno.EPIPE:  # a reader that has read enough, such as `head`, is no failure
                print(f"Error: standard output: {error.strerror}", file=sys.stderr)
            sys.exit(1)
