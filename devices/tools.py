"""Output of the system's tools: the only place where this package starts a program."""

import os
import shutil
import subprocess
from collections.abc import Mapping

_TIMEOUT_SECONDS = 5.0
_HOMEBREW = ("/opt/homebrew/bin", "/usr/local/bin")
"""Homebrew's folders on Apple Silicon and on Intel; the PATH of a service that launchd starts has neither."""


def find_program(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of the program `name` on PATH or in Homebrew's folders, or None."""
    folders = [environment.get("PATH", os.defpath), *_HOMEBREW]
    return shutil.which(name, path=os.pathsep.join(folders))


def output(*argv: str, with_errors: bool = False, timeout_seconds: float = _TIMEOUT_SECONDS) -> str:
    """Run `argv`, with a full path and no locale, and return its output. Raises OSError when it fails.

    `with_errors` includes standard error: some tools print their version there.
    """
    try:
        result = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if with_errors else subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            check=True,
            env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
            # True would fork, and a fork of a macOS process with threads may crash. Our files are not inheritable.
            close_fds=False,
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"{argv[0]} failed: {error}") from error

    # Empty output is no answer.
    if not result.stdout.strip():
        raise OSError(f"{argv[0]} printed nothing")
    return result.stdout


def output_or_empty(*argv: str) -> str:
    """Return the tool's output, or "" if it failed."""
    try:
        return output(*argv)
    except OSError:
        return ""
