"""Output of the system's tools: the only place where this package starts a program."""

import os
import subprocess

_TIMEOUT_SECONDS = 5.0


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
    if not result.stdout.strip():
        raise OSError(f"{argv[0]} printed nothing")
    return result.stdout


def output_or_empty(*argv: str) -> str:
    """Return the tool's output, or "" if it failed."""
    try:
        return output(*argv)
    except OSError:
        return ""
