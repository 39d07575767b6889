"""What a tool of the system prints: the one way in which this package starts a program."""

import os
import subprocess

_TIMEOUT_SECONDS = 5.0


def output(*argv: str, with_errors: bool = False) -> str:
    """Run `argv`, with a full path and no locale, and return what it prints. Raises OSError when it does not tell.

    `with_errors` takes what it says on standard error too: some tools tell their version there.
    """
    try:
        result = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if with_errors else subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=True,
            env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
            # Otherwise it forks, and a fork of a macOS process with threads may crash. Ours are not inheritable anyway.
            close_fds=False,
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"{argv[0]} does not tell: {error}") from error
    if not result.stdout.strip():
        raise OSError(f"{argv[0]} tells nothing")
    return result.stdout


def told(*argv: str) -> str:
    """What a tool prints, for one who can do without; nothing is known of what it does not tell."""
    try:
        return output(*argv)
    except OSError:
        return ""
